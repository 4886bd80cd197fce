"""Ours beside plain streaming at one setting: what `budgets` and `links` repeat, and its figures.

The settings come one after the other; within each the two arms take turns as in `decode`. An arm
that fails at one setting is told there, and the others are measured all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipeline.settings import Settings
from tools.bench.arena import Arena
from tools.bench.figures import (
    arm_object,
    bits_per_weight,
    differing,
    figure,
    median_of,
    ratio,
    speedup,
    tau_of,
)
from tools.bench.protocol import PlanFacts, Run
from tools.bench.results import Options, Result, begin_result
from tools.bench.turns import Arm, Turn, take_turns
from tools.bench.workers import ArmError

OURS, PLAIN = "paceline", "plain"


class Duel(NamedTuple):
    """Both arms at one setting, and what they answered."""

    arms: Mapping[str, Arm]
    turns: list[Turn]

    def runs(self, name: str) -> list[Run]:
        """Of one arm; none if it failed at once."""
        return [turn.runs[name] for turn in self.turns if name in turn.runs]

    def plan(self, name: str) -> PlanFacts | None:
        """Of one arm."""
        loaded = self.arms[name].loaded
        return None if loaded is None else loaded.plan


def measure_duel(
    arena: Arena, settings: Settings, options: Options, tell: Callable[[str], None]
) -> Duel:
    """Both arms answer all prompts. Raises UsageError or ArmError if no baseline can be had."""
    arms = {
        OURS: arena.arm("paceline", settings=settings),
        PLAIN: arena.arm("plain", settings=settings),
    }
    return Duel(arms, take_turns(arms, options.prompts, options.repeats, options.max_tokens, tell))


def duel_object(duel: Duel) -> dict[str, object]:
    """The figures of one setting: medians, with their spread under `spread`.

    `measured_over_predicted` holds our tokens a second against what our plan had predicted,
    `lossless` our tokens against plain's, for every prompt.
    """
    ours, plain = duel.runs(OURS), duel.runs(PLAIN)
    plan, plain_plan = duel.plan(OURS), duel.plan(PLAIN)
    predicted = None if plan is None else plan.tokens_per_s
    figures = {
        "tokens_per_s": figure(run.tokens_per_s for run in ours),
        "measured_over_predicted": figure(ratio(run.tokens_per_s, predicted) for run in ours),
        "plain_tokens_per_s": figure(run.tokens_per_s for run in plain),
        "speedup_over_plain": speedup(duel.turns, OURS, PLAIN),
    }
    tau, differ = tau_of(ours), differing(duel.turns, OURS, PLAIN)
    medians = {key: median_of(found) for key, found in figures.items()}
    return {
        "step": None if plan is None else plan.step,
        "substitute": None if plan is None else plan.substitute,
        "predicted_tokens_per_s": predicted,
        "tokens_per_round": None if tau is None else tau + 1,
        "tau": tau,
        "plain_step": None if plain_plan is None else plain_plan.step,
        "plain_predicted_tokens_per_s": None if plain_plan is None else plain_plan.tokens_per_s,
        **medians,
        "spread": {key: [f.low, f.high] for key, f in figures.items() if f is not None},
        "lossless": None if differ is None else not differ,
        "differing_prompts": differ,
        "failed": {name: arm.failed for name, arm in duel.arms.items() if arm.failed},
        **_streamed(plain, plain_plan),
    }


def duels_result(
    what: str, options: Options, model: str, duels: Mapping[str, Duel]
) -> tuple[Result, dict[str, dict[str, object]]]:
    """What a result of several duels has in common, and the figures of each by its key.

    The result's `arms` have an arm's object for every key. Raises ArmError if ours failed at all.
    """
    failed = [duel.arms[OURS].failed for duel in duels.values()]
    if failed and all(failed):
        raise ArmError(str(failed[0]))
    arms = {f"{name} {key}": arm for key, duel in duels.items() for name, arm in duel.arms.items()}
    turns = [turn for duel in duels.values() for turn in duel.turns]
    result = begin_result(what, options, model, arms, turns)
    result["arms"] = {
        name: {key: arm_object(name, duel.arms[name], duel.turns) for key, duel in duels.items()}
        for name in (OURS, PLAIN)
    }
    return result, {key: duel_object(duel) for key, duel in duels.items()}


def _streamed(runs: list[Run], plan: PlanFacts | None) -> dict[str, object]:
    """Of plain streaming: what crosses the link, and how fast."""
    reached = figure(None if run.spans is None else run.spans.sweep_gbps for run in runs)
    last = runs[-1] if runs else None
    return {
        "plain_bytes_per_sweep": None if last is None else last.bytes_per_sweep,
        "plain_sweep_gbps": median_of(reached),
        "bits_per_weight_streamed": (
            None if last is None or plan is None else bits_per_weight(last, plan)
        ),
    }
