"""Codecs: from the encoded bytes in a slot to tensors that can be computed with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from stages.pieces import Piece, Placed, decode_bytes, decode_layout

if TYPE_CHECKING:
    from stages.device import Buffer

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 64 * 1024  # elements of an unaligned tensor converted at a time


class Codec(Protocol):
    """Makes tensors of what a slot holds. Stateless; runs on the stream that computes."""

    def scratch_bytes(self, pieces: Sequence[Piece], dtype: torch.dtype) -> int:
        """The size of the decode buffer that serves any of the pieces; 0 if none is needed."""

    def decode(
        self, piece: Piece, buffer: Buffer, dtype: torch.dtype, out: Buffer | None
    ) -> dict[str, torch.Tensor]:
        """The piece's tensors by name, of `dtype`, on the buffer's device.

        They lie in the slot's buffer or in the decode buffer `out` (of at least scratch_bytes;
        None if that is 0), and are good until either is written again.
        """


class RawCodec:
    """The source's own bytes: used where they lie, or converted to the compute dtype."""

    def scratch_bytes(self, pieces: Sequence[Piece], dtype: torch.dtype) -> int:
        """Bytes of the largest piece's tensors that need converting or aligning."""
        return decode_bytes(pieces, NAMES[dtype])

    def decode(
        self, piece: Piece, buffer: Buffer, dtype: torch.dtype, out: Buffer | None
    ) -> dict[str, torch.Tensor]:
        """See Codec. Views need no work; conversions use the calling thread's intra-op threads."""
        places: dict[str, int] = {}
        end = 0
        for placed, size in decode_layout(piece, NAMES[dtype]):
            places[placed.name] = end
            end += size
        tensors = {}
        for placed in piece.tensors:
            if placed.name in places:
                assert out is not None, f"{placed.name} needs a decode buffer of {end} bytes"
                target = out.tensor(dtype, placed.shape, places[placed.name])
                _convert(placed, buffer, target)
                tensors[placed.name] = target
            else:
                tensors[placed.name] = buffer.tensor(dtype, placed.shape, placed.slot_offset)
        return tensors


def _convert(placed: Placed, buffer: Buffer, target: torch.Tensor) -> None:
    source = DTYPES[placed.dtype]
    item = source.itemsize
    if placed.slot_offset % item == 0:
        target.copy_(buffer.tensor(source, placed.shape, placed.slot_offset))
        return
    # torch's kernels may read a misaligned tensor wrongly or crash: go by way of aligned blocks.
    flat = target.view(-1)
    raw = buffer.tensor(torch.uint8, (flat.numel() * item,), placed.slot_offset)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK]
        part.copy_(raw[start * item : (start + part.numel()) * item].clone().view(source))
