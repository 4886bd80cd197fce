"""What substitutes of each layer cost is what transformers' own model says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from stages.device import CpuDevice, MemoryAccount
from stages.loading import OpenedModel
from stages.placement import Placement
from stages.probe import ROWS, Probe
from stages.progress import SilentProgress
from stages.sensitivity import BLOCKS, block
from stages.substitutes import quantize
from stages.weights import Weights
from tests import made, reference

PLACEMENT = Placement((), "int4", 2, 0, 64, 64, 1, 12, 16)


@contextmanager
def loaded(
    directory: Path,
    *,
    keep: str | None = None,
    measure: bool = True,
    limit: int | None = None,
    **kind: Any,
) -> Iterator[tuple[Weights, CpuDevice]]:
    """`keep`: what is in the names of matrices that are resident; None: no matrix is."""
    opened, device = OpenedModel(directory), CpuDevice(limit)
    every = [m.name for m in (*opened.shape.matrices(), opened.shape.head)]
    resident = tuple(name for name in every if keep is not None and keep in name)
    placement = msgspec.structs.replace(PLACEMENT, resident=resident, **kind)
    weights = Weights.load(device, opened, placement, SilentProgress(), measure=measure)
    try:
        yield weights, device
    finally:
        weights.close()
        opened.close()
        device.close()
    assert device.memory.held == 0, device.memory.by_name


def measured(directory: Path, **kind: Any) -> tuple[float, ...] | None:
    with loaded(directory, **kind) as (weights, device):
        assert "measuring" not in device.memory.by_name, "given back"
        return weights.sensitivity


def direct(directory: Path) -> list[float]:
    """Each block's mean divergence, by transformers with dequantized matrices in place of its."""
    opened = OpenedModel(directory)
    full = {n: opened.checkpoint.read(n).to(opened.dtype) for n in opened.checkpoint.tensors}
    skeleton = opened.skeleton()
    skeleton.bind({name: full[name] for name in skeleton.small()})
    probe, low = Probe(opened, skeleton), list[dict[str, torch.Tensor]]()
    for layer in opened.shape.layers:
        inputs = probe.layer(layer.index, {m.name: full[m.name] for m in layer.matrices})
        low.append(
            {
                m.name: quantize(
                    [full[m.name]], (m.rows, m.cols), "int4", inputs[m.name]
                ).dequantize()
                for m in layer.matrices
            }
        )
    opened.close()
    rows = min(ROWS, opened.shape.max_positions)
    tokens = torch.randint(
        opened.shape.vocab, (1, rows), generator=torch.Generator().manual_seed(0)
    )
    model = reference.reference_model(directory)
    parameters = dict(model.named_parameters())
    count, found = len(low), list[float]()
    with reference.alone():
        right = model(tokens, use_cache=False).logits[0].log_softmax(1)
        for one in sorted({block(layer, count) for layer in range(count)}):
            changed: dict[str, torch.Tensor] = {}
            for layer in range(count):
                changed |= low[layer] if block(layer, count) == one else {}
            for name, weight in changed.items():
                parameters[name].data.copy_(weight)
            scores = model(tokens, use_cache=False).logits[0].log_softmax(1)
            for name in changed:  # the model is everybody's
                parameters[name].data.copy_(full[name])
            found.append(
                float(functional.kl_div(scores, right, log_target=True, reduction="batchmean"))
            )
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "phi3", "granite"])
def test_it_is_what_transformers_says(tmp_path: Path, architecture: str) -> None:
    directory = made.make_model(tmp_path / "model", architecture)
    found, right = measured(directory), direct(directory)
    assert found is not None and min(right) > 1e-4
    assert found == pytest.approx(right, rel=1e-5)


def test_layers_of_a_block_share_what_it_costs(tmp_path: Path) -> None:
    layers = BLOCKS + 5
    directory = made.make_model(tmp_path / "model", "llama", layers=layers)
    found, right = measured(directory), direct(directory)
    assert found is not None and len(found) == layers and len(right) == BLOCKS
    members = [[n for n in range(layers) if block(n, layers) == one] for one in range(BLOCKS)]
    assert {len(some) for some in members} == {1, 2}
    for some, cost in zip(members, right, strict=True):
        assert len({found[layer] for layer in some}) == 1
        assert sum(found[layer] for layer in some) == pytest.approx(cost, rel=1e-5)


@pytest.mark.parametrize("count", [1, 2, 11, 12, 13, 30, 80])
def test_blocks_are_runs_of_about_the_same_size(count: int) -> None:
    blocks = [block(layer, count) for layer in range(count)]
    assert blocks == sorted(blocks) and {*blocks} == set(range(min(count, BLOCKS)))
    sizes = [blocks.count(one) for one in {*blocks}]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("sensitive", [0, 2, 3])
def test_the_layer_that_hurts_is_found(tmp_path: Path, sensitive: int) -> None:
    """One where a column of every matrix is large, and what comes into it as much smaller: the
    model is the same, but for 63 weights there is hardly a code left."""
    directory = made.make_model(tmp_path / "model", "llama", dtype=torch.float32)
    before = measured(directory)
    for norm, names in NORMS.items():
        _edit(directory, f"model.layers.{sensitive}.{norm}.weight", lambda weight: weight[5] / 40)
        for name in names:
            matrix = f"model.layers.{sensitive}.{name}.weight"
            _edit(directory, matrix, lambda weight: weight[:, 5] * 40)
    found = measured(directory)
    assert before is not None and found is not None
    for layer in range(4):
        if layer != sensitive:
            assert found[layer] == pytest.approx(before[layer], rel=1e-3), "it is the same model"
    assert found[sensitive] > 3 * before[sensitive]


NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def _edit(directory: Path, name: str, change: Callable[[torch.Tensor], Any]) -> None:
    """Put what `change` makes of column 5 of a tensor into its place."""
    (file,) = [file for file in directory.glob("*.safetensors") if name in load_file(file)]
    tensors = load_file(file)
    tensors[name][..., 5] = change(tensors[name].clone())
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / request.param
    return made.make_model(directory, request.param, dtype=torch.float32)


def test_it_does_not_depend_on_what_is_loaded(model: Path) -> None:
    """Neither on what is resident nor on the format, so that one measurement serves all plans."""
    usual = measured(model)
    assert usual is not None
    for kind in (
        {"keep": ""},
        {"keep": "", "low_resident": True},
        {"keep": "mlp", "substitute": "int8"},
        {"substitute": "int2", "finer": "int3", "raised": (1,)},
    ):
        assert measured(model, **kind) == pytest.approx(usual, rel=1e-5), kind


@pytest.mark.parametrize("keep", [None, "mlp"])
def test_what_is_loaded_is_the_same(model: Path, keep: str | None) -> None:
    with (
        loaded(model, keep=keep) as (with_it, _),
        loaded(model, keep=keep, measure=False) as (
            without,
            device,
        ),
    ):
        assert with_it.sensitivity is not None and without.sensitivity is None
        assert with_it.substitutes.keys() == without.substitutes.keys()
        assert with_it.resident.keys() == without.resident.keys()
        for names, substitute in with_it.substitutes.items():
            assert torch.equal(substitute.dequantize(), without.substitutes[names].dequantize())
        for name, tensor in with_it.resident.items():
            assert torch.equal(tensor, without.resident[name])
        assert "measuring" not in device.memory.by_name


def test_without_substitutes_nothing_is_measured(model: Path) -> None:
    assert measured(model, substitute=None) is None


def test_what_it_takes_is_charged(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 0
    take = MemoryAccount.take

    def noted(account: MemoryAccount, nbytes: int, what: str) -> None:
        nonlocal peak
        take(account, nbytes, what)
        peak = max(peak, account.by_name.get("measuring", 0))

    monkeypatch.setattr(MemoryAccount, "take", noted)
    assert measured(model) is not None
    opened = OpenedModel(model)
    copies = len(opened.shape.layers)
    assert peak == copies * ROWS * opened.shape.hidden * opened.dtype.itemsize
    opened.close()


def test_where_there_is_no_room_for_it_a_model_loads_all_the_same(model: Path) -> None:
    with loaded(model, measure=False) as (_, device):
        least = device.memory.peak
    with loaded(model, limit=least) as (weights, device):
        assert weights.sensitivity is None
        assert device.memory.peak == least
    with loaded(model) as (weights, device):
        most = device.memory.peak
    with loaded(model, limit=most) as (weights, _):
        assert weights.sensitivity is not None
    with loaded(model, limit=most - 1) as (weights, _):
        assert weights.sensitivity is None


def test_a_load_that_fails_holds_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("made")

    device, opened = CpuDevice(), OpenedModel(model)
    monkeypatch.setattr("stages.sensitivity.Sensitivity.costs", fail)
    with pytest.raises(OSError, match="made"):
        Weights.load(device, opened, PLACEMENT, SilentProgress(), measure=True)
    assert device.memory.held == 0 and device.memory.peak > 0
    opened.close()
    device.close()


def test_what_is_no_number_is_no_figure(tmp_path: Path) -> None:
    directory = made.make_model(tmp_path / "model", "llama", dtype=torch.float32)

    _edit(directory, "model.layers.1.mlp.up_proj.weight", lambda _: math.nan)
    assert measured(directory) is None
