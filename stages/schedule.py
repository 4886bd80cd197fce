"""The order of a sweep: which layers run at once, and which piece each streamed one waits for.

Pure. One piece a streamed layer (only the matrices that are not resident), then the head, whole
when resident, else cut by vocabulary rows. Piece i is the i-th that a sweep waits for.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stages.checkpoint import TensorSpec
from stages.pieces import Group, Piece, cut_pieces, cut_rows
from stages.placement import Placement
from stages.shapes import LayerShape, ModelShape


class Step(msgspec.Struct, frozen=True):
    """Either resident `layers` in a row, or one streamed layer with its piece, or a head part.

    `layers` is empty for head steps; `piece` is None for what is resident.
    """

    layers: tuple[int, ...]
    piece: Piece | None

    @property
    def is_head(self) -> bool:
        """Whether this is the head or a part of it."""
        return not self.layers


def schedule(
    shape: ModelShape, placement: Placement, tensors: Mapping[str, TensorSpec]
) -> tuple[tuple[Step, ...], tuple[Piece, ...]]:
    """The steps of every sweep, and the pieces among them in order."""
    resident = frozenset(placement.resident)
    streamed = [layer for layer in shape.layers if _streamed(layer, resident, tensors)]
    groups = [
        Group("layer", layer.index, _streamed(layer, resident, tensors)) for layer in streamed
    ]
    head_streamed = shape.head.name not in resident
    if head_streamed:
        ranges = cut_rows(tensors[shape.head.name], placement.head_rows)
        groups += [Group("head", len(shape.layers), (part,)) for part in ranges]
    pieces = cut_pieces(groups)
    by_layer = {piece.layer: piece for piece in pieces if piece.kind == "layer"}
    steps: list[Step] = []
    for layer in range(len(shape.layers)):
        piece = by_layer.get(layer)
        if piece is None and steps and steps[-1].piece is None:
            steps[-1] = Step((*steps[-1].layers, layer), None)
        else:
            steps.append(Step((layer,), piece))
    heads = [piece for piece in pieces if piece.kind == "head"]
    steps += [Step((), piece) for piece in heads] if head_streamed else [Step((), None)]
    return tuple(steps), pieces


def _streamed(
    layer: LayerShape, resident: frozenset[str], tensors: Mapping[str, TensorSpec]
) -> tuple[TensorSpec, ...]:
    specs = [tensors[m.name] for m in layer.matrices if m.name not in resident]
    return tuple(sorted(specs, key=lambda spec: (spec.path, spec.offset)))
