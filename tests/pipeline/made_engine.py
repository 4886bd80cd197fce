"""Engines over made models, with everything about them in the test's hands."""

from __future__ import annotations

import gc
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from pipeline.claims import Allowances, Claim, logit_row_bytes
from pipeline.engine import Engine
from pipeline.planner import Plan, plan, smallest_budget
from pipeline.preparation import Prepared
from pipeline.runtime import Runtime
from pipeline.settings import Settings
from stages.copying import RoundTimes
from stages.cores import Cores
from stages.device import CpuDevice, Device
from stages.drafter import Drafter
from stages.loading import OpenedModel
from stages.pace import StepTimes, SweepPace
from stages.progress import SilentProgress
from stages.shapes import ModelShape
from stages.simulated import SimulatedAccelerator
from stages.streams import random_delay
from stages.tokenizer import Tokenizer

# Loading a model collects garbage, which takes long on a heap full of modules.
gc.collect()
gc.freeze()

ALLOWANCES = Allowances(workspace_bytes=0, embedding_rows=16, prefill_rows=12, ahead_rows=9)
"""Small, so that short prompts go through several packs and the embedding cache turns over."""


def make_plan(
    opened: OpenedModel,
    *,
    substitute: str = "int8",
    context: int = 96,
    sessions: int = 1,
    spare: int = 0,
    width: int = 3,
    depth: int | None = None,
    budget: int | None = None,
    whole: bool = True,
    logit_rows: int | None = None,
    ahead: int = ALLOWANCES.ahead_rows,
    slots: tuple[int, ...] = ALLOWANCES.slots,
) -> Plan:
    """The plan of the smallest budget, and `spare` bytes more.

    width, depth and budget (nodes in all) overwrite the tree's: any tree must give the same tokens.
    With `whole` there is a row of logits for every node, whatever the budget; without it as many as
    the plan affords, or `logit_rows`. `ahead`: nodes that may be run while a tree is being
    verified; with 0 nothing is drafted ahead. `slots`: see Allowances.
    """
    allowances = msgspec.structs.replace(ALLOWANCES, width=width, ahead_rows=ahead, slots=slots)
    kind = {"context": context, "sessions": sessions, "substitute": substitute}
    allow_plain = substitute == "none"
    least = smallest_budget(opened.shape, allow_plain=allow_plain, allowances=allowances, **kind)  # type: ignore[arg-type]
    made = plan(
        opened.shape, least + spare, 1.0, allow_plain=allow_plain, allowances=allowances, **kind
    )  # type: ignore[arg-type]
    if depth is not None:
        # Where all weights fit the draft would be the model itself; more layers make room for one.
        form = None if substitute == "lookup" else substitute
        assert made.placement.substitute == form, "no substitutes, so nothing is speculated"
        nodes = depth * width if budget is None else budget
        rows = nodes + 1 + ahead if nodes and form else 0
        placement = msgspec.structs.replace(made.placement, tree_budget=nodes, draft_rows=rows)
        made = msgspec.structs.replace(
            made, placement=placement, depth=depth, width=width if nodes else 0
        )
    if logit_rows is None and not whole:
        return made
    return with_rows(made, opened.shape, logit_rows or made.placement.tree_budget + 1)


def with_rows(made: Plan, shape: ModelShape, rows: int) -> Plan:
    """The plan with so many whole rows of logits, whatever the budget."""
    more = logit_row_bytes(shape, made.placement.sessions) * (rows - made.placement.logit_rows)
    claims = tuple(
        Claim(claim.name, claim.nbytes + max(0, more) * (claim.name == "logit rows"))
        for claim in made.claims
    )
    placement = msgspec.structs.replace(made.placement, logit_rows=rows)
    return msgspec.structs.replace(
        made, placement=placement, claims=claims, budget=made.budget + max(0, more)
    )


@asynccontextmanager
async def made_engine(
    directory: Path,
    *,
    device: str = "cpu",
    delays: int | None = None,
    poison: bool = True,
    stop_ids: tuple[int, ...] = (),
    queue: int = 64,
    link_gbps: float = 4.0,
    plan: Plan | None = None,
    dies: bool = False,
    asked: Any = "auto",
    timed: bool = False,
    **kind: object,
) -> AsyncIterator[Engine]:
    """An engine over the model in `directory`, checked for conservation when it has closed.

    `delays` seeds random pauses before every piece of work and every read; `kind` goes to
    make_plan; `asked` is the substitute asked for. Drafts cost nothing unless they are `timed`:
    how fast a machine is must not decide what a test sees. With `dies` an actor is going to die:
    the rows it leaves are nobody's.
    """
    opened = OpenedModel(directory)
    chosen = _planned(opened, kind) if plan is None else plan
    prepared = await anyio.to_thread.run_sync(
        _prepare, opened, chosen, _device(device, chosen, delays, link_gbps), poison, stop_ids
    )
    engine = Engine(Settings(queue=queue, substitute=asked), prepared)
    if not timed:
        (drafter,) = (actor for actor in engine.topology.actors if isinstance(actor, Drafter))
        drafter._steps, drafter._times = FreeSteps(), FreeRounds()
        drafter._sweeps = FreeSweeps()
    try:
        yield engine
        engine.check()
    finally:
        await engine.close()
    engine.check()
    memory = prepared.runtime.device.memory
    assert memory.held == 0, memory.by_name
    assert engine.sessions.empty
    assert dies or engine.runtime.kv.rows_held == 0


_PLANS: dict[tuple[ModelShape, str], Plan] = {}


def _planned(opened: OpenedModel, kind: dict[str, object]) -> Plan:
    """Planning takes as long as loading a made model, so no plan is made twice."""
    key = opened.shape, repr(sorted(kind.items()))
    if key not in _PLANS:
        _PLANS[key] = make_plan(opened, **kind)  # type: ignore[arg-type]
    return _PLANS[key]


class FreeSteps(StepTimes):
    """Draft steps that cost no time."""

    def of(self, rows: int) -> float:
        return 0.0


class FreeSweeps(SweepPace):
    """Sweeps whose rows cost no time, and that leave a core to others."""

    def of(self, rows: int) -> float:
        return 0.0

    def longer(self, cores: int) -> float:
        return 0.0


class FreeRounds(RoundTimes):
    """Rows that cost no time."""

    def of(self, rows: int) -> float:
        return 0.0


class OneEach(Cores):
    """Two workers may run at once, on one thread each: on made models a second one only waits."""

    def _width(self, name: str) -> int:
        return 1


def _device(kind: str, plan: Plan, delays: int | None, link_gbps: float) -> Device:
    shaken = None if delays is None else random.Random(delays)
    device: CpuDevice | SimulatedAccelerator
    if kind == "cpu":
        delay = None if shaken is None else random_delay(shaken)
        device = CpuDevice(plan.budget, delay=delay)
    else:
        device = SimulatedAccelerator(plan.budget, link_gbps, delays=shaken, poison=True)
    device.cores = OneEach(2)
    return device


def _prepare(
    opened: OpenedModel, plan: Plan, device: Device, poison: bool, stop_ids: tuple[int, ...]
) -> Prepared:
    runtime = Runtime(
        opened,
        plan,
        device,
        SilentProgress(),
        embedding_rows=ALLOWANCES.embedding_rows,
        poison=poison,
    )
    return Prepared(runtime, plan, Tokenizer.load(opened.directory), stop_ids)
