"""How much each layer's substitutes hurt: what a planner spends bits by.

While a model is read for the first time, copies of the probe's text go through it as well. Layers
are in at most BLOCKS blocks; copy b meets int4 substitutes in block b, full precision elsewhere. At
the head, the mean KL divergence of what a copy says from what the text itself does is what the
substitutes of its block cost. A copy begins with its block, so that a layer is run for half of the
copies on average: with 12 blocks that is 6.5 times what the probe alone runs, and every matrix is
quantized once more. The head is left out: its substitute has bits of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from stages.device import MemoryAccount
from stages.divergence import Divergence
from stages.loading import OpenedModel
from stages.probe import Probe
from stages.quantized import PART_ROWS
from stages.skeleton import Skeleton
from stages.substitutes import quantize

REFERENCE = "int4"
"""The format that is measured with."""
BLOCKS = 12
_HEAD_ROWS = 2048
"""Vocabulary rows scored at once."""


class Sensitivity(Probe):
    """A probe whose text has copies. The text goes as it does without them.

    Their rows are charged to `memory`, and `close` gives them back; substitutes are made in parts
    and used at once, so that they take no more than quantizing a matrix does.
    """

    def __init__(self, opened: OpenedModel, skeleton: Skeleton, memory: MemoryAccount) -> None:
        """See Probe."""
        super().__init__(opened, skeleton)
        self._opened, self._memory = opened, memory
        self._count = len(opened.shape.layers)
        self._copies: list[torch.Tensor] = []
        self._charged = ExitStack()

    def layer(self, index: int, matrices: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Probe. Raises DeviceMemoryError where another copy does not fit."""
        before = self.hidden
        inputs = super().layer(index, matrices)
        if len(self._copies) == block(index, self._count):
            self._memory.take(before.nbytes, "measuring")
            self._charged.callback(self._memory.give, before.nbytes, "measuring")
            self._copies.append(before)
        others = [self.run(index, copy, matrices) for copy in self._copies[:-1]]
        self._copies = [*others, self._changed(index, matrices, inputs)]
        return inputs

    def _changed(
        self, index: int, matrices: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The last copy after a layer that multiplies by substitutes."""
        with ExitStack() as undo:
            for name, seen in inputs.items():
                home = self._skeleton.home(name)
                undo.callback(home.register_forward_hook(partial(_instead, seen)).remove)
            return self.run(index, self._copies[-1], matrices)

    def costs(self, parts: Iterable[torch.Tensor]) -> tuple[float, ...] | None:
        """After the last layer: nats that int4 substitutes of each layer cost; None where what is
        said is no number. parts: the head's rows in order, some at a time."""
        finish = self._opened.architecture.finish
        text, *copies = (
            self._skeleton.finish(hidden)[0] for hidden in (self.hidden, *self._copies)
        )
        found = [Divergence(len(text)) for _ in copies]
        for rows in (some for part in parts for some in part.split(_HEAD_ROWS)):
            weight = rows.to(self._opened.dtype)
            logits = finish(functional.linear(text, weight))
            for copy, divergence in zip(copies, found, strict=True):
                divergence.see(logits, finish(functional.linear(copy, weight)))
        return _shared([one.mean() for one in found], self._count)

    def close(self) -> None:
        """Give back what is charged. A second call does nothing."""
        self._copies.clear()
        self._charged.close()


def block(layer: int, layers: int) -> int:
    """Which of the blocks, all of about the same size, a layer is in."""
    return layer * min(layers, BLOCKS) // layers


def _shared(costs: list[float], layers: int) -> tuple[float, ...] | None:
    """Each layer's part of what its block costs, evenly; None where a cost is no number."""
    if not all(math.isfinite(cost) for cost in costs):
        return None
    blocks = [block(layer, layers) for layer in range(layers)]
    # Rounding may take a cost that is next to nothing below it.
    return tuple(max(0.0, costs[one]) / blocks.count(one) for one in blocks)


def _instead(
    inputs: torch.Tensor, linear: nn.Module, given: tuple[torch.Tensor, ...], _: torch.Tensor
) -> torch.Tensor:
    """What an nn.Linear gives with a substitute for its weight, which is never there whole."""
    (x,), weight, bias = given, linear._parameters["weight"], linear._parameters["bias"]
    assert weight is not None
    parts = []
    for rows in weight.split(PART_ROWS):
        low = quantize([rows], (rows.shape[0], rows.shape[1]), REFERENCE, inputs).dequantize()
        parts.append(functional.linear(x, low.to(x.dtype)))
    out = torch.cat(parts, dim=-1)
    return out if bias is None else out + bias
