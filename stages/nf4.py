"""nf4 substitutes: 4-bit normal-float codes as bitsandbytes chooses them, 64 to a scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from stages.formats import GROUP
from stages.nf4_kernels import KERNEL, bitsandbytes
from stages.quantized import Making, Quantized


class Nf4(Quantized[torch.Tensor, Any]):
    """See Substitute. `kernel`: what packs and multiplies; the fastest there is unless given."""

    def __init__(
        self,
        blocks: Iterable[torch.Tensor],
        shape: tuple[int, int],
        kernel: Making[torch.Tensor, Any] | None = None,
    ) -> None:
        super().__init__("nf4", blocks, shape, kernel or KERNEL, _quantized)


def _quantized(padded: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Packed codes, and bitsandbytes' state with their scales."""
    packed, state = bitsandbytes().quantize_4bit(
        padded.contiguous(), blocksize=GROUP, quant_type="nf4"
    )
    return packed, state
