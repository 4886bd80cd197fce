"""What differs between architectures outside their layers, held to transformers' own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from routing.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from stages.architectures import (
    EMBEDDING,
    HEAD,
    NORM,
    SUPPORTED,
    Architecture,
    check_supported,
    load_config,
)
from tests import made
from tests.reference import alone

PROMPT = made.make_prompt(301, 30)


def watch(directory: Path, dtype: torch.dtype) -> dict[str, Any]:
    """One forward of transformers: what each layer was called with, and what the head saw."""
    model = made.reference_model(directory, dtype, "eager")
    seen: dict[str, Any] = {"calls": []}

    def call(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["calls"].append((args[0] if args else kwargs["hidden_states"], kwargs))

    def head(_: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
        seen["products"] = out

    hooks = [x.register_forward_pre_hook(call, with_kwargs=True) for x in model.model.layers]
    hooks.append(model.lm_head.register_forward_hook(head))
    with alone():
        seen["logits"] = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    seen["rows"] = model.model.embed_tokens.weight.detach()[PROMPT]
    return seen


@pytest.fixture(scope="module", params=made.ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Rough sizes, so that the root of the hidden size is not exact in any dtype.
    directory = tmp_path_factory.mktemp("made") / request.param
    return made.make_model(directory, request.param, rough=True)


@pytest.fixture
def architecture(model: Path) -> Architecture:
    return check_supported(load_config(model))


def test_the_list_is_what_the_design_names() -> None:
    assert set(SUPPORTED) == set(made.ARCHITECTURES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_embedding_and_logits(model: Path, architecture: Architecture, dtype: torch.dtype) -> None:
    seen = watch(model, dtype)
    hidden, _ = seen["calls"][0]
    assert torch.equal(architecture.embed(seen["rows"]), hidden[0])
    assert torch.equal(architecture.finish(seen["products"][0]), seen["logits"])
    # Scaling and capping go element by element, so that a head may come in pieces.
    part = architecture.finish(seen["products"][0][:, 100:200])
    assert torch.equal(part, seen["logits"][:, 100:200])


def test_windows_are_those_of_the_masks(model: Path, architecture: Architecture) -> None:
    calls = watch(model, torch.float64)["calls"]
    distance = torch.arange(30)[:, None] - torch.arange(30)[None, :]
    assert architecture.layers == len(calls) == len(architecture.ropes)
    for window, (_, kwargs) in zip(architecture.windows, calls, strict=True):
        visible = (distance >= 0) & (distance < (window or 30))
        assert torch.equal(kwargs["attention_mask"][0, 0] == 0, visible)


def test_modules_make_the_layers(model: Path, architecture: Architecture) -> None:
    config = load_config(model)
    config._attn_implementation = "eager"
    reference = made.reference_model(model)
    modules = architecture.modules()
    with torch.device("meta"):
        layer = modules.layer(config, 1)
        norm = modules.norm(config.hidden_size, eps=config.rms_norm_eps)
    assert type(layer) is type(reference.model.layers[1])
    assert type(norm) is type(reference.model.norm)
    assert type(reference.model.rotary_emb) is modules.rotary
    names = {name for name, _ in reference.named_parameters()}
    own = {architecture.layer_prefix(1) + name for name, _ in layer.named_parameters()}
    assert own == {name for name in names if name.startswith("model.layers.1.")}
    assert {architecture.embedding_name(names), architecture.head_name(names), NORM} <= names


def test_windows_by_hand() -> None:
    def of(architecture: str, **more: Any) -> Architecture:
        return check_supported(made.make_config(architecture, **more))

    assert of("llama", sliding_window=4).windows == (None,) * 4
    assert of("mistral").windows == (8,) * 4
    assert of("mistral", sliding_window=None).windows == (None,) * 4
    assert of("qwen2").windows == (None, None, 12, 12)
    assert of("qwen2", use_sliding_window=False).windows == (None,) * 4
    assert of("gemma2").windows == (8, None, 8, None)
    assert of("gemma3_text").windows == (8, 8, None, 8)
    assert of("gemma3_text").ropes[1:3] == ("sliding_attention", "full_attention")
    assert of("smollm3").ropes == ("all", None, "all", None)
    sliding = of("smollm3", use_sliding_window=True, sliding_window=6)
    assert sliding.windows == (None, 6, None, 6)


def test_head_and_embedding_names() -> None:
    tied = Architecture("llama", (None,), ("all",), tied=True)
    untied = Architecture("llama", (None,), ("all",), tied=False)
    assert tied.head_name({EMBEDDING}) == EMBEDDING
    assert tied.head_name({EMBEDDING, HEAD}) == HEAD
    assert tied.embedding_name({HEAD}) == HEAD
    assert untied.head_name({EMBEDDING}) == HEAD
    assert untied.embedding_name({HEAD}) == EMBEDDING


def test_a_tied_model_with_a_head_of_its_own(tmp_path: Path) -> None:
    """What head_name says of such a checkpoint is what transformers does with it."""
    made.make_model(tmp_path, "llama", tied=False)
    config = json.loads((tmp_path / "config.json").read_text())
    before = made.reference_logits(tmp_path, PROMPT)
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert torch.equal(made.reference_logits(tmp_path, PROMPT), before)


def write(directory: Path, **config: Any) -> Path:
    made.make_model(directory, "llama", layers=1)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "mamba", "state_size": 16}, "recurrent"),
        ({"model_type": "gemma3", "vision_config": {}, "text_config": {}}, "images or sound"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder and a decoder"),
        ({"model_type": "llama4_text", "layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "homemade", "auto_map": {"AutoConfig": "x.X"}}, "code of its own"),
        ({"model_type": "gpt2"}, ""),
    ],
)
def test_other_types_are_refused_with_the_list(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load_config(write(tmp_path, **config))
    assert config["model_type"] in str(caught.value)
    assert reason in str(caught.value)
    assert all(name in str(caught.value) for name in SUPPORTED)
    assert "\n" not in str(caught.value)


def test_code_beside_a_known_type_is_not_run(tmp_path: Path) -> None:
    """Phi-3's own checkpoints point at code although transformers has the class."""
    made.make_model(tmp_path, "phi3", layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_phi3.Phi3Config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_phi3.py").write_text("raise SystemExit('was run')")
    loaded = load_config(tmp_path)
    assert type(loaded).__module__.startswith("transformers.")
    assert check_supported(loaded).model_type == "phi3"


@pytest.mark.parametrize(
    ("architecture", "more", "reason"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("qwen2", {"is_causal": False}, "bidirectional"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("gemma2", {"sliding_window": None}, "no sliding_window"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "no sliding_window"),
    ],
)
def test_features_without_an_exact_roll_back_are_refused(
    architecture: str, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(made.make_config(architecture, **more))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": 7}, "model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"rope_scaling": "fast"}, "transformers cannot read it"),
    ],
)
def test_nonsense_is_a_format_error(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    made.make_model(tmp_path, "llama", layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelFormatError, match=said) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_config(tmp_path / "nowhere")
