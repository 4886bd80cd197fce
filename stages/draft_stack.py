"""The drafter's layers, each in the quickest way that it can go.

Runs of layers that the compiled part takes are one call each; layers of the common shape are
draft_layer.py's; the others are transformers' own, with substitutes in the place of their linears.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from stages.attention import DraftRiders, TreeMask
from stages.compiled_layers import CompiledLayers, Step, describe
from stages.draft_layer import DraftLayer, Product, signed
from stages.kv import DraftScratch, KVStore
from stages.rope import Rope
from stages.shapes import ModelShape
from stages.skeleton import Skeleton, turn
from stages.weights import Weights, joined


class SubstituteLinear(nn.Module):
    """An nn.Linear whose weight is a substitute."""

    def __init__(self, product: Product, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._product, self._bias = product, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), in x's dtype."""
        out = self._product(x.reshape(-1, x.shape[-1]))
        if self._bias is not None:
            out = out + self._bias
        return out.view(*x.shape[:-1], -1)


class DraftStack:
    """All layers of `skeleton`, whose linears are replaced. Holds no memory of its own to speak of.

    Keys and values of committed rows are read from `kv`, those of nodes are put into `scratch`.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        weights: Weights,
        shape: ModelShape,
        rope: Rope,
        kv: KVStore,
        scratch: DraftScratch,
    ) -> None:
        """`skeleton`: with its norms and biases bound."""
        self._skeleton, self._rope, self._kv, self._scratch = skeleton, rope, kv, scratch
        self._kinds = {kind: index for index, kind in enumerate(rope.tables)}
        indices = range(len(skeleton.layers))
        made = [self._common(index, weights) for index in indices]
        self._fast = [None if pair is None else pair[0] for pair in made]
        if not all(self._fast):
            self._replace(shape, weights)
        descriptions = [None if pair is None else pair[1] for pair in made]
        self._parts: list[CompiledLayers | list[int]] = []
        for own_way, group in itertools.groupby(indices, lambda index: descriptions[index] is None):
            part = list(group)
            found = [d for index in part if (d := descriptions[index]) is not None]
            self._parts.append(part if own_way else CompiledLayers(found))

    @property
    def compiled(self) -> bool:
        """Whether the compiled part takes all of them."""
        return all(isinstance(part, CompiledLayers) for part in self._parts)

    def _common(self, index: int, weights: Weights) -> tuple[DraftLayer, bytes | None] | None:
        groups = joined(self._skeleton, index)
        if not groups:
            return None
        prefix = self._skeleton.architecture.layer_prefix(index)
        qkv, gate_up = groups
        matrices = (
            qkv,
            (f"{prefix}self_attn.o_proj.weight",),
            gate_up,
            (f"{prefix}mlp.down_proj.weight",),
        )
        products = [weights.product(*names) for names in matrices]
        layer = DraftLayer(self._skeleton.layers[index], index, *products)
        kind = self._skeleton.architecture.ropes[index]
        if kind is not None and 2 * len(self._rope.tables[kind].short) != layer.dim:
            return layer, None
        kernels = [weights.compiled(*names) for names in matrices]
        return layer, describe(layer, kernels, None if kind is None else self._kinds[kind])

    def _replace(self, shape: ModelShape, weights: Weights) -> None:
        """Put substitutes in the place of the linears of transformers' own layers."""
        for matrix in shape.matrices():
            name = matrix.name
            if (name,) in weights.substitutes:
                bias = weights.resident.get(name.removesuffix("weight") + "bias")
                self._skeleton.replace(name, SubstituteLinear(weights.product(name), bias))

    def run(
        self,
        hidden: torch.Tensor,
        place: int,
        committed: int,
        seen: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """hidden (rows, hidden), which may be changed, through all layers: (rows, hidden).

        The first `committed` rows of `place` are looked at, and nodes: seen (rows, nodes) bool,
        positions (nodes,), the rows being the last of them.
        """
        rows, nodes = seen.shape
        first, own = nodes - rows, positions[nodes - rows :]
        total = int(own.max()) + 1 if self._rope.switch_at is not None else 0
        rotary = turn(self._rope, own, total, self._skeleton.dtype)
        step = Step(place, first, committed, seen, positions, list(rotary.values()))
        for part in self._parts:
            if isinstance(part, CompiledLayers):
                hidden = part.run(hidden, step, self._kv, self._scratch)
                continue
            mask = TreeMask(committed, positions, seen)
            riders = DraftRiders(self._kv, self._scratch, place, first, committed, mask)
            turns = {kind: signed(*pair) for kind, pair in rotary.items()}
            for index in part:
                fast, kind = self._fast[index], self._skeleton.architecture.ropes[index]
                if fast is None:
                    hidden = self._skeleton.run_layer(index, hidden[None], riders, rotary)[0]
                else:
                    hidden = fast.run(hidden, riders, None if kind is None else turns[kind])
        return hidden
