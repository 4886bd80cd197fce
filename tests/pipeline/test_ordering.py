"""Nothing computes before its slot is filled, no slot is refilled before its user has finished.

Slots hold NaN between uses and everything is late at random; the tokens are right all the same.
The second half plants bugs and sees that the first would have told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from routing.errors import PacelineError
from routing.messages import PieceReady, SlotFree
from stages.link import DiskLink
from stages.prefetcher import Prefetcher
from stages.ring import Ring
from stages.schedule import Step
from stages.sweep import Sweep
from stages.verifier import Verifier
from tests import made
from tests.pipeline.made_engine import made_engine

TOKENS = 12
IDS = made.make_prompt(320, 17, seed=12)
PATIENCE = 120
SLOTS = 2  # of the smallest plan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama")


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved in 16 bits and computed in 32: pieces are decoded into a buffer beside the slots."""
    directory = tmp_path_factory.mktemp("half")
    return made.make_model(directory, "llama", layers=6, dtype=torch.bfloat16)


async def outcome(model: Path, **kind: Any) -> str:
    """What came of a request: "right", "wrong", or the error's words."""
    right = made.reference_generate(model, IDS, TOKENS)
    with anyio.fail_after(PATIENCE):
        try:
            async with made_engine(model, dies=True, **kind) as engine:
                answer = await engine.generate(IDS, max_tokens=TOKENS)
                assert engine.plan.placement.slots == SLOTS
        except PacelineError as error:
            return str(error)
    return "right" if list(answer.token_ids) == right else "wrong"


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize(("seed", "spare"), [(1, 0), (2, 0), (3, 180_000)])
async def test_late_and_poisoned_is_lossless(
    model: Path, device: str, seed: int, spare: int
) -> None:
    assert await outcome(model, device=device, delays=seed, spare=spare) == "right"


@pytest.mark.parametrize("device", ["cpu", "simulated"])
async def test_late_and_poisoned_is_repeatable_in_16_bits(half: Path, device: str) -> None:
    answers = []
    for delays in (None, 1, 2):
        async with made_engine(half, device=device, delays=delays) as engine:
            assert engine.runtime.decoded is not None
            answers.append(await engine.generate(IDS, max_tokens=TOKENS))
    assert len({answer.token_ids for answer in answers}) == 1


async def test_a_link_that_the_verifier_waits_for_changes_nothing(model: Path) -> None:
    """5 ms a layer."""
    assert await outcome(model, device="simulated", link_gbps=0.05) == "right"


@pytest.mark.parametrize(("device", "hop"), [("cpu", "disk"), ("simulated", "copy")])
async def test_with_one_slot_reading_and_computing_take_turns(
    model: Path, device: str, hop: str
) -> None:
    right = made.reference_generate(model, IDS, TOKENS)
    kind: dict[str, Any] = {"device": device, "delays": 1, "slots": (1,), "ahead": 0}
    with anyio.fail_after(PATIENCE):
        async with made_engine(model, **kind) as engine:
            answer = await engine.generate(IDS, max_tokens=TOKENS)
            placement, spans = engine.plan.placement, engine.trace.spans()
    assert list(answer.token_ids) == right
    assert placement.slots == 1 and answer.rounds
    assert "ahead" not in {span.name for span in spans}
    arriving = [span for span in spans if span.stage == hop]
    computing = [s for s in spans if s.stage == "verify" and s.name in ("layer", "head")]
    assert arriving and computing
    both = [(a, c) for a in arriving for c in computing if a.start < c.end and c.start < a.end]
    assert not both


# Planted bugs

Plant = Callable[[pytest.MonkeyPatch], None]


def free_before_computing(patch: pytest.MonkeyPatch) -> None:
    """The verifier gives a slot back and computes with it afterwards, once it is refilled."""
    refilled: dict[int, anyio.Event] = {}
    mark_ready = Ring.mark_ready

    def marks(ring: Ring, slot: int, piece: int) -> None:
        mark_ready(ring, slot, piece)
        if slot in refilled:
            refilled.pop(slot).set()

    async def planted(self: Verifier, sweep: Sweep, step: Step) -> None:
        slots, piece = self._slots, step.piece
        assert slots is not None and piece is not None
        ready = await slots.ready.receive()
        buffer = slots.ring.begin_use(ready.slot, piece.index)
        again = refilled[ready.slot] = anyio.Event()
        slots.ring.release(ready.slot)
        slots.freed.send_nowait(SlotFree(ready.slot))
        await again.wait()
        await self._stream.run(self._streamed, sweep, step, buffer)

    patch.setattr(Ring, "mark_ready", marks)
    patch.setattr(Verifier, "_step", planted)


def free_while_computing(patch: pytest.MonkeyPatch) -> None:
    """The verifier gives a slot back as soon as it has launched the work."""

    async def planted(self: Verifier, sweep: Sweep, step: Step) -> None:
        slots, piece = self._slots, step.piece
        assert slots is not None and piece is not None
        ready = await slots.ready.receive()
        buffer = slots.ring.begin_use(ready.slot, piece.index)
        work = self._stream.launch(self._streamed, sweep, step, buffer)
        slots.ring.release(ready.slot)
        slots.freed.send_nowait(SlotFree(ready.slot))
        await work

    patch.setattr(Verifier, "_step", planted)


def announce_before_filled(patch: pytest.MonkeyPatch) -> None:
    """The prefetcher tells of a piece as soon as it has asked for it.

    What would mostly go well, since a read is faster than a layer, cannot here: but for those that
    the request finds, no piece is read before the verifier has computed with all slots and one.
    """
    computed: list[int] = []
    fills: list[object] = []
    read, streamed, reused = DiskLink._read, Verifier._streamed, threading.Event()

    async def planted(self: Prefetcher, landing: Any) -> None:
        async for flight in landing:
            if not self._wanted:
                return
            self._flights.popleft()
            self._ring.mark_ready(flight.slot, flight.piece.index)
            self._ready.send_nowait(PieceReady(flight.piece.index, flight.slot))

    def reads(self: DiskLink, fill: Any, *chunk: Any) -> None:
        if fill not in fills:
            fills.append(fill)
        if fills.index(fill) >= SLOTS:
            reused.wait(5)
        read(self, fill, *chunk)

    def streams(self: Verifier, *args: Any) -> None:
        streamed(self, *args)
        computed.append(1)
        if len(computed) > SLOTS:
            reused.set()

    patch.setattr(Prefetcher, "_announce", planted)
    patch.setattr(DiskLink, "_read", reads)
    patch.setattr(Verifier, "_streamed", streams)


def fill_the_neighbor(patch: pytest.MonkeyPatch) -> None:
    """What is read lands in a slot that may be in use."""
    buffer = Ring.buffer
    patch.setattr(Ring, "buffer", lambda ring, slot: buffer(ring, (slot + 1) % ring.slots))


PLANTS: list[Plant] = [
    free_before_computing,
    free_while_computing,
    announce_before_filled,
    fill_the_neighbor,
]


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("plant", PLANTS)
async def test_a_planted_bug_is_noticed(
    model: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant, device: str
) -> None:
    plant(monkeypatch)
    assert await outcome(model, device=device, delays=1) != "right"


@pytest.mark.parametrize("plant", [free_before_computing, announce_before_filled])
async def test_it_is_noticed_without_poison_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    """Then what is computed with is another piece's weights, sound numbers all of them."""
    plant(monkeypatch)
    assert await outcome(model, poison=False) != "right"
