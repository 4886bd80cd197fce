"""What a plan keeps on the device: in full, as substitutes, or both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional

from pipeline.residency import resident_bytes
from stages.device import PAGE, CpuDevice, MemoryAccount
from stages.formats import BITS, FORMATS, head_format, substitute_bytes
from stages.loading import OpenedModel
from stages.placement import Placement
from stages.probe import Probe
from stages.progress import SilentProgress
from stages.shapes import MatrixShape, ModelShape
from stages.substitutes import quantize
from stages.weights import Weights
from tests import made

NOWHERE = Placement(
    resident=(),
    substitute="int4",
    slots=2,
    slot_bytes=0,
    head_rows=64,
    context=64,
    sessions=1,
    tree_budget=12,
    prefill_rows=16,
)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose layers have the common shape, which joins matrices, and one whose have not."""
    directory = tmp_path_factory.mktemp("made") / request.param
    return made.make_model(directory, request.param, dtype=torch.float32)


class Loaded:
    """Weights, and what they were loaded from."""

    def __init__(self, opened: OpenedModel, device: CpuDevice, weights: Weights) -> None:
        self.opened, self.device, self.weights = opened, device, weights

    @property
    def shape(self) -> ModelShape:
        return self.opened.shape

    def full(self, name: str) -> torch.Tensor:
        return self.opened.checkpoint.read(name).to(self.opened.dtype)


@contextmanager
def loaded(directory: Path, keep: str | None, **kind: Any) -> Iterator[Loaded]:
    """`keep`: what is in the names of matrices that are resident; None: no matrix is."""
    opened, device = OpenedModel(directory), CpuDevice()
    names = [m.name for m in every(opened.shape) if keep is not None and keep in m.name]
    placement = msgspec.structs.replace(NOWHERE, resident=tuple(names), **kind)
    weights = Weights.load(device, opened, placement, SilentProgress())
    try:
        yield Loaded(opened, device, weights)
    finally:
        weights.close()
        opened.close()
        device.close()
    assert device.memory.held == 0, device.memory.by_name


def every(shape: ModelShape) -> list[MatrixShape]:
    return [*shape.matrices(), shape.head]


def forms_of(shape: ModelShape, form: str) -> dict[str, str]:
    """The format that each matrix's substitute has."""
    return {m.name: head_format(form) if m == shape.head else form for m in every(shape)}


@pytest.mark.parametrize("keep", ["", "mlp", "k_proj"])
@pytest.mark.parametrize("low", [False, True])
def test_resident_matrices_have_substitutes_as_well_where_the_plan_says_so(
    model: Path, keep: str, low: bool
) -> None:
    with loaded(model, keep, low_resident=low) as made_of:
        weights, shape = made_of.weights, made_of.shape
        kept = {m.name for m in every(shape) if keep in m.name}
        for name in kept:
            assert torch.equal(weights.resident[name], made_of.full(name)), "held in full"
        assert kept == {m.name for m in every(shape)} & weights.resident.keys()
        substituted = [name for names in weights.substitutes for name in names]
        assert len(substituted) == len({*substituted})
        assert {*substituted} == {m.name for m in every(shape) if low or m.name not in kept}


@pytest.mark.parametrize("keep", [None, "", "mlp"])
@pytest.mark.parametrize("low", [False, True])
def test_what_is_held_is_what_the_planner_counts(model: Path, keep: str | None, low: bool) -> None:
    with loaded(model, keep, low_resident=low, substitute="int3") as made_of:
        shape, held = made_of.shape, made_of.device.memory.by_name
        forms = forms_of(shape, "int3")
        kept = {m.name for m in every(shape) if keep is not None and keep in m.name}
        assert held.get("resident", 0) == sum(
            resident_bytes(m, shape.compute_itemsize) for m in every(shape) if m.name in kept
        )
        low_bit = sum(
            substitute_bytes((m.rows, m.cols), forms[m.name])
            for m in every(shape)
            if low or m.name not in kept
        )
        assert held.get("substitutes", 0) == low_bit
        assert sum(one.nbytes for one in made_of.weights.substitutes.values()) == low_bit


@pytest.mark.parametrize("keep", [None, "mlp"])
@pytest.mark.parametrize("low", [False, True])
def test_substitutes_are_fitted_to_what_comes_in(model: Path, keep: str | None, low: bool) -> None:
    with loaded(model, keep, low_resident=low) as made_of:
        opened, shape = made_of.opened, made_of.shape
        skeleton = opened.skeleton()
        skeleton.bind({name: made_of.full(name) for name in skeleton.small()})
        probe, inputs = Probe(opened, skeleton), dict[str, torch.Tensor]()
        for layer in shape.layers:
            whole = {m.name: made_of.full(m.name) for m in layer.matrices}
            inputs |= probe.layer(layer.index, whole)
        inputs[shape.head.name] = probe.head()
        for names, substitute in made_of.weights.substitutes.items():
            whole_rows = torch.cat([made_of.full(name) for name in names])
            size = (whole_rows.shape[0], whole_rows.shape[1])
            form = forms_of(shape, "int4")[names[0]]
            right, even = (
                quantize([whole_rows], size, form, given).dequantize()
                for given in (inputs[names[0]], None)
            )
            assert torch.equal(substitute.dequantize(), right)
            assert not torch.equal(right, even)


@pytest.mark.parametrize("keep", [None, "", "mlp", "layers.2."])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("form", "finer"), [("int3", "int4"), ("int6", "int8")])
def test_layers_that_are_raised_have_their_own_in_the_finer_format(
    model: Path, keep: str | None, low: bool, form: str, finer: str
) -> None:
    """To the bit what they are where all are in it; the head and all others are as without."""
    kind = {"keep": keep, "low_resident": low}
    with (
        loaded(model, substitute=form, finer=finer, raised=(1, 2), **kind) as mixed,
        loaded(model, substitute=form, **kind) as base,
        loaded(model, substitute=finer, **kind) as fine,
    ):
        found = mixed.weights.substitutes
        assert mixed.weights.form == form
        assert found.keys() == base.weights.substitutes.keys()
        layers = {m.name: m.layer for m in every(mixed.shape)}
        for names, substitute in found.items():
            right = fine if layers[names[0]] in (1, 2) else base
            assert substitute.nbytes == right.weights.substitutes[names].nbytes
            expected = right.weights.substitutes[names].dequantize()
            assert torch.equal(substitute.dequantize(), expected)


def test_a_layer_that_is_read_in_full_is_given_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = MemoryAccount.take

    def noted(account: MemoryAccount, nbytes: int, what: str) -> None:
        take(account, nbytes, what)
        if what == "loading":
            taken.append(nbytes)
            assert account.by_name[what] == nbytes, "one layer at a time"

    monkeypatch.setattr(MemoryAccount, "take", noted)
    with loaded(model, "mlp") as made_of:
        assert len(taken) == len(made_of.shape.layers)
        assert made_of.device.memory.by_name.get("loading", 0) == 0
        layer = made_of.shape.layers[0]
        left = sum(m.elements for m in layer.matrices if "mlp" not in m.name)
        item = made_of.shape.compute_itemsize
        assert left * item <= taken[0] < left * item + 64 * len(layer.matrices) + PAGE
    taken.clear()
    with loaded(model, None, substitute=None):
        assert not taken


def test_the_drafter_multiplies_by_substitutes_of_what_is_resident(model: Path) -> None:
    """Also where matrices are joined; and as the compiled part does, if there is one."""
    with loaded(model, "", low_resident=True, substitute="int8") as made_of:
        weights = made_of.weights
        assert weights.substitutes
        for names, substitute in weights.substitutes.items():
            whole = torch.cat([weights.resident[name] for name in names])
            x = torch.randn(3, whole.shape[1])
            found, right = weights.product(*names)(x), functional.linear(x, whole)
            assert torch.equal(found, substitute.matmul(x))
            error = float((found - right).norm() / right.norm())
            assert 0 < error < 0.05, "near it, but not it"
            assert weights.compiled(*names) is substitute.compiled


def test_without_them_it_multiplies_by_what_is_resident(model: Path) -> None:
    with loaded(model, "") as made_of:
        weights = made_of.weights
        assert not weights.substitutes
        for matrix in every(made_of.shape):
            x = torch.randn(3, matrix.cols)
            right = functional.linear(x, weights.resident[matrix.name])
            assert torch.equal(weights.product(matrix.name)(x), right)
            assert weights.compiled(matrix.name) is None


@pytest.mark.parametrize("form", FORMATS)
def test_the_head_has_at_least_six_bits(model: Path, form: str) -> None:
    with loaded(model, None, substitute=form) as made_of:
        shape = made_of.shape
        sizes = {
            other: substitute_bytes((shape.head.rows, shape.head.cols), other) for other in FORMATS
        }
        nbytes = made_of.weights.substitutes[(shape.head.name,)].nbytes
        assert nbytes == sizes[form if BITS[form] >= 6 else "int6"]
        first = shape.layers[0].matrices[0]
        ((names, layer),) = (
            found for found in made_of.weights.substitutes.items() if first.name in found[0]
        )
        rows = sum(m.rows for m in shape.matrices() if m.name in names)
        assert layer.nbytes == substitute_bytes((rows, first.cols), form)
