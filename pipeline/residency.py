"""Which matrices stay: a ladder of residencies, each rung with one matrix more than the one below.

A matrix made resident costs its bytes in the compute dtype and gives back its substitute's bytes.
Layers are taken whole, best first by link bytes saved per byte of memory, and matrix by matrix
within the last one, so that memory is used up to within a matrix.

The ring's slots hold the largest streamed piece, so a ladder has a `cap`: the largest piece that
may stream. A full layer is the natural cap. Under a smaller one every layer keeps its largest
matrices resident from the start, and the ring shrinks by that much in every slot: with most of
the model resident that is worth more than further layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from stages.shapes import LayerShape, MatrixShape, ModelShape

BLOCK = 4096
_EXTENT_BYTES = 2 * BLOCK  # alignment at both ends of what does not lie beside its neighbor
_NEAR = 64 * 1024  # gaps up to this size are read through, into the slot

SubstituteBytes = Mapping[str, int]


class Rung(NamedTuple):
    """Sizes at one residency, in bytes; `pieces` a sweep. `converted_bytes` is what a sweep
    converts to the compute dtype, `decode_bytes` the buffer for the largest piece of it,
    `drafting_bytes` what a draft step reads in full precision."""

    resident_bytes: int
    streamed_bytes: int
    substitute_bytes: int
    slot_bytes: int
    decode_bytes: int
    converted_bytes: int
    pieces: int
    drafting_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """What the rung takes besides the ring."""
        return self.resident_bytes + self.substitute_bytes + self.decode_bytes


class Ladder(msgspec.Struct, frozen=True):
    """`base` is resident on every rung; rung k adds the first k names of `order`.

    Every rung streams something: holding all is a plan of its own, without a ring. `low`: resident
    matrices have substitutes as well, so that a draft step is as quick as with none resident.
    """

    base: tuple[str, ...]
    order: tuple[str, ...]
    rungs: tuple[Rung, ...]
    head_rows: int
    head_resident: bool
    low: bool

    def resident(self, rung: int) -> frozenset[str]:
        """Names of the matrices that are resident on a rung."""
        return frozenset(self.base) | frozenset(self.order[:rung])


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
    return _Climb(shape, cap, head_resident, substitute, low).ladder()


class _Climb:
    def __init__(
        self,
        shape: ModelShape,
        cap: int,
        head_resident: bool,
        substitute: SubstituteBytes,
        low: bool,
    ) -> None:
        self._shape, self._substitute, self._low = shape, substitute, low
        self._item = shape.compute_itemsize
        self._gap = _small_gap(shape)
        self._head_resident = head_resident
        self._head_rows = shape.vocab if head_resident else head_piece_rows(shape.head, cap)
        kept = [self._kept(layer, cap) for layer in shape.layers]
        starts = zip(shape.layers, kept, strict=True)
        self._starts = sorted(starts, key=lambda start: self._rank(*start))

    def _kept(self, layer: LayerShape, cap: int) -> list[MatrixShape]:
        """What streams of a layer when its largest matrices stay until the rest fits `cap`."""
        streamed = _by_size(layer)
        while streamed and _piece_bytes(layer, streamed, self._gap) > cap:
            streamed = streamed[1:]
        return streamed

    def _gain(self, matrices: list[MatrixShape]) -> float:
        """Link bytes saved per byte of memory."""
        saved = sum(m.nbytes for m in matrices)
        cost = sum(resident_bytes(m, self._item) - self._given_back(m) for m in matrices)
        return saved / cost if cost > 0 else float("inf")

    def _given_back(self, matrix: MatrixShape) -> int:
        """Bytes of the substitute that goes as `matrix` becomes resident."""
        return 0 if self._low else self._substitute[matrix.name]

    def _rank(self, layer: LayerShape, streamed: list[MatrixShape]) -> tuple[float, int]:
        return -self._gain(streamed), layer.index

    def ladder(self) -> Ladder:
        shape = self._shape
        tops = self._tops()
        base = {m.name for layer in shape.layers for m in layer.matrices}
        base -= {m.name for _, streamed in self._starts for m in streamed}
        sums = self._sums()
        order: list[str] = []
        rungs: list[Rung] = []
        for place, (layer, streamed) in enumerate(self._starts):
            rest = sorted(streamed, key=lambda m: (-self._gain([m]), m.nbytes, m.name))
            pieces = len([1 for _, later in self._starts[place + 1 :] if later])
            while rest:
                rungs.append(self._rung(sums, tops[place + 1], layer, rest, pieces + 1))
                matrix = rest.pop(0)
                order.append(matrix.name)
                self._move(sums, matrix)
        if not self._head_resident:
            rungs.append(self._rung(sums, tops[-1], None, [], 0))
        head = {shape.head.name} if self._head_resident else set()
        foot = tuple(sorted(base | head))
        head_rows, low = self._head_rows, self._low
        return Ladder(foot, tuple(order), tuple(rungs), head_rows, self._head_resident, low)

    def _tops(self) -> list[tuple[int, int]]:
        """From each place of the order on: the largest slot and decode buffer, head included."""
        tops = [self._head_piece()]
        for layer, streamed in reversed(self._starts):
            slot, decode = self._piece(layer, streamed)
            tops.append((max(slot, tops[-1][0]), max(decode, tops[-1][1])))
        return tops[::-1]

    def _head_piece(self) -> tuple[int, int]:
        if self._head_resident:
            return 0, 0
        head = self._shape.head
        nbytes = self._head_rows * -(-head.nbytes // head.rows)
        converted = self._converted(head) * self._head_rows // head.rows
        return _up(nbytes) + _EXTENT_BYTES, _up(converted) + 64 if converted else 0

    def _piece(self, layer: LayerShape, streamed: list[MatrixShape]) -> tuple[int, int]:
        decode = sum(self._converted(m) + 64 for m in streamed if self._converted(m))
        return _piece_bytes(layer, streamed, self._gap), decode

    def _converted(self, matrix: MatrixShape) -> int:
        """Bytes in the compute dtype, if the source's is another."""
        full = matrix.elements * self._item
        return 0 if full == matrix.nbytes else full

    def _sums(self) -> list[int]:
        """Resident, streamed, substitute and converted bytes at the foot of the ladder."""
        shape = self._shape
        streamed = [m for _, layer in self._starts for m in layer]
        if not self._head_resident:
            streamed.append(shape.head)
        every = [m for layer in shape.layers for m in layer.matrices] + [shape.head]
        away = {m.name for m in streamed}
        return [
            sum(resident_bytes(m, self._item) for m in every if m.name not in away),
            sum(m.nbytes for m in streamed),
            sum(self._substitute[m.name] for m in (every if self._low else streamed)),
            sum(self._converted(m) for m in streamed),
        ]

    def _move(self, sums: list[int], matrix: MatrixShape) -> None:
        sums[0] += resident_bytes(matrix, self._item)
        sums[1] -= matrix.nbytes
        sums[2] -= self._given_back(matrix)
        sums[3] -= self._converted(matrix)

    def _rung(
        self,
        sums: list[int],
        top: tuple[int, int],
        layer: LayerShape | None,
        rest: list[MatrixShape],
        pieces: int,
    ) -> Rung:
        slot, decode = self._piece(layer, rest) if layer is not None else (0, 0)
        if not self._head_resident:
            pieces += -(-self._shape.vocab // self._head_rows)
        resident, streamed, substitutes, converted = sums
        return Rung(
            resident_bytes=resident,
            streamed_bytes=streamed,
            substitute_bytes=substitutes,
            slot_bytes=max(slot, top[0]),
            decode_bytes=max(decode, top[1]),
            converted_bytes=converted,
            pieces=pieces,
            drafting_bytes=0 if self._low else resident,
        )


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
