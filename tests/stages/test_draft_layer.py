"""The drafter's own layer says what transformers' layer says, from the same substitutes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from routing.messages import Sampling
from stages import draft_layer, weights
from stages.device import CpuDevice
from stages.drafting import DraftModel
from stages.embedding import Embedding
from stages.growth import Growth, Limits
from stages.kv import DraftScratch, KVStore
from stages.loading import OpenedModel
from stages.noise import Noise
from stages.outlook import Outlook
from stages.placement import Placement
from stages.progress import SilentProgress
from stages.weights import Weights
from tests import made

COMMON = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")


def log_probs(
    directory: Path,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    resident: str,
    script: list[Outlook] | None = None,
) -> list[Outlook]:
    """What the drafter says in each step of one tree over a made-up past.

    The tree grows by what it says, or by `script`.
    """
    opened = OpenedModel(directory)
    device = CpuDevice()
    kept = tuple(m.name for m in opened.shape.matrices() if resident and resident in m.name)
    placement = Placement(kept, form, 2, 0, 64, 64, 1, 12, 16)
    loaded = Weights.load(device, opened, placement, SilentProgress())
    kv = KVStore(device, opened.shape, places=1, capacity=64, dtype=opened.dtype)
    past = torch.Generator().manual_seed(3)
    for layer in range(len(opened.shape.layers)):
        size = (opened.shape.kv_heads, 20, opened.shape.head_dim)
        keys, values = (torch.randn(size, generator=past, dtype=opened.dtype) for _ in "kv")
        kv.write(0, layer, 0, keys, values)
    kv.commit(0, range(20))
    scratch = DraftScratch(device, opened.shape, rows=13, dtype=opened.dtype)
    embedding = Embedding(
        opened.checkpoint, opened.embedding_name, opened.dtype, opened.architecture.embed, 16
    )
    model = DraftModel(
        opened.skeleton(), loaded, opened.shape, opened.rope, embedding, kv, scratch, Noise()
    )
    seen: list[Outlook] = []
    growth = Growth(5, 20, Limits(4, 12, 13))
    see = growth.see

    def note(nodes: list[int], outlook: Outlook) -> None:
        # The drafter may use the scores' memory again.
        seen.append(msgspec.structs.replace(outlook, scores=outlook.scores.clone()))
        see(nodes, outlook if script is None else script[len(seen) - 1])

    monkeypatch.setattr(growth, "see", note)
    scorer = model.scorer(Sampling(), 20)
    with torch.no_grad():
        for _ in range(3):
            model.run(0, growth, growth.likeliest(4), scorer, (), 0.6)
    opened.close()
    device.close()
    return seen


@pytest.mark.parametrize("architecture", COMMON)
@pytest.mark.parametrize(
    ("form", "resident"), [("int8", ""), ("int4", ""), ("int4", "k_proj"), ("int8", "mlp")]
)
def test_the_common_layer_is_transformers_own(
    architecture: str,
    form: str,
    resident: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = made.make_model(tmp_path / "model", architecture, dtype=torch.float32)
    fast = log_probs(directory, form, monkeypatch, resident)
    monkeypatch.setattr(weights, "is_common", lambda _: False)
    slow = log_probs(directory, form, monkeypatch, resident, fast)
    assert len(fast) == len(slow) == 3
    for ours, theirs in zip(fast, slow, strict=True):
        # Activations are rounded to bfloat16 before each product, so rounding differs a little.
        pair = [torch.softmax(each.scores * each.factor, dim=1) for each in (ours, theirs)]
        torch.testing.assert_close(*pair, atol=0.06, rtol=0)


@pytest.mark.parametrize("architecture", made.ARCHITECTURES)
def test_only_the_common_shape_is_taken_for_it(architecture: str, tmp_path: Path) -> None:
    directory = made.make_model(tmp_path / "model", architecture)
    opened = OpenedModel(directory)
    layers = opened.skeleton().layers
    assert all(draft_layer.is_common(layer) == (architecture in COMMON) for layer in layers)
    opened.close()
