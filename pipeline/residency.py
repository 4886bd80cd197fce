"""Which matrices stay: how a ladder of residencies is made.

A matrix made resident costs its bytes in the compute dtype and gives back its substitute's bytes.
Layers are taken whole, best first by link bytes saved per byte of memory, those that are alike
spread over the model, and matrix by matrix within the last one, so that memory is used up to within
a matrix.

The ring's slots hold the largest streamed piece, so a ladder has a `cap`: the largest piece that
may stream. A full layer is the natural cap. Under a smaller one every layer keeps its largest
matrices resident from the start, and the ring shrinks by that much in every slot: with most of
the model resident that is worth more than further layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pipeline.ladder import Ladder, Rung
from stages.shapes import LayerShape, MatrixShape, ModelShape

BLOCK = 4096
_EXTENT_BYTES = 2 * BLOCK  # alignment at both ends of what does not lie beside its neighbor
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_NEAR = 64 * 1024  # gaps up to this size are read through, into the slot

SubstituteBytes = Mapping[str, int]


def canonical(shape: ModelShape) -> ModelShape:
    """The same model in one order, so that a plan does not depend on how files list tensors."""
    layers = (
        LayerShape(layer.index, tuple(sorted(layer.matrices, key=lambda m: m.name)))
        for layer in shape.layers
    )
    ordered = tuple(sorted(layers, key=lambda layer: layer.index))
    return msgspec.structs.replace(shape, layers=ordered)


def caps(shape: ModelShape) -> tuple[int, ...]:
    """Piece sizes worth trying: the largest layer's, without its largest matrix, and so on."""
    gap = _small_gap(shape)
    largest = max(shape.layers, key=lambda layer: (layer_bytes(layer), -layer.index))
    streamed = _by_size(largest)
    found = []
    while streamed:
        found.append(_piece_bytes(largest, streamed, gap))
        streamed = streamed[1:]
    return tuple(sorted(set(found), reverse=True))


def layer_bytes(layer: LayerShape) -> int:
    """Source bytes of a layer's matrices."""
    return sum(matrix.nbytes for matrix in layer.matrices)


def resident_bytes(matrix: MatrixShape, compute_itemsize: int) -> int:
    """What a resident matrix holds of the device, which allocates whole pages."""
    return _up(matrix.elements * compute_itemsize)


def head_piece_rows(head: MatrixShape, cap: int) -> int:
    """Vocabulary rows of a head piece that fits `cap` bytes, pieces of about equal size."""
    row = -(-head.nbytes // head.rows)
    fitting = max(1, min(head.rows, (cap - _EXTENT_BYTES) // row))
    pieces = -(-head.rows // fitting)
    return -(-head.rows // pieces)


def spread(count: int) -> list[int]:
    """The turn in which each of `count` layers becomes resident, where all are alike.

    The first of them, however many, lie evenly apart (the multiples of the golden ratio do): a
    link that has filled the ring stands still while resident layers are computed, so these must
    not come all in a row.
    """
    return sorted(range(count), key=lambda turn: turn * _GOLDEN % 1.0)


def climb(
    shape: ModelShape,
    cap: int,
    *,
    head_resident: bool,
    substitute: SubstituteBytes,
    low: bool = False,
) -> Ladder:
    """The ladder of a canonical `shape`: every layer within `cap`, head streamed or resident.

    `substitute` gives the bytes of each matrix's low-bit copy by name (0 where there are none);
    `low`: see Ladder.
    """
    if low:
        none = dict.fromkeys(substitute, 0)
        bare = climb(shape, cap, head_resident=head_resident, substitute=none)
        return with_substitutes(bare, sum(substitute.values()))
    return _Climb(shape, cap, head_resident, substitute).ladder()


def with_substitutes(bare: Ladder, nbytes: int) -> Ladder:
    """A ladder without any, with the substitutes of every matrix on every rung: none are given
    back as matrices become resident, so that the order stays as it is."""
    rungs = (rung._replace(substitute_bytes=nbytes, drafting_bytes=0) for rung in bare.rungs)
    return msgspec.structs.replace(bare, rungs=tuple(rungs), low=True)


class _Step(NamedTuple):
    """A matrix of a layer that becomes resident: its sizes, and those of the piece it leaves."""

    place: int  # among its layer's
    resident: int
    streamed: int
    substitute: int  # given back
    converted: int
    slot: int
    decode: int


class _Start(NamedTuple):
    """A layer, what its steps gain, and its resident bytes after the last of them."""

    layer: LayerShape
    gain: float
    resident: int
    steps: list[_Step]


class _Climb:
    """A ladder in the making."""

    def __init__(
        self,
        shape: ModelShape,
        cap: int,
        head_resident: bool,
        substitute: SubstituteBytes,
    ) -> None:
        self._shape, self._cap, self._substitute = shape, cap, substitute
        self._item = shape.compute_itemsize
        self._gap = _small_gap(shape)
        self._head_resident = head_resident
        self._head_rows = shape.vocab if head_resident else head_piece_rows(shape.head, cap)

    def ladder(self) -> Ladder:
        """Made from the top down: of all that it adds up or takes the largest of, only what is
        resident shrinks as matrices leave. `Ladder.ideal` rests on that."""
        shape, head, starts = self._shape, self._shape.head, self._starts()
        streamed, low, converted, slot, decode, pieces = self._top()
        resident = sum(start.resident for start in starts)
        base = {m.name for m in shape.matrices()}
        if self._head_resident:
            resident += resident_bytes(head, self._item)
            base.add(head.name)
        order: list[str] = []
        rungs: list[Rung] = []

        def rung() -> Rung:
            return Rung(resident, streamed, low, slot, decode, converted, pieces, resident)

        if not self._head_resident:
            rungs.append(rung())
        for layer, _, _, steps in reversed(starts):
            pieces += bool(steps)
            for step in reversed(steps):
                order.append(layer.matrices[step.place].name)
                resident -= step.resident
                streamed += step.streamed
                low += step.substitute
                converted += step.converted
                slot, decode = max(slot, step.slot), max(decode, step.decode)
                rungs.append(rung())
        return Ladder(
            base=tuple(sorted(base.difference(order))),
            order=tuple(reversed(order)),
            rungs=tuple(reversed(rungs)),
            head_rows=self._head_rows,
            head_resident=self._head_resident,
            low=False,
        )

    def _top(self) -> tuple[int, int, int, int, int, int]:
        """With every layer resident: streamed, substitute and converted bytes, the largest slot
        and decode buffer, pieces."""
        head = self._shape.head
        if self._head_resident:
            return 0, 0, 0, 0, 0, 0
        nbytes = self._head_rows * -(-head.nbytes // head.rows)
        converted = self._converted(head)
        part = converted * self._head_rows // head.rows
        return (
            head.nbytes,
            self._substitute[head.name],
            converted,
            _up(nbytes) + _EXTENT_BYTES,
            _up(part) + 64 if part else 0,
            -(-self._shape.vocab // self._head_rows),
        )

    def _starts(self) -> list[_Start]:
        """Every layer, best first. Those of the same sizes are looked at once: in a canonical
        shape their matrices have the same places."""
        kinds: dict[tuple[tuple[int, ...], ...], _Start] = {}
        found, low = [], self._substitute
        for layer in self._shape.layers:
            kind = tuple((m.rows, m.cols, m.nbytes, low[m.name]) for m in layer.matrices)
            if kind not in kinds:
                kinds[kind] = self._start(layer)
            found.append(kinds[kind]._replace(layer=layer))
        turns = spread(len(found))
        return sorted(found, key=lambda start: (-start.gain, turns[start.layer.index]))

    def _start(self, layer: LayerShape) -> _Start:
        """Its largest matrices are resident from the foot on, as many as keep the rest within the
        cap; the others become it best first."""
        streamed = _by_size(layer)
        while streamed and _piece_bytes(layer, streamed, self._gap) > self._cap:
            streamed = streamed[1:]
        rest = sorted(streamed, key=lambda m: (-self._gain([m]), m.nbytes, m.name))
        steps = [
            _Step(
                place=layer.matrices.index(matrix),
                resident=resident_bytes(matrix, self._item),
                streamed=matrix.nbytes,
                substitute=self._substitute[matrix.name],
                converted=self._converted(matrix),
                slot=_piece_bytes(layer, rest[step:], self._gap),
                decode=sum(c + 64 for m in rest[step:] if (c := self._converted(m))),
            )
            for step, matrix in enumerate(rest)
        ]
        whole = sum(resident_bytes(m, self._item) for m in layer.matrices)
        return _Start(layer, self._gain(streamed), whole, steps)

    def _gain(self, matrices: list[MatrixShape]) -> float:
        """Link bytes saved per byte of memory."""
        saved = sum(m.nbytes for m in matrices)
        cost = sum(resident_bytes(m, self._item) - self._substitute[m.name] for m in matrices)
        return saved / cost if cost > 0 else float("inf")

    def _converted(self, matrix: MatrixShape) -> int:
        """Bytes in the compute dtype, if the source's is another."""
        full = matrix.elements * self._item
        return 0 if full == matrix.nbytes else full


def _by_size(layer: LayerShape) -> list[MatrixShape]:
    return sorted(layer.matrices, key=lambda m: (-m.nbytes, m.name))


def _small_gap(shape: ModelShape) -> int:
    """Norms and biases that lie between a layer's matrices and are read through."""
    item = max(shape.source_itemsize, shape.compute_itemsize)
    whole = shape.small_bytes * item // shape.compute_itemsize
    return -(-whole // max(1, len(shape.layers)))


def _piece_bytes(layer: LayerShape, streamed: list[MatrixShape], gap: int) -> int:
    """A bound of the slot bytes of a piece, wherever its tensors lie within their files.

    Resident matrices small enough to be read through count as well.
    """
    if not streamed:
        return 0
    kept = {m.name for m in streamed}
    near = sum(m.nbytes for m in layer.matrices if m.name not in kept and m.nbytes <= _NEAR)
    nbytes = sum(m.nbytes for m in streamed) + near + gap
    return _up(nbytes) + _EXTENT_BYTES * len(streamed)


def _up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
