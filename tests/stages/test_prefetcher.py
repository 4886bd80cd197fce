"""The two-way order: nothing computes before its slot is filled, none is refilled before its
user has finished. Slots hold NaN between uses; reads, copies and work begin at random times."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from routing.errors import LinkError
from routing.mailboxes import Mailbox, Receiver, Sender
from routing.messages import PieceReady, SlotFree
from routing.trace import Trace
from stages.device import Buffer, CpuDevice, Device
from stages.link import Filled, Link
from stages.pieces import BLOCK, Piece, slot_bytes
from stages.prefetcher import Prefetcher
from stages.ring import Ring
from stages.simulated import SimulatedAccelerator
from stages.streams import Event, random_delay
from tests.stages.made_pieces import Made, consume


@contextmanager
def opened(kind: str, seed: int = 0) -> Iterator[Device]:
    delays = random.Random(seed)
    device: Device
    if kind == "cpu":
        device = CpuDevice(limit=1 << 24, delay=random_delay(delays))
    else:
        device = SimulatedAccelerator(1 << 24, 100.0, delays=delays, poison=True)
    try:
        yield device
    finally:
        device.close()
        device.memory.check()
        device.cores.check()
        assert device.memory.held == 0
        assert device.cores.held == 0


devices = pytest.mark.parametrize("kind", ["cpu", "simulated"])


class HastyLink:
    """A planted bug: it says that a fill has ended when it has only been asked for."""

    def __init__(self, link: Link) -> None:
        self.direct = link.direct
        self.measure = link.measure
        self.close = link.close
        self._link = link

    def fill(self, piece: Piece, buffer: Buffer) -> Event[Filled]:
        self._link.fill(piece, buffer)
        early = Event[Filled]()
        early.resolve(Filled(()))
        return early


class HeldLink:
    """A link whose fills stay under way until they are let go, like a slow disk."""

    direct = True

    def __init__(self) -> None:
        self.events: list[Event[Filled]] = []
        self.asked: list[int] = []

    def fill(self, piece: Piece, buffer: Buffer) -> Event[Filled]:
        self.asked.append(piece.index)
        self.events.append(Event())
        return self.events[-1]

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Lets all go at the end, so that a failing test does not wait for ever."""
        try:
            yield
        finally:
            for event in self.events:
                if not event.done():
                    event.resolve(Filled(()))

    def measure(self, pieces: object, nbytes: int = 0) -> float:
        return 1.0

    def close(self) -> None:
        pass


class Rig:
    """A prefetcher on a held link, and the other ends of its mailboxes."""

    def __init__(self, made: Made, slots: int = 3) -> None:
        self.device = CpuDevice()
        self.link = HeldLink()
        self.ring = Ring(self.device, slots, slot_bytes(made.pieces))
        ready, freed = Mailbox[PieceReady]("ready", slots), Mailbox[SlotFree]("freed", slots)
        self.trace = Trace()
        self.prefetcher = Prefetcher(
            made.pieces, self.ring, self.link, ready.sender(), freed.receiver(), self.trace
        )
        self.ready: Receiver[PieceReady] = ready.receiver()
        self.freed: Sender[SlotFree] = freed.sender()
        ready.seal()
        freed.seal()

    def close(self) -> None:
        self.ready.close()
        self.freed.close()
        self.ring.check()
        self.ring.close()
        self.device.close()
        assert self.device.memory.held == 0


@devices
@pytest.mark.parametrize("slots", [1, 2, 3, 6])
async def test_pieces_come_whole_in_order_sweep_after_sweep(
    tmp_path: Path, kind: str, slots: int
) -> None:
    made = Made(tmp_path, count=4)
    with opened(kind, seed=slots) as device:
        link = device.open_link(made.paths, readers=1, chunk=4 * BLOCK)
        seen = await consume(made, device, link, slots=slots, sweeps=5)
    assert seen.order == list(range(4)) * 5
    assert seen.wrong == []


@devices
async def test_the_check_notices_computing_too_early(tmp_path: Path, kind: str) -> None:
    made = Made(tmp_path, count=4)
    with opened(kind) as device:
        link = HastyLink(device.open_link(made.paths, readers=1, chunk=4 * BLOCK))
        seen = await consume(made, device, link)
        link.close()
    assert seen.wrong


@devices
async def test_the_check_notices_refilling_too_early(tmp_path: Path, kind: str) -> None:
    made = Made(tmp_path, count=4)
    with opened(kind) as device:
        link = device.open_link(made.paths, readers=1, chunk=4 * BLOCK)
        seen = await consume(made, device, link, after_launch=lambda: True)
    assert seen.wrong


async def test_fills_queue_up_while_others_are_under_way(tmp_path: Path) -> None:
    rig = Rig(Made(tmp_path, count=2), slots=3)
    async with anyio.create_task_group() as tasks, rig.link.held():
        tasks.start_soon(rig.prefetcher.run)
        await anyio.wait_all_tasks_blocked()
        assert rig.link.asked == [0, 1, 0]  # on into the next sweep
        rig.link.events[1].resolve(Filled(()))  # the second ends first
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.WouldBlock):
            rig.ready.receive_nowait()
        rig.link.events[0].resolve(Filled(()))
        assert await rig.ready.receive() == PieceReady(0, 0)
        assert await rig.ready.receive() == PieceReady(1, 1)
        rig.ring.begin_use(0, 0)
        rig.ring.release(0)
        rig.freed.send_nowait(SlotFree(0))
        await anyio.wait_all_tasks_blocked()
        assert rig.link.asked == [0, 1, 0, 1]  # at once, the third being still under way
        rig.freed.close()
        await anyio.wait_all_tasks_blocked()
        for event in rig.link.events[2:]:
            event.resolve(Filled(()))
    assert rig.ring.free == 2  # the one with piece 1 was handed over
    rig.close()


async def test_the_end_waits_for_the_reads_under_way(tmp_path: Path) -> None:
    rig = Rig(Made(tmp_path))
    async with anyio.create_task_group() as tasks, rig.link.held():
        tasks.start_soon(rig.prefetcher.run)
        await anyio.wait_all_tasks_blocked()
        rig.ready.close()
        rig.freed.close()
        await anyio.wait_all_tasks_blocked()
        assert rig.ring.held == 3
        rig.link.events[0].resolve(Filled(()))
        rig.link.events[1].fail(LinkError("f", "nobody wants to know any more"))
        await anyio.wait_all_tasks_blocked()
        assert rig.ring.held == 3
        rig.link.events[2].resolve(Filled(()))
    assert rig.ring.free == 3
    rig.close()


@pytest.mark.parametrize("native", [True, False])
async def test_cancellation_waits_for_the_reads_under_way(tmp_path: Path, native: bool) -> None:
    rig = Rig(Made(tmp_path))
    async with asyncio.TaskGroup() as tasks, rig.link.held():
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                await rig.prefetcher.run()

        task = tasks.create_task(run())
        await anyio.wait_all_tasks_blocked()
        for event in rig.link.events:
            if native:
                task.cancel()
            else:
                scope.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()
            assert rig.ring.state(0) == "filling"
            event.resolve(Filled(()))
    assert task.cancelled() == native
    assert rig.ring.free == 3
    with pytest.raises(anyio.EndOfStream):
        rig.ready.receive_nowait()
    with pytest.raises(anyio.BrokenResourceError):
        rig.freed.send_nowait(SlotFree(0))
    rig.close()


async def test_a_failed_read_ends_it_with_the_links_own_error(tmp_path: Path) -> None:
    rig = Rig(Made(tmp_path))
    failure = LinkError("weights", "Input/output error")
    async with asyncio.TaskGroup() as tasks, rig.link.held():
        task = tasks.create_task(_caught(rig.prefetcher))
        await anyio.wait_all_tasks_blocked()
        rig.link.events[0].fail(failure)
        await anyio.wait_all_tasks_blocked()
        assert not task.done()  # two reads are still under way
        rig.link.events[1].resolve(Filled(()))
        rig.link.events[2].fail(LinkError("weights", "another"))
    assert task.result() is failure
    assert rig.ring.free == 3
    rig.close()


async def _caught(prefetcher: Prefetcher) -> LinkError:
    with pytest.raises(LinkError) as caught:
        await prefetcher.run()
    return caught.value


@devices
async def test_cancelling_at_random_leaves_no_thread_writing(tmp_path: Path, kind: str) -> None:
    made = Made(tmp_path, count=3)
    generator = random.Random(11)
    for seed in range(8):
        with opened(kind, seed) as device:
            link = device.open_link(made.paths, readers=1, chunk=4 * BLOCK)
            with anyio.move_on_after(generator.random() * 0.02):
                await consume(made, device, link, slots=3, sweeps=1000)
        # consume has freed the ring; the device has found no work under way
    assert not [t.name for t in threading.enumerate() if t.name in ("user", "copy")]


async def test_spans_tell_sweep_layer_and_bytes(tmp_path: Path) -> None:
    made = Made(tmp_path, count=3)
    trace = Trace()
    device = SimulatedAccelerator(1 << 24, 100.0)
    link = device.open_link(made.paths)
    await consume(made, device, link, slots=1, sweeps=2, trace=trace)
    device.close()
    spans = [span for span in trace.spans() if span.sweep < 2]
    assert [(s.stage, s.sweep, s.layer) for s in spans] == [
        (stage, sweep, layer)
        for sweep in range(2)
        for layer in range(3)
        for stage in ("disk", "copy")
    ]
    assert all(s.nbytes == made.pieces[s.layer].nbytes and s.start <= s.end for s in spans)
    assert spans[0].name == "layer 0"


def test_no_pieces_are_refused() -> None:
    device = CpuDevice()
    ring = Ring(device, 1, BLOCK)
    ready, freed = Mailbox[PieceReady]("ready", 1), Mailbox[SlotFree]("freed", 1)
    refused = pytest.raises(ValueError, match="at least one")
    with ready.sender() as sender, freed.receiver() as receiver, refused:
        Prefetcher((), ring, HeldLink(), sender, receiver, Trace())
    ready.seal()
    freed.seal()
    ring.close()
