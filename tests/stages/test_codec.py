from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.codec import RawCodec
from stages.device import CpuDevice
from stages.pieces import Group, Piece, cut_pieces, slot_bytes
from tests.stages.made_pieces import write_file

NAMED = {
    "a": torch.randn(37, 11, dtype=torch.bfloat16),
    "b": torch.randn(5, dtype=torch.float32),
    "c": torch.randn(300, 257, dtype=torch.bfloat16),
    "d": torch.randn(9, dtype=torch.float16),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make_piece(folder: Path, lead: int) -> Piece:
    specs = write_file(folder / "f", NAMED, lead, gap=6)
    return cut_pieces([Group("layer", 0, tuple(specs.values()))])[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [0, 8, 1, 3])
async def test_all_dtypes_at_all_alignments(tmp_path: Path, dtype: torch.dtype, lead: int) -> None:
    piece = make_piece(tmp_path, lead)
    device = CpuDevice()
    link = device.open_link([str(tmp_path / "f")])
    slot = device.allocate(slot_bytes([piece]), "slot")
    await link.fill(piece, slot)
    codec = RawCodec()
    size = codec.scratch_bytes([piece], dtype)
    out = device.allocate(size, "decode") if size else None
    found = codec.decode(piece, slot, dtype, out)
    assert list(found) == list(NAMED)
    for name, tensor in NAMED.items():
        assert found[name].dtype == dtype
        assert found[name].data_ptr() % dtype.itemsize == 0
        assert torch.equal(found[name], tensor.to(dtype)), name
    copied = {
        name
        for name, tensor in found.items()
        if not 0 <= tensor.data_ptr() - slot.tensor(torch.uint8, (1,)).data_ptr() < slot.nbytes
    }
    aligned = lead % 2 == 0
    assert ("a" in copied) == (dtype != torch.bfloat16 or not aligned)
    if copied == set(NAMED):  # the slot may be refilled now
        slot.tensor(torch.uint8, (slot.nbytes,)).fill_(0xFF)
        assert torch.equal(found["c"], NAMED["c"].to(dtype))
    device.close()


async def test_the_decode_buffer_is_exactly_large_enough(tmp_path: Path) -> None:
    piece = make_piece(tmp_path, 1)
    codec = RawCodec()
    size = codec.scratch_bytes([piece], torch.float32)
    ends = []
    for tensor in NAMED.values():
        ends.append(-(-tensor.numel() * 4 // 64) * 64)
    assert size == sum(ends)


def test_a_missing_decode_buffer_is_a_bug(tmp_path: Path) -> None:
    piece = make_piece(tmp_path, 0)
    device = CpuDevice()
    slot = device.allocate(slot_bytes([piece]), "slot")
    with pytest.raises(AssertionError, match="decode buffer"):
        RawCodec().decode(piece, slot, torch.float32, None)
