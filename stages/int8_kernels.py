"""Kernels that multiply by int8 weights: ours, compiled (products.c), or else torch's.

Each keeps a matrix in its own order, in equally many bytes. What both stand for is
weight = code * scale, code -127..127, scale bfloat16 for a whole row.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from stages.compiled import COMPILED
from stages.formats import BLOCK, GROUP
from stages.packed import Packed, pack_codes, unpack_codes
from stages.quantized import Making


class CompiledKernel:
    """Ours: see Packed. Activations share a scale in each group."""

    def __init__(self, shape: tuple[int, int], stored: int) -> None:
        blocks, groups = stored // BLOCK, -(-shape[1] // GROUP)
        split = stored * groups * GROUP
        data = torch.empty(split + 2 * stored, dtype=torch.uint8)
        self._codes = data[:split].view(blocks, groups, BLOCK * GROUP)
        self._scales = data[split:].view(torch.bfloat16)
        self.compiled = Packed("int8", shape, data)
        self.nbytes = data.nbytes

    def put(self, start: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See Kernel."""
        stop = start + codes.shape[0]
        biased = codes.view(torch.uint8) ^ 128
        self._codes[start // BLOCK : stop // BLOCK] = pack_codes(biased, 8)
        self._scales[start:stop] = scales

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return self.compiled.matmul(x)

    def dequantize(self) -> torch.Tensor:
        """See Kernel."""
        rows, cols = self.compiled.shape
        codes = (unpack_codes(self._codes, 8) ^ 128).view(torch.int8)
        return codes[:rows, :cols].float() * self._scales[:rows, None].float()


class TorchKernel:
    """torch's own: activations in bfloat16."""

    compiled = None

    def __init__(self, shape: tuple[int, int], stored: int) -> None:
        self._rows, self._cols = shape
        # The kernel reads whole groups of columns, whatever it is told.
        self._padding = -self._cols % GROUP
        self._codes = torch.empty(stored, self._cols + self._padding, dtype=torch.int8)
        self._scales = torch.empty(stored, dtype=torch.bfloat16)
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def put(self, start: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See Kernel."""
        stop = start + codes.shape[0]
        self._codes[start:stop] = codes
        self._scales[start:stop] = scales

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        activations = x.to(torch.bfloat16)
        if self._padding:
            activations = functional.pad(activations, (0, self._padding))
        out = torch._weight_int8pack_mm(activations.contiguous(), self._codes, self._scales)
        return out[:, : self._rows].to(x.dtype)

    def dequantize(self) -> torch.Tensor:
        """See Kernel."""
        whole = self._codes.float() * self._scales[:, None].float()
        return whole[: self._rows, : self._cols]


KERNEL: Making[torch.Tensor, torch.Tensor] = TorchKernel if COMPILED is None else CompiledKernel
"""What int8 substitutes are made with."""
