"""`decode`: one session, out of core, against other ways to do the same in the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tools.bench.arena import Arena
from tools.bench.draft_step import NOTE, measure_draft_step
from tools.bench.figures import absent_arm, arm_object, differing, speedup
from tools.bench.protocol import Kind
from tools.bench.results import Options, Result, begin_result
from tools.bench.shown import Shown
from tools.bench.sizing import sized
from tools.bench.turns import Arm, take_turns

ARMS = ("paceline", "sequential", "plain", "transformers", "llamacpp")
OURS = "paceline"
SEQUENTIAL_NOTE = (
    "sequential: a ring of one slot and nothing drafted ahead; all that overlaps is that the next"
    " piece is read while drafts are made and while resident layers are computed"
)


class Contest(msgspec.Struct, frozen=True):
    """Which arms there are, and of what kind; ours has to give the `reference` arm's tokens."""

    what: str
    arms: tuple[str, ...]
    kinds: Mapping[str, Kind]
    reference: str


DECODE = Contest(
    "decode",
    ARMS,
    {
        "paceline": "paceline",
        "sequential": "sequential",
        "plain": "plain",
        "transformers": "transformers",
        "llamacpp": "llamacpp",
    },
    reference="plain",
)


def measure_decode(
    options: Options, names: Sequence[str], shown: Shown, contest: Contest = DECODE
) -> Result:
    """Run the named arms (paceline is always one of them) and compare.

    Raises UsageError for what is wrong with the options, ArmError if our own arm fails.
    """
    options = sized(options, shown)
    with Arena(options.settings, shown, options.gguf) as arena:
        arms: dict[str, Arm] = {}
        skipped: dict[str, str] = {}
        for name in contest.arms:
            if name not in names and name != OURS:
                skipped[name] = "not asked for (--arms)"
            elif (why := arena.missing(contest.kinds[name])) is not None:
                skipped[name] = why
            else:
                arms[name] = arena.arm(contest.kinds[name], required=name == OURS)
        turns = take_turns(arms, options.prompts, options.repeats, options.max_tokens, shown.tell)
        model, loaded = arena.settings.model or "", arms[OURS].loaded
        step = measure_draft_step(Path(model), None if loaded is None else loaded.plan, shown)
        result = begin_result(contest.what, options, model, arms, turns)
    for name in contest.arms:
        if name in arms:
            result["arms"][name] = arm_object(name, arms[name], turns)
        else:
            result["arms"][name] = absent_arm(skipped=skipped[name])
    speedups = {name: speedup(turns, OURS, name) for name in contest.arms if name != OURS}
    differ = differing(turns, OURS, contest.reference)
    if step is not None:
        result["notes"].append(NOTE)
    if "sequential" in arms:
        result["notes"].append(SEQUENTIAL_NOTE)
    told = {
        "draft_step": step,
        "speedup_over": {name: found and found.median for name, found in speedups.items()},
        "speedup_spread": {n: [f.low, f.high] for n, f in speedups.items() if f is not None},
        "roofline": result["arms"][OURS]["roofline"],
        "reference": contest.reference,
        "lossless": None if differ is None else not differ,
        "differing_prompts": differ,
    }
    result["arms"][OURS] |= told
    return result | told
