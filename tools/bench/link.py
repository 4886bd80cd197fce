"""`link`: the slow link's own bandwidth, and what plain streaming makes of it.

Plain streaming, since with drafts the link rests while they are made, by design: how well the two
overlap is another measurement.
"""

from __future__ import annotations

from routing.errors import OptionError
from tools.bench.arena import Arena
from tools.bench.figures import arm_object, bits_per_weight
from tools.bench.results import Options, Result, begin_result
from tools.bench.shown import Shown
from tools.bench.sizing import sized
from tools.bench.turns import take_turns

ARM = "plain"


def measure_link(options: Options, shown: Shown) -> Result:
    """Sweeps beside plain aligned reads, in turn.

    Raises UsageError for what is wrong with the options, ArmError if the arm fails.
    """
    options = sized(options, shown)
    with Arena(options.settings, shown) as arena:
        arms = {ARM: arena.arm("plain", required=True)}
        turns = take_turns(arms, options.prompts, options.repeats, options.max_tokens, shown.tell)
        result = begin_result("link", options, arena.settings.model or "", arms, turns)
    loaded, runs = arms[ARM].loaded, [turn.runs[ARM] for turn in turns]
    assert loaded is not None and loaded.plan is not None
    if loaded.plan.step == "resident":
        expected = "a budget that the model does not fit: all of it is resident, nothing streamed"
        raise OptionError("--memory", options.settings.memory, expected)
    made = arm_object(ARM, arms[ARM], turns)
    made["bits_per_weight_streamed"] = bits_per_weight(runs[-1], loaded.plan)
    result["arms"][ARM] = made
    keys = ("raw_gbps", "sweep_gbps", "saturation", "bits_per_weight_streamed", "bytes_per_sweep")
    return result | {key: made[key] for key in keys}
