"""What comes into matrices is what transformers' own forward pass has them multiply."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stages.loading import OpenedModel
from stages.probe import ROWS, Probe, mean_square
from tests import made, reference

ARCHITECTURES = ("llama", "gemma2", "gemma3_text", "qwen3", "phi3", "granite", "olmo2")


class Probed:
    """All that a probe says of one model, and the tokens that it put in."""

    def __init__(self, directory: Path, resident: str | None = None) -> None:
        """`resident`: what is in the names of matrices that stay bound; None: none do."""
        opened = OpenedModel(directory)
        full = {n: opened.checkpoint.read(n).to(opened.dtype) for n in opened.checkpoint.tensors}
        skeleton = opened.skeleton()
        kept = {
            name
            for name in full
            if name in skeleton.small() or (resident is not None and resident in name)
        }
        skeleton.bind({name: full[name] for name in kept if name in skeleton})
        with pytest.MonkeyPatch.context() as patch:
            read = opened.checkpoint.read_rows
            self.tokens: list[int] = []

            def note(name: str, rows: list[int]) -> torch.Tensor:
                self.tokens += rows
                return read(name, rows)

            patch.setattr(opened.checkpoint, "read_rows", note)
            probe = Probe(opened, skeleton)
        self.inputs: dict[str, torch.Tensor] = {}
        for layer in opened.shape.layers:
            streamed = {m.name: full[m.name] for m in layer.matrices if m.name not in kept}
            self.inputs |= probe.layer(layer.index, streamed)
            for name in streamed:  # what it stood in is given back next
                weight = skeleton.home(name).weight
                assert isinstance(weight, torch.Tensor) and weight.is_meta, name
        self.inputs["lm_head.weight"] = probe.head()
        opened.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_what_transformers_multiplies(tmp_path: Path, architecture: str) -> None:
    directory = made.make_model(tmp_path / "model", architecture)
    probed = Probed(directory)
    assert len(probed.tokens) == ROWS and len(set(probed.tokens)) > ROWS // 2
    seen: dict[str, torch.Tensor] = {}
    model = reference.reference_model(directory)
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, name=name: seen.update({f"{name}.weight": mean_square(given[0])})
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        model(torch.tensor([probed.tokens]))
    for hook in hooks:
        hook.remove()
    assert probed.inputs.keys() == seen.keys()
    for name, inputs in seen.items():
        assert torch.allclose(probed.inputs[name], inputs, rtol=1e-6), name


@pytest.mark.parametrize("resident", ["", "mlp"])
def test_what_is_bound_already_makes_no_difference(tmp_path: Path, resident: str) -> None:
    directory = made.make_model(tmp_path / "model", "llama")
    bare, kept = Probed(directory).inputs, Probed(directory, resident).inputs
    assert bare.keys() == kept.keys()
    assert all(torch.equal(bare[name], kept[name]) for name in bare)


def test_a_short_context_gets_a_short_text(tmp_path: Path) -> None:
    directory = made.make_model(tmp_path / "model", "llama", max_position_embeddings=10)
    assert len(Probed(directory).tokens) == 10


def test_what_is_no_number_counts_as_zero() -> None:
    rows = torch.tensor([[1.0, math.nan, math.inf, 3e30], [3.0, 2.0, 0.0, 0.0]])
    found = mean_square(rows[None])
    assert torch.equal(found[:3], torch.tensor([5.0, 2.0, 0.0])) and found.isfinite().all()
