"""Kernels of int6, int4, int3 and int2 weights: ours, compiled (products.c), or others.

Each keeps a matrix in its own packing, in equally many bytes. What all stand for is
weight = (code - half) * scale + offset, code 0 to 2 * half - 1, scale and offset bfloat16 for 64
columns each. For a few rows ours is several times faster than torch's for int4: it multiplies int8
activations, torch's bfloat16 ones. Of the others torch has no kernel, and without the compiled part
they are decoded for each product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from stages.compiled import COMPILED
from stages.formats import BITS, BLOCK, GROUP
from stages.packed import Packed, pack_codes, unpack_codes
from stages.quantized import Kernel

_PAIRS = 4 * BLOCK
"""Bytes of a block's scales and offsets of one group."""
_DECODED_BLOCKS = 32
"""Blocks of 8 rows that are decoded at once."""


class PlainKernel:
    """Blocks as products.c has them, decoded for each product."""

    compiled: Packed | None = None

    def __init__(self, form: str, shape: tuple[int, int], stored: int) -> None:
        self._bits, self._shape = BITS[form], shape
        groups, nbytes = -(-shape[1] // GROUP), BLOCK * GROUP * self._bits // 8 + _PAIRS
        self._blocks = torch.empty(stored // BLOCK, groups, nbytes, dtype=torch.uint8)
        self.nbytes = self._blocks.nbytes

    def put(
        self, start: int, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """See Kernel and quantize_groups."""
        count = codes.shape[0] // BLOCK
        blocks = self._blocks[start // BLOCK : start // BLOCK + count]
        blocks[..., :-_PAIRS] = pack_codes(codes, self._bits)
        pairs = torch.stack((scale, offset)).view(2, count, BLOCK, -1).permute(1, 3, 0, 2)
        blocks[..., -_PAIRS:] = pairs.contiguous().view(torch.uint8).flatten(2)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        activations = x.float()
        parts = self._blocks.split(_DECODED_BLOCKS)
        out = torch.cat([functional.linear(activations, self._decoded(p)) for p in parts], dim=1)
        return out[:, : self._shape[0]].to(x.dtype)

    def dequantize(self) -> torch.Tensor:
        """See Kernel."""
        return self._decoded(self._blocks)[: self._shape[0]]

    def _decoded(self, blocks: torch.Tensor) -> torch.Tensor:
        """All rows of some blocks, (rows, cols) float32."""
        count, groups, _ = blocks.shape
        codes = unpack_codes(blocks[..., :-_PAIRS], self._bits).view(-1, groups, GROUP).float()
        pairs = blocks[..., -_PAIRS:].contiguous().view(torch.bfloat16).float()
        pairs = pairs.view(count, groups, 2, BLOCK).permute(2, 0, 3, 1).flatten(1, 2)[..., None]
        weight = (codes - (1 << self._bits - 1)) * pairs[0] + pairs[1]
        return weight.flatten(1)[:, : self._shape[1]]


class CompiledKernel(PlainKernel):
    """Ours: see Packed."""

    compiled: Packed

    def __init__(self, form: str, shape: tuple[int, int], stored: int) -> None:
        super().__init__(form, shape, stored)
        self.compiled = Packed(form, shape, self._blocks)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return self.compiled.matmul(x)


class TorchKernel:
    """torch's own, of int4: activations in bfloat16."""

    compiled = None

    def __init__(self, form: str, shape: tuple[int, int], stored: int) -> None:
        assert form == "int4"
        self._rows, self._cols = shape
        self._padding = -self._cols % GROUP
        width = self._cols + self._padding
        # Packed blocks of whole multiples of 64 rows join to what packing the whole would give.
        self._packed = torch.empty(stored, width // 2, dtype=torch.uint8)
        self._scales = torch.empty(width // GROUP, stored, 2, dtype=torch.bfloat16)
        self.nbytes = self._packed.nbytes + self._scales.nbytes

    def put(
        self, start: int, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """See Kernel."""
        stop = start + codes.shape[0]
        self._packed[start:stop] = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._scales[:, start:stop] = torch.stack((scale.T, offset.T), dim=2)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        activations = x.to(torch.bfloat16)
        if self._padding:
            activations = functional.pad(activations, (0, self._padding))
        out = torch._weight_int4pack_mm_for_cpu(
            activations.contiguous(), self._packed, GROUP, self._scales
        )
        return out[:, : self._rows].to(x.dtype)

    def dequantize(self) -> torch.Tensor:
        """See Kernel."""
        eye = torch.eye(self._cols + self._padding, dtype=torch.bfloat16)
        out = torch._weight_int4pack_mm_for_cpu(eye, self._packed, GROUP, self._scales)
        return out.T[: self._rows, : self._cols].float()


Making = Callable[[str, tuple[int, int], int], Kernel[torch.Tensor, torch.Tensor, torch.Tensor]]
"""See quantized.Making; the format comes first."""
OTHERS: dict[str, Making] = dict.fromkeys(("int6", "int3", "int2"), PlainKernel)
OTHERS["int4"] = TorchKernel
"""What each format's substitutes are made with where the compiled part is not there."""
KERNELS = OTHERS if COMPILED is None else dict.fromkeys(OTHERS, CompiledKernel)
"""What they are made with."""
