"""Kernels that multiply by nf4 weights: ours, compiled (products.c), or else bitsandbytes'.

Each keeps a matrix in its own order, in equally many bytes. What they stand for is
weight = level[code] * scale, code 0..15, scale float32 for 64 columns each: bitsandbytes with nf4's
own levels, ours with levels in whole 127ths.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn import functional

from stages.compiled import COMPILED
from stages.formats import BLOCK, GROUP
from stages.packed import Packed, pack_codes, unpack_codes
from stages.quantized import Making

LEVELS = (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127)
"""nf4's levels times 127, rounded: products.c has them too."""
_BLOCK_BYTES = BLOCK * (GROUP // 2 + 4)
"""A block's codes and scales of one group."""


def bitsandbytes() -> Any:
    """Its functions. Raises ImportError.

    On some processors it warns that a kernel for products is missing, which is not wanted here.
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional as functions
    finally:
        logger.setLevel(level)
    return functions


def levels() -> torch.Tensor:
    """nf4's 16 levels from -1 to 1, as bitsandbytes has them."""
    known: torch.Tensor = bitsandbytes().get_4bit_type("nf4", device="cpu")
    return known


class CompiledKernel:
    """Ours: see Packed."""

    def __init__(self, shape: tuple[int, int], stored: int) -> None:
        groups = -(-shape[1] // GROUP)
        self._blocks = torch.empty(stored // BLOCK, groups, _BLOCK_BYTES, dtype=torch.uint8)
        self.compiled = Packed("nf4", shape, self._blocks)
        self.nbytes = self._blocks.nbytes

    def put(self, start: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See Kernel."""
        count, first = codes.shape[0] // BLOCK, start // BLOCK
        blocks = self._blocks[first : first + count]
        blocks[..., : -4 * BLOCK] = pack_codes(codes, 4)
        ordered = (scales / LEVELS[-1]).view(count, BLOCK, -1).transpose(1, 2).contiguous()
        blocks[..., -4 * BLOCK :] = ordered.view(torch.uint8)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return self.compiled.matmul(x)

    def dequantize(self) -> torch.Tensor:
        """See Kernel."""
        count, groups, _ = self._blocks.shape
        codes = unpack_codes(self._blocks[..., : -4 * BLOCK], 4).view(-1, groups, GROUP)
        scales = self._blocks[..., -4 * BLOCK :].contiguous().view(torch.float32)
        scales = scales.view(count, groups, BLOCK).transpose(1, 2).reshape(-1, groups, 1)
        rows, cols = self.compiled.shape
        known = torch.tensor(LEVELS, dtype=torch.float32)
        return (known[codes.long()] * scales).flatten(1)[:rows, :cols]


class BitsandbytesKernel:
    """bitsandbytes' own: on CUDA it multiplies in this format; on the CPU its 4-bit product is
    slow, and the matrix is decoded for each product instead."""

    compiled = None

    def __init__(self, shape: tuple[int, int], stored: int) -> None:
        self._rows, self._cols = shape
        self._padding = -self._cols % GROUP
        self._parts: list[tuple[torch.Tensor, Any]] = []
        self.nbytes = 0

    def put(self, start: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See Kernel."""
        packed = (codes[:, ::2] << 4 | codes[:, 1::2]).view(-1, 1)  # the first of two above
        state = bitsandbytes().QuantState(
            scales.flatten().contiguous(),
            shape=codes.shape,
            code=levels(),
            blocksize=GROUP,
            quant_type="nf4",
            dtype=torch.float32,
        )
        self._parts.append((packed, state))
        self.nbytes += packed.nbytes + state.absmax.nbytes

    def _decoded(self, packed: torch.Tensor, state: Any) -> torch.Tensor:
        weight: torch.Tensor = bitsandbytes().dequantize_4bit(packed, state)
        return weight

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        activations = functional.pad(x.float(), (0, self._padding))
        parts = [functional.linear(activations, self._decoded(*part)) for part in self._parts]
        return torch.cat(parts, dim=1)[:, : self._rows].to(x.dtype)

    def dequantize(self) -> torch.Tensor:
        """See Kernel."""
        whole = torch.cat([self._decoded(*part) for part in self._parts])
        return whole[: self._rows, : self._cols]


KERNEL: Making[torch.Tensor, torch.Tensor] = (
    BitsandbytesKernel if COMPILED is None else CompiledKernel
)
"""What nf4 substitutes are made with."""
