"""nf4 substitutes: 4-bit normal-float codes as bitsandbytes chooses them, 64 to a scale."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional

from stages.formats import BLOCK, GROUP, substitute_bytes
from stages.nf4_kernels import KERNEL, CompiledKernel, Kernel, bitsandbytes
from stages.packed import Packed


class Nf4:
    """See Substitute. `kernel`: what packs and multiplies; the fastest there is unless given."""

    def __init__(
        self,
        blocks: Iterable[torch.Tensor],
        shape: tuple[int, int],
        kernel: type[Kernel] | None = None,
    ) -> None:
        rows, cols = shape
        stored = rows + -rows % BLOCK
        self._kernel = (KERNEL if kernel is None else kernel)(shape, stored)
        start = given = 0
        for block in blocks:
            given += block.shape[0]
            padded = functional.pad(block, (0, -cols % GROUP, 0, -block.shape[0] % BLOCK))
            if start + padded.shape[0] > stored:
                raise ValueError(f"more than the {rows} rows expected were given")
            quantized = bitsandbytes().quantize_4bit(
                padded.contiguous(), blocksize=GROUP, quant_type="nf4"
            )
            self._kernel.put(start, *quantized)
            start += padded.shape[0]
        if given != rows:
            raise ValueError(f"{given} rows given, {rows} expected")
        self.nbytes = self._kernel.nbytes
        assert self.nbytes == substitute_bytes(shape, "nf4")

    @property
    def compiled(self) -> Packed | None:
        """See Substitute."""
        return self._kernel.compiled if isinstance(self._kernel, CompiledKernel) else None

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Substitute."""
        return self._kernel.matmul(x)

    def dequantize(self) -> torch.Tensor:
        """See Substitute."""
        return self._kernel.dequantize()
