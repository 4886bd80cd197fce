"""int6, int4, int3 and int2 substitutes: 64 weights share a scale and an offset.

weight = (code - half) * scale + offset, half the codes' number, scale and offset in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from stages.affine_kernels import KERNELS, Making
from stages.formats import BITS, GROUP
from stages.quantized import Quantized, group_shares

_MOST = 1e37
"""Weights beyond it are cut: no trained weight is so large, and a group's range would overflow."""
_SHARES = {6: (1.0, 0.9), 4: (1.0, 0.9), 3: (0.9, 0.75), 2: (0.8, 0.6)}
"""Shares of a group's range that the fit starts from, by bits: fewer codes leave more outside."""
_VARIES = 1e-9
"""Variance of codes below which a line through them means nothing."""
_LEAST = 1e-8
"""A scale must not be 0: a kernel's zero times infinity would be NaN."""


class Affine(Quantized[torch.Tensor, torch.Tensor, torch.Tensor]):
    """See Substitute. `kernel`: what packs and multiplies; the fastest there is unless given."""

    def __init__(
        self,
        form: str,
        blocks: Iterable[torch.Tensor],
        shape: tuple[int, int],
        inputs: torch.Tensor | None = None,
        kernel: Making | None = None,
    ) -> None:
        made = partial(kernel or KERNELS[form], form)
        fit = partial(quantize_groups, BITS[form], group_shares(inputs, shape[1]))
        super().__init__(form, blocks, shape, made, fit)


def quantize_groups(
    bits: int, shares: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (rows, cols) int32, scales and offsets (rows, cols / 64) bfloat16.

    From each start: codes, then the scale and offset that are best for these codes in the
    least-squares sense, errors weighed by `shares` (see group_shares), twice; of all starts the one
    that explains most of a group's variance, and codes once more from what bfloat16 holds.
    weight: (rows, cols) float32, cols a multiple of 64.
    """
    half = 1 << bits - 1
    groups = weight.clamp(-_MOST, _MOST).view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    step, middle = ((high - low) / (2 * half - 1)).clamp_min(_LEAST), (high + low) / 2
    target = (groups - middle) / step
    mean = (target * shares).sum(dim=2, keepdim=True)
    best = torch.full_like(step, -1.0)
    scale, offset = torch.ones_like(step), torch.zeros_like(step)
    for share in _SHARES[bits]:
        slope, shift = torch.full_like(step, share), torch.full_like(step, share / 2)
        for _ in range(2):
            codes = _codes(target, slope, shift, half)
            center = (codes * shares).sum(dim=2, keepdim=True)
            weighed = codes.sub_(center) * shares
            variance = codes.mul_(weighed).sum(dim=2, keepdim=True)
            shared = weighed.mul_(target).sum(dim=2, keepdim=True)
            varies = variance > _VARIES
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
