"""int8 substitutes: the weights of a row share a scale, on the fastest kernel there is."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from stages.int8_kernels import KERNEL
from stages.quantized import Making, Quantized

_LEAST = 1e-8


class Int8(Quantized[torch.Tensor, torch.Tensor]):
    """See Substitute. weight = code * scale. `kernel`: the fastest there is unless given.

    A row has one scale, and enough codes for its largest weight: what comes in changes nothing.
    """

    def __init__(
        self,
        blocks: Iterable[torch.Tensor],
        shape: tuple[int, int],
        inputs: torch.Tensor | None = None,
        kernel: Making[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        super().__init__("int8", blocks, shape, kernel or KERNEL, _quantized)


def _quantized(padded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (rows, cols) int8, scales (rows,) bfloat16."""
    scale = (padded.abs().amax(dim=1) / 127).clamp_min(_LEAST).to(torch.bfloat16)
    codes = (padded / scale.float()[:, None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale
