from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest
import torch

from routing.errors import EngineClosedError, LinkError
from stages.device import CpuDevice
from stages.direct_file import DirectFile
from stages.link import DiskLink, measure_link
from stages.pieces import BLOCK, Group, RowRange, cut_pieces, cut_rows, slot_bytes
from stages.streams import random_delay, settle
from tests.stages.made_pieces import Made, write_file


def shorten(path: Path, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - nbytes)


@pytest.mark.parametrize("lead", [0, 8, 4093])
@pytest.mark.parametrize("chunk", [BLOCK, 4 * 1024 * 1024])
async def test_bytes_land_where_the_piece_says(tmp_path: Path, lead: int, chunk: int) -> None:
    made = Made(tmp_path, lead=lead)
    device = CpuDevice()
    link = device.open_link(made.paths, chunk=chunk)
    for piece in made.pieces:
        slot = device.allocate(slot_bytes(made.pieces), "slot")
        slot.tensor(torch.uint8, (slot.nbytes,)).fill_(0xFF)
        filled = await link.fill(piece, slot)
        (hop,) = filled.transfers
        assert (hop.stage, hop.nbytes) == ("disk", piece.nbytes)
        assert hop.start <= hop.end
        raw = bytes(slot.view)
        for placed in piece.tensors:
            expected = made.tensors[placed.name].view(-1).view(torch.uint8).numpy().tobytes()
            assert raw[placed.slot_offset : placed.slot_offset + len(expected)] == expected
        slot.free()
    device.close()


async def test_many_fills_at_once_with_delays(tmp_path: Path) -> None:
    made = Made(tmp_path, count=8, files=3)
    device = CpuDevice(delay=random_delay(random.Random(2)))
    link = device.open_link(made.paths, chunk=BLOCK)
    slots = [device.allocate(slot_bytes(made.pieces), "slot") for _ in made.pieces]
    await settle([link.fill(p, slot) for p, slot in zip(made.pieces, slots, strict=True)])
    for piece, slot in zip(made.pieces, slots, strict=True):
        found = {
            placed.name: slot.tensor(torch.uint8, (1,), 0)
            if placed.slot_offset % 4
            else slot.tensor(torch.float32, placed.shape, placed.slot_offset)
            for placed in piece.tensors
        }
        assert made.wrong(piece, found) == []
    device.close()


async def test_rows_of_a_head(tmp_path: Path) -> None:
    head = torch.randn(50, 40)
    specs = write_file(tmp_path / "f", {"head": head}, lead=8)
    pieces = cut_pieces([Group("head", -1, (rows,)) for rows in cut_rows(specs["head"], 7)])
    device = CpuDevice()
    link = device.open_link([str(tmp_path / "f")])
    slot = device.allocate(slot_bytes(pieces), "slot")
    for piece in pieces:
        await link.fill(piece, slot)
        rows = slot.tensor(torch.float32, piece.tensors[0].shape, piece.tensors[0].slot_offset)
        assert torch.equal(rows, head[piece.start_row : piece.start_row + rows.shape[0]])
    device.close()


async def test_a_truncated_file_is_named_and_nothing_is_written_afterwards(tmp_path: Path) -> None:
    made = Made(tmp_path, files=1)
    path = Path(made.paths[0])
    device = CpuDevice()
    link = device.open_link(made.paths, chunk=BLOCK)
    shorten(path, 200)
    slot = device.allocate(slot_bytes(made.pieces), "slot")
    await link.fill(made.pieces[0], slot)
    with pytest.raises(LinkError) as caught:
        await link.fill(made.pieces[-1], slot)
    assert caught.value.path == str(path)
    slot.free()
    device.close()


async def test_a_missing_file_and_a_closed_link(tmp_path: Path) -> None:
    made = Made(tmp_path)
    with pytest.raises(LinkError, match="gone"):
        DiskLink([*made.paths, str(tmp_path / "gone")])
    device = CpuDevice()
    link = device.open_link(made.paths)
    slot = device.allocate(slot_bytes(made.pieces), "slot")
    device.close()
    with pytest.raises(EngineClosedError):
        link.fill(made.pieces[0], slot)
    with pytest.raises(ValueError, match="multiple of"):
        DiskLink(made.paths, chunk=1000)


async def test_a_simulated_disk_has_the_speed_asked_for(tmp_path: Path) -> None:
    blob = torch.zeros(8, 250_000, dtype=torch.uint8).to(torch.bfloat16)  # 4 MB
    specs = write_file(tmp_path / "f", {"blob": blob})
    pieces = cut_pieces([Group("layer", n, (RowRange(specs["blob"], n, n + 1),)) for n in range(8)])
    device = CpuDevice()
    link = device.open_link([str(tmp_path / "f")], chunk=16 * BLOCK, gbps=0.04)
    slots = [device.allocate(slot_bytes(pieces), "slot") for _ in pieces]
    took = math.inf
    while took >= 0.5:  # a machine that stalls takes longer now and then; the test has its timeout
        began = time.perf_counter()
        await settle([link.fill(p, slot) for p, slot in zip(pieces, slots, strict=True)])
        took = time.perf_counter() - began
        assert took >= 0.1, "4 MB at 40 MB/s"
    assert link.measure(pieces, 1_000_000) < 0.041
    device.close()


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_measured_is_what_sweeps_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    made = Made(tmp_path)
    reads: list[tuple[str, int, int]] = []
    read_into = DirectFile.read_into

    def noted(file: DirectFile, view: memoryview, offset: int, needed: int) -> None:
        reads.append((file.path, offset, needed))
        read_into(file, view, offset, needed)

    monkeypatch.setattr(DirectFile, "read_into", noted)
    extents = [extent for piece in made.pieces for extent in piece.extents]
    whole = sum(extent.offset % BLOCK + extent.nbytes for extent in extents)
    device = CpuDevice()
    device.open_link(made.paths, chunk=4 * BLOCK).measure(made.pieces, int(share * whole))
    device.close()
    assert sum(size for _, _, size in reads) == int(share * whole)
    for path, offset, size in reads:
        assert offset % BLOCK == 0 and size <= 4 * BLOCK
        assert any(
            path == one.path and one.offset - BLOCK < offset < one.offset + one.nbytes
            for one in extents
        ), "nothing else was read"


def test_measuring(tmp_path: Path) -> None:
    made = Made(tmp_path)
    assert measure_link(made.paths) > 0
    assert measure_link(made.paths, nbytes=5000) > 0
    device = CpuDevice()
    assert device.open_link(made.paths).measure(made.pieces) > 0
    device.close()
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(LinkError, match="empty"):
        measure_link([str(tmp_path / "empty")])
