"""The made models are worth testing with: they are sharded, seeded, and would notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open

from tests import made


@pytest.fixture(scope="module", params=made.ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made") / request.param, request.param)


PROMPT = made.make_prompt(320, 40)


def test_logits_are_wide(model: Path) -> None:
    assert made.reference_logits(model, PROMPT).std() >= made.LEAST_LOGIT_STD


def test_history_moves_the_logits(model: Path) -> None:
    other = list(PROMPT)
    other[-6] = (other[-6] + 7) % 320
    changed = made.reference_logits(model, PROMPT)[-1] - made.reference_logits(model, other)[-1]
    assert changed.abs().max() > 1.0


def test_generated_text_is_no_loop_and_both_ways_agree(model: Path) -> None:
    tokens = made.reference_generate(model, PROMPT, 24)
    looped, rows = made.reference_loop(model, PROMPT, 24)
    assert tokens == looped
    assert len(set(tokens)) >= 12
    assert rows.argmax(-1).tolist() == looped


def test_exact_reference_agrees_with_the_untouched_ones(model: Path) -> None:
    exact = made.reference_logits(model, PROMPT)
    eager = made.reference_logits(model, PROMPT, attention="eager")
    assert (exact - eager).abs().max() < 1e-4
    single = made.reference_logits(model, PROMPT, torch.float32)
    assert (exact - single).abs().max() < 1e-4
    if "gemma2" not in model.name:  # its soft-cap is beyond sdpa
        sdpa = made.reference_logits(model, PROMPT, attention="sdpa")
        assert (exact - sdpa).abs().max() < 1e-10


def test_shards_split_a_layer(model: Path) -> None:
    places = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    layers: dict[str, set[str]] = {}
    for name, file in places.items():
        if ".layers." in name:
            layers.setdefault(name.split(".")[2], set()).add(file)
    assert len(set(places.values())) == 3
    assert any(len(files) > 1 for files in layers.values())
    assert list(places) == sorted(places)


@pytest.mark.parametrize("architecture", made.ARCHITECTURES)
def test_rough_sizes_work(architecture: str, tmp_path: Path) -> None:
    directory = made.make_model(tmp_path, architecture, rough=True, dtype=torch.bfloat16)
    logits = made.reference_logits(directory, range(30))
    assert logits.shape == (30, 301)
    assert logits.isfinite().all()


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    made.make_model(tmp_path / "a", "llama")
    made.make_model(tmp_path / "b", "llama")
    made.make_model(tmp_path / "c", "llama", seed=1)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert all(
        (tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files
    )
    shard = files[-2]
    assert (tmp_path / "a" / shard).read_bytes() != (tmp_path / "c" / shard).read_bytes()


def test_untied_tied_and_layers(tmp_path: Path) -> None:
    made.make_model(tmp_path / "t", "llama", tied=True, layers=11, shards=5)
    places = json.loads((tmp_path / "t/model.safetensors.index.json").read_text())["weight_map"]
    assert "lm_head.weight" not in places
    assert len({n.split(".")[2] for n in places if ".layers." in n}) == 11
    with safe_open(tmp_path / "t" / places["model.norm.weight"], "pt") as file:
        assert file.get_tensor("model.norm.weight").dtype == torch.float64


def test_longrope_switches(tmp_path: Path) -> None:
    directory = made.make_model(tmp_path, "phi3", **made.longrope(original=24))
    prompt = made.make_prompt(320, 20)
    tokens, _ = made.reference_loop(directory, prompt, 12)
    # At the switch generate drops its cache; 5.17's then forgets to compute the whole text anew.
    if Version(transformers.__version__) >= Version("5.24"):
        assert tokens == made.reference_generate(directory, prompt, 12)
    # What a text says of its 24th position depends on whether it is longer than that.
    text = prompt + tokens
    short = made.reference_logits(directory, text[:24])[-1]
    long = made.reference_logits(directory, text[:25])[23]
    assert (short - long).abs().max() > 0.1


def test_stop_token_ends_a_text(tmp_path: Path) -> None:
    directory = made.make_model(tmp_path, "llama")
    tokens = made.reference_generate(directory, PROMPT, 12)
    stop = tokens[5]
    assert (
        made.reference_generate(directory, PROMPT, 12, stop=[stop])
        == tokens[: tokens.index(stop) + 1]
    )


def test_tokenizer_speaks_bytes_and_chat(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made.make_tokenizer(made.make_model(tmp_path, "llama"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("naïve ≥ 3")["input_ids"]
    assert max(ids) < 256
    assert tokenizer.decode(ids) == "naïve ≥ 3"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|user|>hi<|end|><|assistant|>"
    assert tokenizer(chat)["input_ids"][-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
