"""int8 substitutes: the weights of a row share a scale, on the fastest kernel there is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional

from stages.formats import BLOCK, GROUP, substitute_bytes
from stages.int8_kernels import KERNEL, CompiledKernel, Kernel
from stages.packed import Packed

_LEAST = 1e-8


class Int8:
    """See Substitute. weight = code * scale. `kernel`: the fastest there is unless given."""

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
            scale = (padded.abs().amax(dim=1) / 127).clamp_min(_LEAST).to(torch.bfloat16)
            codes = (padded / scale.float()[:, None]).round_().clamp_(-127, 127)
            self._kernel.put(start, codes.to(torch.int8), scale)
            start += padded.shape[0]
        if given != rows:
            raise ValueError(f"{given} rows given, {rows} expected")
        self.nbytes = self._kernel.nbytes
        assert self.nbytes == substitute_bytes(shape, "int8")

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
