from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from routing.errors import DeviceMemoryError, EngineClosedError, LinkError
from stages.device import PAGE
from stages.pieces import slot_bytes
from stages.simulated import STAGING, SimulatedAccelerator
from stages.streams import settle
from tests.stages.made_pieces import Made, consume


@contextmanager
def opened(
    limit: int = 1 << 20, gbps: float = 100.0, **options: object
) -> Iterator[SimulatedAccelerator]:
    device = SimulatedAccelerator(limit, gbps, **options)  # type: ignore[arg-type]
    try:
        yield device
    finally:
        device.close()
        device.memory.check()
        device.host.check()
        device.cores.check()
        assert device.host.held == 0


def test_its_memory_ends_exactly_at_the_limit() -> None:
    with opened(limit=3 * PAGE) as device:
        buffers = [device.allocate(PAGE, "weights") for _ in range(3)]
        with pytest.raises(DeviceMemoryError):
            device.allocate(1, "one more")
        buffers.pop().free()
        device.allocate(1, "one more").free()
        for buffer in buffers:
            buffer.free()
        assert device.memory.held == 0
        assert device.memory.peak == 3 * PAGE


def test_the_host_cannot_address_it_and_fresh_memory_is_poisoned() -> None:
    with opened(poison=True) as device:
        buffer = device.allocate(PAGE, "slot")
        with pytest.raises(TypeError, match="copy through a link"):
            _ = buffer.view
        assert buffer.tensor(torch.float32, (10,)).isnan().all()
        buffer.free()


@pytest.mark.parametrize("host_bytes", [0, 70_000, 10_000_000])
async def test_fills_in_order_through_staging_and_host_memory(
    tmp_path: Path, host_bytes: int
) -> None:
    made = Made(tmp_path, count=5)
    with opened(delays=random.Random(3), poison=True, host_bytes=host_bytes) as device:
        link = device.open_link(made.paths)
        seen = await consume(made, device, link, slots=3, sweeps=3)
        assert seen.order == list(range(5)) * 3
        assert seen.wrong == []
        slot = slot_bytes(made.pieces)
        assert device.host.by_name.get("staging", 0) <= STAGING * slot
        assert device.host.by_name.get("kept pieces", 0) <= host_bytes


async def test_pieces_kept_on_the_host_are_read_once(tmp_path: Path) -> None:
    made = Made(tmp_path, count=3)
    with opened(host_bytes=2 * slot_bytes(made.pieces)) as device:
        link = device.open_link(made.paths)
        slot = device.allocate(slot_bytes(made.pieces), "slot")
        stages = []
        for piece in (*made.pieces, *made.pieces):
            filled = await link.fill(piece, slot)
            stages.append([hop.stage for hop in filled.transfers])
            for before, after in pairwise(filled.transfers):
                assert before.end <= after.start
        both, copy = ["disk", "copy"], ["copy"]
        assert stages == [both, both, both, copy, copy, both]
        slot.free()


async def test_copies_keep_to_the_bandwidth(tmp_path: Path) -> None:
    made = Made(tmp_path, count=4)
    nbytes = sum(piece.nbytes for piece in made.pieces)
    with opened(limit=1 << 24, gbps=nbytes / 0.02 / 1e9) as device:  # a sweep in 20 ms
        link = device.open_link(made.paths)
        slots = [device.allocate(slot_bytes(made.pieces), "slot") for _ in range(20)]
        pieces = made.pieces * 5
        while True:  # a machine that stalls takes longer now and then; the test has its timeout
            began = time.perf_counter()
            events = [link.fill(piece, slot) for piece, slot in zip(pieces, slots, strict=True)]
            await settle(events)
            took = time.perf_counter() - began
            assert took >= 0.1
            copies = [event.wait().transfers[-1] for event in events]
            assert all(a.end <= b.end for a, b in pairwise(copies))
            if took < 0.5:
                break
        assert link.measure(made.pieces) <= nbytes / 0.02 / 1e9
        for slot in slots:
            slot.free()


def swap(path: str, content: bytes) -> bytes:
    before = Path(path).read_bytes()
    Path(path).write_bytes(content)
    return before


async def test_a_failed_read_reaches_the_fill_and_the_link_goes_on(tmp_path: Path) -> None:
    made = Made(tmp_path, count=4, files=2)
    for host_bytes in (0, 10_000_000):
        with opened(host_bytes=host_bytes) as device:
            link = device.open_link(made.paths)
            whole = swap(made.paths[1], b"")
            slot = device.allocate(slot_bytes(made.pieces), "slot")
            for _ in range(2 * STAGING):  # staging buffers come back after a failure too
                with pytest.raises(LinkError, match="ends at byte"):
                    await link.fill(made.pieces[1], slot)
            await link.fill(made.pieces[0], slot)
            swap(made.paths[1], whole)
            slot.free()


async def test_closing_ends_the_fills_asked_for_and_refuses_more(tmp_path: Path) -> None:
    made = Made(tmp_path, count=4)
    with opened(delays=random.Random(1)) as device:
        link = device.open_link(made.paths)
        slots = [device.allocate(slot_bytes(made.pieces), "slot") for _ in range(4)]
        events = [link.fill(piece, slot) for piece, slot in zip(made.pieces, slots, strict=True)]
        device.close()
        assert all(event.done() for event in events)
        await settle(events)
        with pytest.raises(EngineClosedError):
            link.fill(made.pieces[0], slots[0])
        for slot in slots:
            slot.free()
