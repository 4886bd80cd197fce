"""nf4 substitutes: 4-bit normal-float codes, 64 to a scale, which is fitted to them.

bitsandbytes takes the absolute maximum of 64 weights for their scale. Here it is what makes the
codes' squared error least, each weighed by what comes in, of either sign (nf4's levels are not
symmetric). Without weights that is a fifth to a quarter less error.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from stages.formats import GROUP
from stages.nf4_kernels import KERNEL, levels
from stages.quantized import Making, Quantized, group_shares

_MOST = 1e17
"""Weights beyond it are cut: no trained weight is so large, and squares would overflow."""
_LEAST = 1e-8
_SHARES = (1.0, 0.9, -1.0, -0.9)
"""Shares of a group's absolute maximum that the fit starts from."""
_FINE = 1024
"""Steps from 0 to 1 at which the nearest level is looked up."""


class Nf4(Quantized[torch.Tensor, torch.Tensor]):
    """See Substitute and quantize. `kernel`: what packs and multiplies; the fastest there is unless
    given."""

    def __init__(
        self,
        blocks: Iterable[torch.Tensor],
        shape: tuple[int, int],
        inputs: torch.Tensor | None = None,
        kernel: Making[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        shares = group_shares(inputs, shape[1])
        super().__init__("nf4", blocks, shape, kernel or KERNEL, partial(quantize_groups, shares))


def quantize_groups(
    shares: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (rows, cols) uint8 and scales (rows, cols / 64) float32.

    From each start: the nearest levels, then the scale that is best for these in the least-squares
    sense, twice; of all starts the one that explains most, and codes once more.
    shares: see group_shares; weight: (rows, cols) float32, cols a multiple of 64.
    """
    # What is no number would be looked up nowhere.
    groups = weight.nan_to_num(0.0).clamp_(-_MOST, _MOST).view(weight.shape[0], -1, GROUP)
    peak = groups.abs().amax(dim=2, keepdim=True).clamp_min(_LEAST)
    known = levels().to(weight.device)
    codes_at, levels_at = _tables(known)
    scale, best = peak, torch.full_like(peak, -1.0)
    weighed = groups * shares
    for share in _SHARES:
        tried = share * peak
        for _ in range(2):
            near = _looked_up(levels_at, groups, tried)
            shared = (near * weighed).sum(dim=2, keepdim=True)
            size = near.square_().mul_(shares).sum(dim=2, keepdim=True).clamp_min(_LEAST)
            tried = torch.where(shared.abs() > _LEAST * size, shared / size, tried)
        explained = shared.square() / size
        scale, best = torch.where(explained > best, tried, scale), explained.maximum(best)
    return _looked_up(codes_at, groups, scale).view(weight.shape), scale[..., 0]


def _tables(known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest level's code and the level itself, for -1 to 1 in steps of 1 / _FINE."""
    edges = (known[1:] + known[:-1]) / 2
    places = torch.arange(-_FINE, _FINE + 1, device=known.device) / _FINE
    codes = torch.bucketize(places, edges)
    return codes.to(torch.uint8), known[codes]


def _looked_up(table: torch.Tensor, groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    steps = (groups * (_FINE / scale)).clamp_(-_FINE, _FINE).add_(_FINE + 0.5).to(torch.int32)
    return table.index_select(0, steps.view(-1)).view(groups.shape)
