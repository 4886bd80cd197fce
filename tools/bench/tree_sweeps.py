"""How long the engine's own sweeps take at --memory: what draft-time budgets are shares of."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import msgspec

from pipeline.settings import Settings
from tools.bench.figures import Figure, figure
from tools.bench.prompts import Prompt
from tools.bench.protocol import Ask, Job, Loaded, Run
from tools.bench.turns import WARM_UP
from tools.bench.workers import ArmError, Worker

TOKENS = 24
"""The longest answer that sweeps are timed in."""


class SweepTimes(msgspec.Struct, frozen=True):
    """Sweeps of one format's plan, in rounds with drafts.

    `plan` is the plan's step. `draft_step_s` is the engine's own, beside a link that is filling the
    ring (None: it did not draft).
    """

    sweep_s: Figure
    plan: str | None
    bytes_per_sweep: int | None
    draft_step_s: float | None
    raw_gbps: float | None


def measure_sweeps(
    settings: Settings,
    forms: Sequence[str],
    prompts: Sequence[Prompt],
    answers: int,
    tell: Callable[[str], None],
) -> dict[str, SweepTimes]:
    """Of an engine a format, each a process, that take turns to give `answers` answers each.

    In processes of their own: threads that an engine leaves behind would slow what is timed later.
    Raises ArmError and UsageError; no process is left.
    """
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-"))
        workers: dict[str, Worker] = {}
        plans: dict[str, str | None] = {}
        for form in forms:
            tell(f"sweeps: an engine with {form}")
            # Drafting ahead takes a core from the sweep that is measured.
            asked = msgspec.structs.replace(settings, substitute=form, draft_ahead=False)
            workers[form] = Worker(Job("paceline", asked, scratch))
            stack.callback(workers[form].close)
            plan = workers[form].hear(Loaded).plan
            plans[form] = None if plan is None else plan.step
            workers[form].ask(WARM_UP)
        runs: dict[str, list[Run]] = {form: [] for form in forms}
        for number in range(answers):
            prompt = prompts[number % len(prompts)]
            for form, worker in workers.items():
                tell(f"sweeps: {form}, {prompt.id}")
                runs[form].append(worker.ask(Ask(prompt.prompt, TOKENS)))
        return {form: _times(plans[form], found) for form, found in runs.items()}


def plan_notes(sweeps: Mapping[str, SweepTimes]) -> list[str]:
    """What has to be known of the plans that were timed."""
    notes = []
    resident = [form for form, one in sweeps.items() if one.plan == "resident"]
    if resident:
        notes.append(f"nothing is streamed at this budget: {', '.join(resident)}")
    plain = [form for form, one in sweeps.items() if one.plan == "plain"]
    if plain:
        told = "no room for drafts at this budget, so sweeps of one row were timed"
        notes.append(f"{told}: {', '.join(plain)}")
    return notes


def _times(plan: str | None, runs: Sequence[Run]) -> SweepTimes:
    spans = [run.spans for run in runs if run.spans is not None]
    sweeps = figure(one.sweep_s for one in spans)
    if sweeps is None:
        raise ArmError("No answer went on after its first token, so no sweep was timed.")
    steps = figure(one.draft_step_s for one in spans)
    raw = figure(run.raw_gbps for run in runs)
    return SweepTimes(
        sweeps,
        plan,
        runs[-1].bytes_per_sweep,
        None if steps is None else steps.median,
        None if raw is None else raw.median,
    )
