"""`overlap`: how long a round takes over its longest stage, and what drafting ahead adds.

Were everything to overlap, a round would take as long as the longest of its three stages by
itself: the link with a sweep's bytes, the drafter with what was of use, the verifier with its
computing. The arm `no_ahead` drafts nothing while a tree is being verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from routing.errors import OptionError
from tools.bench.arena import Arena
from tools.bench.figures import Figure, arm_object, differing, figure, median_of, ratio, speedup
from tools.bench.protocol import Run
from tools.bench.results import Options, Result, begin_result
from tools.bench.shown import Shown
from tools.bench.sizing import sized
from tools.bench.turns import take_turns

OURS, WITHOUT = "paceline", "no_ahead"
STAGES = ("link", "draft", "verify")
NOTES = (
    "link: a sweep's bytes at the bandwidth of plain reads beside it; draft: steps of trees that"
    " were sent and, of what was drafted ahead, the part that was kept; verify: without waits for"
    " weights",
    "the limit is tau + 1 tokens in the time of the longest stage",
)


def stages_of(run: Run) -> dict[str, float | None]:
    """Seconds a round that each stage takes by itself."""
    spans = run.spans
    return {
        "link": ratio(run.bytes_per_sweep, run.raw_gbps and run.raw_gbps * 1e9),
        "draft": None if spans is None else spans.useful_draft_s,
        "verify": None if spans is None else spans.compute_s,
    }


def longest_two(run: Run) -> tuple[float | None, float | None]:
    """Seconds of the longest stage and of the next; unknown unless all three are known."""
    seconds = [one for one in stages_of(run).values() if one is not None]
    if len(seconds) < len(STAGES):
        return None, None
    longest, following, _ = sorted(seconds, reverse=True)
    return longest, following


def round_s(run: Run) -> float | None:
    """Mean seconds of a round; None where there was none."""
    return run.decode_s / run.rounds if run.rounds else None


def of_limit(run: Run) -> float | None:
    """Tokens a second over those of rounds as long as their longest stage."""
    limit = None if run.tau is None else ratio(run.tau + 1, longest_two(run)[0])
    return ratio(run.tokens_per_s, limit)


MEASURES: dict[str, Callable[[Run], float | None]] = {
    "round_s": round_s,
    "overlap_ratio": lambda run: ratio(round_s(run), longest_two(run)[0]),
    "balance": lambda run: ratio(*longest_two(run)),
    "of_limit": of_limit,
    "draft_ahead_kept": lambda run: run.ahead_kept,
}
"""Figures of one run; an arm's is their median."""


def measure_overlap(options: Options, shown: Shown) -> Result:
    """Both arms answer all prompts, in turn.

    Raises UsageError for what is wrong with the options, ArmError if our own arm fails.
    """
    options = sized(options, shown)
    with Arena(options.settings, shown) as arena:
        if arena.plan.step == "resident":
            expected = (
                "a budget that the model does not fit: all of it is resident, nothing streamed"
            )
            raise OptionError("--memory", options.settings.memory, expected)
        arms = {
            OURS: arena.arm("paceline", required=True),
            WITHOUT: arena.arm("no_ahead", required=False),
        }
        turns = take_turns(arms, options.prompts, options.repeats, options.max_tokens, shown.tell)
        result = begin_result("overlap", options, arena.settings.model or "", arms, turns)
    for name, arm in arms.items():
        made: Result = arm_object(name, arm, turns)
        found = overlap_object([turn.runs[name] for turn in turns if name in turn.runs])
        result["arms"][name] = made | found | {"spread": made["spread"] | found["spread"]}
    gain = speedup(turns, OURS, WITHOUT)
    told = overlap_object([turn.runs[OURS] for turn in turns])
    told["spread"] |= _spread({"draft_ahead_gain": gain})
    told["draft_ahead_gain"] = median_of(gain)
    told["differing_prompts"] = differing(turns, OURS, WITHOUT)
    result["notes"] += NOTES
    return result | told


def overlap_object(runs: Sequence[Run]) -> Result:
    """The figures of an arm: medians, with their spread under `spread` and `stage_spread`."""
    figures = {key: figure(map(measure, runs)) for key, measure in MEASURES.items()}
    stages = {name: figure(stages_of(run)[name] for run in runs) for name in STAGES}
    return {
        **{key: median_of(found) for key, found in figures.items()},
        "stage_s": {name: median_of(found) for name, found in stages.items()},
        "spread": _spread(figures),
        "stage_spread": _spread(stages),
    }


def _spread(figures: Mapping[str, Figure | None]) -> dict[str, list[float]]:
    return {key: [f.low, f.high] for key, f in figures.items() if f is not None}
