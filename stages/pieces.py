"""Pieces: what crosses the link as one, and where its bytes land in a slot. Pure; no torch.

Direct reads want file offset, memory address and length to be multiples of the block. Slots begin
on a page, so each extent is placed where its slot offset is congruent to its file offset modulo
the block, in blocks of its own: the bytes around it that an aligned read brings along hit nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from stages.safetensors_header import TensorSpec

BLOCK = 4096
NEAR = 64 * 1024  # a gap up to this size is read through: cheaper than one more read
ALIGN = 64  # of each tensor in a decode buffer: a cache line

Kind = Literal["layer", "head"]
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class RowRange(msgspec.Struct, frozen=True):
    """Rows [start, stop) of one matrix."""

    spec: TensorSpec
    start: int
    stop: int


class Group(msgspec.Struct, frozen=True):
    """What one piece is to hold: whole tensors, or row ranges (a head piece holds one of those)."""

    kind: Kind
    layer: int
    members: tuple[TensorSpec | RowRange, ...]


class Extent(msgspec.Struct, frozen=True):
    """Bytes [offset, offset + nbytes) of a file, which land at `slot_offset` of the slot."""

    path: str
    offset: int
    nbytes: int
    slot_offset: int


class Placed(msgspec.Struct, frozen=True):
    """A tensor of the source's dtype within a filled slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slot_offset: int


class Piece(msgspec.Struct, frozen=True):
    """One transfer of a sweep. `nbytes` counts what the extents read, gaps read through included.

    `start_row` is the first row of a head piece (0 for others).
    """

    index: int
    kind: Kind
    layer: int
    start_row: int
    extents: tuple[Extent, ...]
    tensors: tuple[Placed, ...]
    nbytes: int


class _Span(msgspec.Struct, frozen=True):
    """A member's place in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int
    nbytes: int


def cut_pieces(groups: Sequence[Group]) -> tuple[Piece, ...]:
    """Lays out one piece for each group, in order. Tensors keep the order of the group's members.

    Raises ValueError for a group without members, for empty tensors, and for row ranges outside
    their matrix.
    """
    return tuple(_piece(index, group) for index, group in enumerate(groups))


def cut_rows(spec: TensorSpec, rows: int) -> tuple[RowRange, ...]:
    """Splits a matrix into ranges of at most `rows` rows: the head goes through in parts."""
    if rows < 1:
        raise ValueError(f"rows a piece: {rows} given, at least 1 expected")
    total = spec.shape[0]
    return tuple(RowRange(spec, start, min(start + rows, total)) for start in range(0, total, rows))


def slot_bytes(pieces: Sequence[Piece]) -> int:
    """The smallest slot, in whole blocks, that holds any of the pieces (0 for no pieces)."""
    return max((piece_bytes(piece) for piece in pieces), default=0)


def piece_bytes(piece: Piece) -> int:
    """The bytes of a slot that the piece's aligned reads touch, in whole blocks."""
    return max(_up(extent.slot_offset + extent.nbytes) for extent in piece.extents)


def decode_bytes(pieces: Sequence[Piece], dtype: str) -> int:
    """The decode buffer that RawCodec needs for compute dtype `dtype` ("F32", ...), in bytes.

    0 when every tensor can be used where it lies in the slot.
    """
    return max((sum(size for _, size in decode_layout(p, dtype)) for p in pieces), default=0)


def decode_layout(piece: Piece, dtype: str) -> list[tuple[Placed, int]]:
    """The tensors that must be copied out of the slot, each with its bytes in the decode buffer."""
    item = ITEM_BYTES[dtype]
    return [
        (placed, _up(_count(placed.shape) * item, ALIGN))
        for placed in piece.tensors
        if placed.dtype != dtype or placed.slot_offset % item
    ]


def _piece(index: int, group: Group) -> Piece:
    if not group.members:
        raise ValueError(f"piece {index} ({group.kind}, layer {group.layer}) has no tensors")
    spans = [_span(member) for member in group.members]
    for span in spans:
        if not span.nbytes:
            raise ValueError(f"{span.name} with shape {span.shape} is empty")
    extents = _extents(spans)
    first = group.members[0]
    return Piece(
        index=index,
        kind=group.kind,
        layer=group.layer,
        start_row=first.start if isinstance(first, RowRange) else 0,
        extents=extents,
        tensors=tuple(_placed(span, extents) for span in spans),
        nbytes=sum(extent.nbytes for extent in extents),
    )


def _span(member: TensorSpec | RowRange) -> _Span:
    if not isinstance(member, RowRange):
        spec = member
        return _Span(spec.name, spec.dtype, spec.shape, spec.path, spec.offset, spec.nbytes)
    spec, start, stop = member.spec, member.start, member.stop
    if not spec.shape or not 0 <= start < stop <= spec.shape[0]:
        raise ValueError(
            f"rows [{start}, {stop}) of {spec.name} with shape {spec.shape}: outside the matrix"
        )
    row = spec.nbytes // spec.shape[0]
    shape = (stop - start, *spec.shape[1:])
    place = spec.offset + start * row
    return _Span(spec.name, spec.dtype, shape, spec.path, place, (stop - start) * row)


def _extents(spans: Sequence[_Span]) -> tuple[Extent, ...]:
    """Merges near spans of a file and gives each result blocks of its own."""
    ranges: list[tuple[str, int, int]] = []
    for span in sorted(spans, key=lambda span: (span.path, span.offset)):
        end = span.offset + span.nbytes
        if ranges and ranges[-1][0] == span.path and span.offset - ranges[-1][2] <= NEAR:
            path, start, last = ranges[-1]
            ranges[-1] = (path, start, max(last, end))
        else:
            ranges.append((span.path, span.offset, end))
    extents = []
    base = 0
    for path, start, end in ranges:
        extents.append(Extent(path, start, end - start, base + start % BLOCK))
        base = _up(base + start % BLOCK + end - start)
    return tuple(extents)


def _placed(span: _Span, extents: Sequence[Extent]) -> Placed:
    for extent in extents:
        if extent.path == span.path and 0 <= span.offset - extent.offset < extent.nbytes:
            slot_offset = extent.slot_offset + span.offset - extent.offset
            return Placed(span.name, span.dtype, span.shape, slot_offset)
    raise AssertionError(f"{span.name} lies in no extent")


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _up(nbytes: int, step: int = BLOCK) -> int:
    return -(-nbytes // step) * step
