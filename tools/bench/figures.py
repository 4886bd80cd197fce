"""Medians with their spread, and the objects of a result. Pure.

A figure that was not measured is None. The spread of a figure is the least and the most of what
its median was taken of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from tools.bench.protocol import PlanFacts, Run
from tools.bench.turns import Arm, Turn


class Figure(NamedTuple):
    """Of several measurements of the same thing."""

    median: float
    low: float
    high: float


def figure(values: Iterable[float | None]) -> Figure | None:
    """Of those that were measured; None if none was."""
    known = [value for value in values if value is not None]
    return Figure(median(known), min(known), max(known)) if known else None


def median_of(found: Figure | None) -> float | None:
    """None of what was not measured."""
    return None if found is None else found.median


def ratio(one: float | None, other: float | None) -> float | None:
    """One over the other, where both were measured and the other is not 0."""
    return None if one is None or not other else one / other


def roofline(run: Run) -> float | None:
    """Tokens a second over what the link would allow if it were all: (tau + 1) tokens a sweep."""
    if run.tau is None or not run.bytes_per_sweep or run.raw_gbps is None:
        return None
    bound = (run.tau + 1) * run.raw_gbps * 1e9 / run.bytes_per_sweep
    return ratio(run.tokens_per_s, bound)


def saturation(run: Run) -> float | None:
    """What came over the link during sweeps, over the link's own bandwidth beside them."""
    return None if run.spans is None else ratio(run.spans.sweep_gbps, run.raw_gbps)


def bits_per_weight(run: Run, plan: PlanFacts) -> float | None:
    """Bits that cross the link for each streamed weight."""
    return ratio(8.0 * (run.bytes_per_sweep or 0), plan.streamed_weights) or None


MEASURES: dict[str, Callable[[Run], float | None]] = {
    "tokens_per_s": lambda run: run.tokens_per_s,
    "ttft_s": lambda run: run.ttft_s,
    "energy_j_per_token": lambda run: ratio(run.energy_j, run.tokens),
    "draft_s": lambda run: None if run.spans is None else run.spans.draft_s,
    "sweep_s": lambda run: None if run.spans is None else run.spans.sweep_s,
    "commit_s": lambda run: None if run.spans is None else run.spans.commit_s,
    "draft_step_s": lambda run: None if run.spans is None else run.spans.draft_step_s,
    "sweep_gbps": lambda run: None if run.spans is None else run.spans.sweep_gbps,
    "raw_gbps": lambda run: run.raw_gbps,
    "saturation": saturation,
    "roofline": roofline,
}
"""Figures of one run; an arm's is their median."""

ARM_KEYS = (
    *MEASURES,
    "peak_memory_bytes",
    "baseline_memory_bytes",
    "memory_limit_bytes",
    "group_peak_bytes",
    "tau",
    "tokens_per_round",
    "rounds",
    "bytes_per_sweep",
    "predicted_tokens_per_s",
    "measured_over_predicted",
)
"""What every arm's object has, null where it was not measured."""


def absent_arm(*, skipped: str | None = None, failed: str | None = None) -> dict[str, object]:
    """The object of an arm without figures, and why it has none."""
    return {
        **dict.fromkeys(ARM_KEYS),
        "spread": {},
        "plan": None,
        "runs": [],
        "skipped": skipped,
        "failed": failed,
    }


def arm_object(name: str, arm: Arm, turns: Sequence[Turn]) -> dict[str, object]:
    """The object of an arm that has run. `peak_memory_bytes` is above the baseline."""
    made = absent_arm(failed=arm.failed)
    mine = [(turn, turn.runs[name]) for turn in turns if name in turn.runs]
    runs = [run for _, run in mine]
    if not runs:
        return made
    figures = {key: figure(map(measure, runs)) for key, measure in MEASURES.items()}
    made |= {key: found and found.median for key, found in figures.items()}
    made["spread"] = {key: [f.low, f.high] for key, f in figures.items() if f is not None}
    made["peak_memory_bytes"] = max(run.peak_bytes for run in runs) - arm.baseline.anonymous
    made["baseline_memory_bytes"] = arm.baseline.anonymous
    made["memory_limit_bytes"] = arm.limit if arm.group_kind else None
    made["group_peak_bytes"] = arm.group_peak
    made["tau"] = tau = tau_of(runs)
    made["tokens_per_round"] = None if tau is None else tau + 1
    made["rounds"] = sum(run.rounds for run in runs if run.rounds) if tau is not None else None
    made["bytes_per_sweep"] = runs[-1].bytes_per_sweep
    made["plan"] = plan = None if arm.loaded is None else arm.loaded.plan
    predicted = None if plan is None else plan.tokens_per_s
    made["predicted_tokens_per_s"] = predicted
    made["measured_over_predicted"] = ratio(median_of(figures["tokens_per_s"]), predicted)
    made["runs"] = [_run_object(turn, run) for turn, run in mine]
    return made


def tau_of(runs: Iterable[Run]) -> float | None:
    """Accepted draft tokens a round over all of them; None if there was no round."""
    counted = [(run.tau, run.rounds) for run in runs if run.tau is not None and run.rounds]
    rounds = sum(count for _, count in counted)
    return sum(tau * count for tau, count in counted) / rounds if rounds else None


def _run_object(turn: Turn, run: Run) -> dict[str, object]:
    return {
        "repeat": turn.repeat,
        "prompt": turn.prompt.id,
        "tokens": run.tokens,
        "tau": run.tau,
        "rounds": run.rounds,
        **{key: measure(run) for key, measure in MEASURES.items()},
    }


def speedup(turns: Iterable[Turn], ours: str, other: str) -> Figure | None:
    """Ours over another arm's tokens a second, answer by answer."""
    return figure(
        ratio(turn.runs[ours].tokens_per_s, turn.runs[other].tokens_per_s)
        for turn in turns
        if ours in turn.runs and other in turn.runs
    )


def differing(turns: Iterable[Turn], ours: str, other: str) -> list[str] | None:
    """Prompts to which two arms gave different tokens; None if no prompt had both."""
    pairs = [
        (turn, turn.runs[ours], turn.runs[other])
        for turn in turns
        if {ours, other} <= turn.runs.keys()
    ]
    if not pairs:
        return None
    found = [turn.prompt.id for turn, one, two in pairs if one.token_ids != two.token_ids]
    return list(dict.fromkeys(found))
