from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.pieces import (
    BLOCK,
    ITEM_BYTES,
    NEAR,
    Group,
    Piece,
    RowRange,
    cut_pieces,
    cut_rows,
    decode_bytes,
    piece_bytes,
    slot_bytes,
)
from stages.safetensors_header import TensorSpec


def spec(
    name: str, offset: int, shape: tuple[int, ...], dtype: str = "F32", path: str = "f"
) -> TensorSpec:
    count = 1
    for size in shape:
        count *= size
    return TensorSpec(name, dtype, shape, path, offset, count * ITEM_BYTES[dtype])


def layer(*members: TensorSpec | RowRange) -> Piece:
    return cut_pieces([Group("layer", 3, members)])[0]


def test_near_tensors_are_read_as_one_and_far_ones_apart() -> None:
    near = layer(spec("a", 1000, (10,)), spec("b", 1040 + NEAR, (10,)))
    assert [(e.offset, e.nbytes) for e in near.extents] == [(1000, 80 + NEAR)]
    assert near.nbytes == 80 + NEAR
    far = layer(spec("a", 1000, (10,)), spec("b", 1041 + NEAR, (10,)))
    assert [e.nbytes for e in far.extents] == [40, 40]
    assert far.nbytes == 80
    assert [t.name for t in far.tensors] == ["a", "b"]


def test_extents_of_different_files_stay_apart() -> None:
    piece = layer(spec("a", 0, (8,), path="x"), spec("b", 32, (8,), path="y"))
    assert [e.path for e in piece.extents] == ["x", "y"]
    assert [e.slot_offset for e in piece.extents] == [0, BLOCK + 32]
    assert slot_bytes([piece]) == 2 * BLOCK


def test_tensors_keep_the_groups_order_whatever_the_files() -> None:
    piece = layer(spec("b", 5000, (8,)), spec("a", 0, (8,)), spec("c", 100, (8,)))
    assert [t.name for t in piece.tensors] == ["b", "a", "c"]


def test_one_tensor_under_two_names_is_read_once() -> None:
    piece = layer(spec("embed", 64, (8,)), spec("head", 64, (8,)))
    assert piece.nbytes == 32
    assert piece.tensors[0].slot_offset == piece.tensors[1].slot_offset


def test_head_rows() -> None:
    head = spec("head", 200, (10, 6), "BF16")
    ranges = cut_rows(head, 4)
    assert [(r.start, r.stop) for r in ranges] == [(0, 4), (4, 8), (8, 10)]
    pieces = cut_pieces([Group("head", -1, (rows,)) for rows in ranges])
    assert [(p.index, p.kind, p.start_row) for p in pieces] == [
        (0, "head", 0),
        (1, "head", 4),
        (2, "head", 8),
    ]
    assert [p.extents[0].offset for p in pieces] == [200, 248, 296]
    assert [p.tensors[0].shape for p in pieces] == [(4, 6), (4, 6), (2, 6)]
    assert [p.nbytes for p in pieces] == [48, 48, 24]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 2), (0, 11)])
def test_rows_outside_the_matrix_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside the matrix"):
        layer(RowRange(spec("head", 0, (10, 6)), start, stop))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensors"):
        layer()
    with pytest.raises(ValueError, match="empty"):
        layer(spec("a", 0, (0, 4)))
    with pytest.raises(ValueError, match="at least 1"):
        cut_rows(spec("head", 0, (10, 6)), 0)
    assert cut_pieces([]) == ()
    assert slot_bytes([]) == decode_bytes([], "F32") == 0


def test_decode_bytes_counts_what_cannot_be_used_in_place() -> None:
    pieces = cut_pieces(
        [
            Group("layer", 0, (spec("a", 0, (10,), "BF16"), spec("b", 20, (3,), "F32"))),
            Group("layer", 1, (spec("c", 401, (100,), "BF16"),)),
        ]
    )
    assert decode_bytes(pieces[:1], "BF16") == 64  # b alone: 6 bytes in a cache line
    assert decode_bytes(pieces[:1], "F32") == 64  # a alone
    assert decode_bytes(pieces, "BF16") == 256  # c is misaligned
    assert decode_bytes(pieces, "F32") == 448


def test_pieces_can_be_sent() -> None:
    piece = layer(spec("a", 1000, (10,)))
    assert msgspec.json.decode(msgspec.json.encode(piece), type=Piece) == piece


places = st.lists(
    st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 400_000), st.integers(1, 30_000)),
    min_size=1,
    max_size=8,
)


@given(places)
def test_every_byte_lands_once_in_blocks_of_its_own(where: list[tuple[str, int, int]]) -> None:
    members = [spec(f"t{n}", o, (c,), "BF16", p) for n, (p, o, c) in enumerate(where)]
    piece = layer(*members)
    taken: set[int] = set()
    for extent in piece.extents:
        assert extent.slot_offset % BLOCK == extent.offset % BLOCK
        first = extent.slot_offset // BLOCK
        last = (extent.slot_offset + extent.nbytes - 1) // BLOCK
        blocks = set(range(first, last + 1))
        assert not blocks & taken
        taken |= blocks
    assert (max(taken) + 1) * BLOCK == piece_bytes(piece) == slot_bytes([piece])
    for member, placed in zip(members, piece.tensors, strict=True):
        (extent,) = (
            e
            for e in piece.extents
            if e.path == member.path
            and e.offset <= member.offset
            and member.offset + member.nbytes <= e.offset + e.nbytes
        )
        assert placed.slot_offset - extent.slot_offset == member.offset - extent.offset
