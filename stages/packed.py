"""Low-bit matrices in the order that the compiled part multiplies by: see products.c."""

from __future__ import annotations

import torch

from stages.compiled import compiled_part
from stages.formats import BLOCK, GROUP

_FORMS = {"int4": 0, "int8": 1, "nf4": 2, "int3": 3, "int2": 4, "int6": 5}


class Packed:
    """A matrix of `shape` (rows, cols). `data`: its bytes, on the CPU, which it keeps.

    A row of a product with an activation that is not finite comes out as NaN, and only that row.
    Sums that overflow float32 are infinite or NaN; activations below 1e-36 count as 0.
    """

    def __init__(self, form: str, shape: tuple[int, int], data: torch.Tensor) -> None:
        self.form, self.shape, self.data = _FORMS[form], shape, data
        self.address = data.data_ptr()
        assert data.is_contiguous() and self.address % 32 == 0

    def matmul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x (n, cols) in any float dtype -> (n, rows) in x's dtype.

        `out`: (n, rows) float32, contiguous, to be used for the result. Raises ValueError.
        """
        outputs, width = self.shape
        rows, cols = x.shape
        if cols != width or not x.is_cpu:
            raise ValueError(f"{cols} columns on {x.device} given, {width} on cpu expected")
        if x.dtype is not torch.float32:
            return self.matmul(x.float()).to(x.dtype)
        if not x.is_contiguous():
            x = x.contiguous()
        if out is None:
            out = torch.empty(rows, outputs)
        assert out.shape == (rows, outputs) and out.is_contiguous()
        compiled_part.product(
            self.form, self.address, x.data_ptr(), out.data_ptr(), rows, cols, outputs
        )
        return out


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (rows, cols) of whole blocks and groups -> (blocks, groups, bytes) uint8.

    The planes of a group follow each other, the codes' lowest bits first.
    """
    sets = codes.to(torch.uint8).view(codes.shape[0] // BLOCK, BLOCK, -1, GROUP // 4, 4)
    sets = sets.transpose(1, 2)  # (block, group, output, set, column)
    return torch.cat([_plane(sets >> low, width) for low, width in _planes(bits)], dim=2)


def _plane(sets: torch.Tensor, width: int) -> torch.Tensor:
    """The lowest `width` bits: a byte has those of 8 / width sets, the first lowest."""
    bits = (sets & (1 << width) - 1).unflatten(3, (-1, 8 // width))
    packed = bits[..., 0, :]
    for place in range(1, bits.shape[4]):
        packed = packed | bits[..., place, :] << place * width
    return packed.transpose(2, 3).flatten(2)  # (block, group, vector, output, column)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes that `pack_codes` was given, uint8."""
    blocks, groups, _ = packed.shape
    codes = torch.zeros(blocks, BLOCK, groups, GROUP, dtype=torch.uint8)
    start = 0
    for low, width in _planes(bits):
        stop = start + BLOCK * GROUP * width // 8
        vectors = packed[..., start:stop].reshape(blocks, groups, -1, BLOCK, 4)
        shifted = torch.stack([vectors >> shift for shift in range(0, 8, width)], dim=4)
        sets = shifted & (1 << width) - 1
        codes |= sets.permute(0, 3, 1, 2, 4, 5).flatten(3) << low
        start = stop
    return codes.view(blocks * BLOCK, groups * GROUP)


def _planes(bits: int) -> list[tuple[int, int]]:
    """The lowest bit and the width of each plane of codes: 3 bits have no whole place in a byte,
    nor have 6."""
    return {3: [(0, 2), (2, 1)], 6: [(0, 4), (4, 2)]}.get(bits, [(0, bits)])
