"""Layers of the common shape in one compiled call (draft_layers.c), where they can be.

They can where all their matrices are packed substitutes, everything is
float32, and sizes are what its vectors need. Other layers go their own way (draft_layer.py).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import torch

from stages.compiled import COMPILED, compiled_part
from stages.draft_layer import DraftLayer
from stages.kv import DraftScratch, KVStore
from stages.packed import Packed

_LAYER = struct.Struct("6P" + 4 * "Pq" + "8q3d")
_STEP = struct.Struct("6P5q4P")
_KINDS = 2
"""Kinds of rotary tables there is room for."""


class Step(msgspec.Struct, frozen=True):
    """What rows of a tree look at: committed rows of `place`, and nodes that they descend from.

    first: the scratch row of the first of them; committed: how many rows of the store count;
    seen: (rows, nodes) bool, themselves included; positions: (nodes,) int64; turns: cos and sin
    (1, rows, dim) of each kind of rotary table.
    """

    place: int
    first: int
    committed: int
    seen: torch.Tensor
    positions: torch.Tensor
    turns: Sequence[tuple[torch.Tensor, torch.Tensor]]


def describe(
    layer: DraftLayer, matrices: Sequence[Packed | None], kind: int | None
) -> bytes | None:
    """A layer as draft_layers.c reads it; None where it has to go its own way.

    matrices: of q, k and v; of the output; of gate and up; of down. kind: its rotary table.
    """
    tensors = (
        layer.before,
        layer.after,
        *(layer.head_norms or (None, None)),
        layer.bias,
        layer.out_bias,
    )
    packed = [matrix for matrix in matrices if matrix is not None]
    if COMPILED is None or len(packed) < 4 or (kind or 0) >= _KINDS:
        return None
    if any(t is not None and t.dtype is not torch.float32 for t in tensors):
        return None
    hidden, inner = layer.before.shape[0], packed[3].shape[1]
    if hidden % 8 or inner % 8 or layer.dim % 16:
        return None
    return _LAYER.pack(
        *(0 if t is None else t.data_ptr() for t in tensors),
        *(part for matrix in packed for part in (matrix.address, matrix.form)),
        layer.index,
        -1 if kind is None else kind,
        layer.how.window or 0,
        hidden,
        inner,
        layer.heads,
        layer.kv_heads,
        layer.dim,
        layer.eps,
        layer.how.scale,
        layer.multiplier,
    )


class CompiledLayers:
    """Consecutive layers, whose tensors and kernels the caller keeps."""

    def __init__(self, descriptions: Sequence[bytes]) -> None:
        self._layers = b"".join(descriptions)
        self._room = torch.empty(0, dtype=torch.uint8)

    def run(
        self, hidden: torch.Tensor, step: Step, kv: KVStore, scratch: DraftScratch
    ) -> torch.Tensor:
        """hidden (rows, hidden) through the layers, in place; fills the rows' scratch."""
        rows, nodes = step.seen.shape
        block, own = kv.block(step.place), scratch.block
        assert nodes == step.first + rows <= scratch.rows and step.committed <= kv.capacity
        assert hidden.is_contiguous() and step.seen.is_contiguous() and len(step.positions) == nodes
        need = compiled_part.draft_room(self._layers, rows)
        if self._room.nbytes < need:
            self._room = torch.empty(need, dtype=torch.uint8)
        turns = [part.data_ptr() for pair in step.turns for part in pair]
        compiled_part.draft_layers(
            self._layers,
            _STEP.pack(
                hidden.data_ptr(),
                block.data_ptr(),
                own.data_ptr(),
                step.seen.data_ptr(),
                step.positions.data_ptr(),
                self._room.data_ptr(),
                rows,
                step.first,
                step.committed,
                kv.capacity,
                scratch.rows,
                *turns,
                *(0,) * (2 * _KINDS - len(turns)),
            ),
        )
        return hidden
