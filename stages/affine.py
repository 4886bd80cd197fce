"""int6, int4, int3 and int2 substitutes: 64 weights share a scale and an offset.

weight = (code - half) * scale + offset, half the codes' number, scale and offset in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional

from stages.affine_kernels import KERNELS, CompiledKernel, Kernel
from stages.formats import BITS, GROUP, stored_rows, substitute_bytes
from stages.packed import Packed

_PART_ROWS = 256
"""Rows fitted at once: the temporaries are a dozen times a part's size."""
_MOST = 1e37
"""Weights beyond it are cut: no trained weight is so large, and a group's range would overflow."""
_SHARES = {6: (1.0, 0.9), 4: (1.0, 0.9), 3: (0.9, 0.75), 2: (0.8, 0.6)}
"""Shares of a group's range that the fit starts from, by bits: fewer codes leave more outside."""
_LEAST = 1e-8
"""A scale must not be 0: a kernel's zero times infinity would be NaN."""


class Affine:
    """See Substitute. `kernel`: what packs and multiplies; the fastest there is unless given."""

    def __init__(
        self,
        form: str,
        blocks: Iterable[torch.Tensor],
        shape: tuple[int, int],
        kernel: type[Kernel] | None = None,
    ) -> None:
        rows, cols = shape
        stored = stored_rows(rows, form)
        self._kernel = (KERNELS[form] if kernel is None else kernel)(form, shape, stored)
        start = given = 0
        for part in (part for block in blocks for part in block.split(_PART_ROWS)):
            given += part.shape[0]
            stop = start + stored_rows(part.shape[0], form)
            if stop > stored:
                raise ValueError(f"more than the {rows} rows expected were given")
            spare = stop - start - part.shape[0]
            padded = functional.pad(part, (0, -cols % GROUP, 0, spare))
            self._kernel.put(start, *quantize_groups(padded, BITS[form]))
            start = stop
        if given != rows:
            raise ValueError(f"{given} rows given, {rows} expected")
        self.nbytes = self._kernel.nbytes
        assert self.nbytes == substitute_bytes(shape, form)

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


def quantize_groups(
    weight: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (rows, cols) int32, scales and offsets (rows, cols / 64) bfloat16.

    From each start: codes, then the scale and offset that are best for these codes in the
    least-squares sense, twice; of all starts the one that explains most of a group's variance, and
    codes once more from what bfloat16 holds. weight: (rows, cols) float32, cols a multiple of 64.
    """
    half = 1 << bits - 1
    groups = weight.clamp(-_MOST, _MOST).view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    step, middle = ((high - low) / (2 * half - 1)).clamp_min(_LEAST), (high + low) / 2
    target = (groups - middle) / step
    mean = target.mean(dim=2, keepdim=True)
    best = torch.full_like(step, -1.0)
    scale, offset = torch.ones_like(step), torch.zeros_like(step)
    for share in _SHARES[bits]:
        slope, shift = torch.full_like(step, share), torch.full_like(step, share / 2)
        for _ in range(2):
            codes = _codes(target, slope, shift, half)
            center = codes.mean(dim=2, keepdim=True)
            variance = codes.square().sum(dim=2, keepdim=True) - GROUP * center * center
            shared = (codes * target).sum(dim=2, keepdim=True) - GROUP * center * mean
            varies = variance > 0.1
            slope = torch.where(varies, shared / variance, slope)
            shift = mean - slope * center
            explained = torch.where(varies, shared * shared / variance, 0.0)
        better = explained > best
        best = torch.where(better, explained, best)
        scale, offset = torch.where(better, slope, scale), torch.where(better, shift, offset)
    scale, offset = _storable(scale * step, offset * step + middle)
    codes = _codes(groups, scale, offset, half)
    flat = (codes + half).to(torch.int32).view(weight.shape)
    return flat, scale[..., 0].to(torch.bfloat16), offset[..., 0].to(torch.bfloat16)


def _storable(scale: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As bfloat16 will hold them, the scale never 0."""
    scale = torch.where(scale.abs() < _LEAST, torch.full_like(scale, _LEAST), scale)
    return scale.to(torch.bfloat16).float(), offset.to(torch.bfloat16).float()


def _codes(
    groups: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, half: int
) -> torch.Tensor:
    return ((groups - offset) / scale).round_().clamp_(-half, half - 1)
