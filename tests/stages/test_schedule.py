from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from stages.pieces import Piece, slot_bytes
from stages.placement import Placement
from stages.safetensors_header import TensorSpec
from stages.schedule import Step, schedule
from stages.shapes import LayerShape, MatrixShape, ModelShape
from tests.stages.made_stages import made_shape

ITEM, COLS = 2, 16


class Case(NamedTuple):
    """A model's sizes, where its tensors lie, and which of them are resident."""

    shape: ModelShape
    tensors: dict[str, TensorSpec]
    placement: Placement

    def run(self) -> tuple[tuple[Step, ...], tuple[Piece, ...]]:
        return schedule(self.shape, self.placement, self.tensors)


def made_case(rows: list[list[int]], vocab: int, resident: set[str], head_rows: int) -> Case:
    """rows[i] are the heights of layer i's matrices; layers alternate between two files."""
    tensors: dict[str, TensorSpec] = {}
    ends = {"a": 8, "b": 40}

    def matrix(name: str, layer: int, height: int, path: str) -> MatrixShape:
        nbytes = height * COLS * ITEM
        tensors[name] = TensorSpec(name, "BF16", (height, COLS), path, ends[path], nbytes)
        ends[path] += nbytes
        return MatrixShape(name, layer, height, COLS, nbytes)

    layers = []
    for index, heights in enumerate(rows):
        path = "ab"[index % 2]
        made = [matrix(f"{index}.{i}", index, height, path) for i, height in enumerate(heights)]
        layers.append(LayerShape(index, tuple(reversed(made))))  # not the files' order
        tensors[f"{index}.norm"] = TensorSpec(f"{index}.norm", "BF16", (COLS,), path, 0, COLS * 2)
    head = matrix("head", len(rows), vocab, "a")
    base = made_shape(layers=len(rows))
    shape = ModelShape(**{f: getattr(base, f) for f in base.__struct_fields__} | {
        "layers": tuple(layers), "vocab": vocab, "head": head,
    })  # fmt: skip
    placement = Placement(
        resident=tuple(sorted(resident)),
        substitute=None,
        slots=2,
        slot_bytes=0,
        head_rows=head_rows,
        context=16,
        sessions=1,
        tree_budget=0,
        prefill_rows=8,
    )
    return Case(shape, tensors, placement)


@st.composite
def cases(draw: Any) -> Case:
    heights = st.lists(st.integers(1, 600), min_size=1, max_size=4)
    rows = draw(st.lists(heights, min_size=1, max_size=6))
    names = [f"{layer}.{i}" for layer, each in enumerate(rows) for i in range(len(each))]
    whole = {
        name for name in names if draw(st.booleans()) and not name.startswith("0.")
    }  # whole layers too
    if draw(st.booleans()):
        layer = draw(st.integers(0, len(rows) - 1))
        whole |= {name for name in names if name.startswith(f"{layer}.")}
    if draw(st.booleans()):
        whole.add("head")
    vocab = draw(st.integers(1, 50))
    return made_case(rows, vocab, whole, draw(st.integers(1, vocab)))


@given(cases())
def test_a_sweep_passes_every_layer_once_in_order_and_then_the_head(case: Case) -> None:
    steps, _ = case.run()
    layers = [layer for step in steps for layer in step.layers]
    assert layers == list(range(len(case.shape.layers)))
    heads = [step.is_head for step in steps]
    assert heads == sorted(heads)
    assert heads[-1]


@given(cases())
def test_pieces_come_in_the_order_in_which_steps_wait(case: Case) -> None:
    steps, pieces = case.run()
    assert [step.piece for step in steps if step.piece is not None] == list(pieces)
    assert [piece.index for piece in pieces] == list(range(len(pieces)))


@given(cases())
def test_a_layers_piece_holds_what_is_not_resident_of_it(case: Case) -> None:
    steps, _ = case.run()
    resident = set(case.placement.resident)
    for step in steps:
        if step.is_head:
            continue
        streamed = {
            matrix.name
            for layer in step.layers
            for matrix in case.shape.layers[layer].matrices
            if matrix.name not in resident
        }
        if step.piece is None:
            assert streamed == set()
            continue
        assert len(step.layers) == 1
        assert (step.piece.kind, step.piece.layer) == ("layer", step.layers[0])
        assert {placed.name for placed in step.piece.tensors} == streamed
        assert len(step.piece.tensors) == len(streamed)


@given(cases())
def test_resident_layers_in_a_row_are_one_step(case: Case) -> None:
    steps, _ = case.run()
    for step, following in itertools.pairwise(steps):
        if step.piece is None and not following.is_head:
            assert following.piece is not None


@given(cases())
def test_the_head_is_whole_or_every_row_of_it_once(case: Case) -> None:
    steps, _ = case.run()
    heads = [step for step in steps if step.is_head]
    if "head" in case.placement.resident:
        assert heads == [Step((), None)]
        return
    rows = 0
    for step in heads:
        assert step.piece is not None
        (placed,) = step.piece.tensors
        assert (step.piece.kind, placed.name) == ("head", "head")
        assert step.piece.start_row == rows
        assert placed.shape[0] <= case.placement.head_rows
        assert placed.shape[1:] == (COLS,)
        rows += placed.shape[0]
    assert rows == case.shape.vocab
    assert len(heads) == math.ceil(case.shape.vocab / case.placement.head_rows)


@given(cases())
def test_every_piece_fits_a_slot_and_its_bytes_are_the_tensors(case: Case) -> None:
    _, pieces = case.run()
    size = slot_bytes(pieces)
    for piece in pieces:
        taken = []
        for placed in piece.tensors:
            nbytes = math.prod(placed.shape) * ITEM
            taken.append((placed.slot_offset, placed.slot_offset + nbytes))
            spec = case.tensors[placed.name]
            begin = spec.offset + piece.start_row * COLS * ITEM
            (extent,) = (e for e in piece.extents if e.path == spec.path and e.offset <= begin)
            assert placed.slot_offset - extent.slot_offset == begin - extent.offset
            assert begin + nbytes <= extent.offset + extent.nbytes
        taken.sort()
        assert taken[0][0] >= 0
        assert taken[-1][1] <= size
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(taken))


def test_an_example() -> None:
    case = made_case([[4], [4, 4], [4], [4]], 5, {"0.0", "1.1", "2.0", "3.0"}, head_rows=2)
    steps, pieces = case.run()
    assert [(step.layers, step.piece and step.piece.index) for step in steps] == [
        ((0,), None),
        ((1,), 0),
        ((2, 3), None),
        ((), 1),
        ((), 2),
        ((), 3),
    ]
    assert [piece.layer for piece in pieces] == [1, 4, 4, 4]
    assert [placed.name for placed in pieces[0].tensors] == ["1.0"]


def test_a_resident_model_waits_for_nothing() -> None:
    case = made_case([[4], [4]], 5, {"0.0", "1.0", "head"}, head_rows=5)
    assert case.run() == ((Step((0, 1), None), Step((), None)), ())


def test_a_streamed_model_may_have_a_resident_head() -> None:
    steps, pieces = made_case([[4], [4]], 5, {"head"}, head_rows=5).run()
    assert [step.layers for step in steps] == [(0,), (1,), ()]
    assert steps[-1] == Step((), None)
    assert [piece.kind for piece in pieces] == ["layer", "layer"]
