"""Made models: tiny seeded models on disk, and what transformers itself answers with them.

A test of losslessness is only worth something on a model that would notice. Plain random
weights give logits with a standard deviation near 0.16 and hardly look at their history, so a
wrong row of KV changes nothing. The weights made here are scaled until the logits' standard
deviation is `LOGIT_STD` and until attention moves them; `make_model` asserts the first, and
test_made.py the second.

The reference, transformers' own answers, is in reference.py and named here too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.reference import (
    EXACT,
    alone,
    reference_generate,
    reference_logits,
    reference_loop,
    reference_model,
)

__all__ = [
    "ARCHITECTURES",
    "EXACT",
    "LEAST_LOGIT_STD",
    "LOGIT_STD",
    "ROPES",
    "SPECIALS",
    "longrope",
    "make_config",
    "make_model",
    "make_prompt",
    "make_tokenizer",
    "reference_generate",
    "reference_logits",
    "reference_loop",
    "reference_model",
]

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
)
"""The ten model types, each in the shape that exercises what is its own."""

LOGIT_STD = 4.0
LEAST_LOGIT_STD = 3.0

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_ROUGH: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 60,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
"""Sizes that nothing divides: no group of 64, no power of two, an inexact square root."""

_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    "qwen3": {"head_dim": 32},
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 12.0,
    },
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "phi3": {
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
        },
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.5,
    },
    "olmo2": {},
}

_TIED = frozenset({"gemma2", "gemma3_text", "smollm3", "granite", "qwen2"})


def longrope(original: int = 24, factor: float = 4.0, rotary_dim: int = 16) -> dict[str, Any]:
    """Overrides for a model whose rotary frequencies change after `original` positions."""
    half = rotary_dim // 2
    return {
        "max_position_embeddings": int(original * factor),
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + 0.02 * i for i in range(half)],
            "long_factor": [1.0 + 0.6 * i for i in range(half)],
            "original_max_position_embeddings": original,
        },
    }


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
}
"""Values of `rope_parameters` for the other static kinds, to be passed as an override."""


def make_model(
    directory: Path,
    architecture: str,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    layers: int | None = None,
    vocab: int | None = None,
    tied: bool | None = None,
    rough: bool = False,
    shards: int = 3,
    **overrides: Any,
) -> Path:
    """Writes a tiny model into `directory` (made if absent) and returns that path.

    There are config.json, `shards` files of safetensors in text order of the tensors' names, so
    that layers are split over files, and their index. `dtype` is that of the saved weights.
    `overrides` are fields of the config. The same arguments give the same bytes.
    """
    config = make_config(
        architecture, layers=layers, vocab=vocab, tied=tied, rough=rough, **overrides
    )
    config.dtype = dtype
    with alone():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, attn_implementation=EXACT
        ).eval()
        _fill(model, seed)
        _scale_logits(model, seed)
        model = model.to(dtype)
    _write(model, directory, shards)
    return directory


def make_config(
    architecture: str,
    *,
    layers: int | None = None,
    vocab: int | None = None,
    tied: bool | None = None,
    rough: bool = False,
    **overrides: Any,
) -> Any:
    """The config of a made model, without the model."""
    if architecture not in _OWN:
        raise ValueError(f"no made model for {architecture!r}; there are {ARCHITECTURES}")
    fields: dict[str, Any] = {**_SIZES, **_OWN[architecture]}
    if rough:
        fields |= _ROUGH
        if "head_dim" in fields:
            fields["head_dim"] = 14
    if layers is not None:
        fields["num_hidden_layers"] = layers
    if vocab is not None:
        fields["vocab_size"] = vocab
    fields["tie_word_embeddings"] = architecture in _TIED if tied is None else tied
    fields |= overrides
    if "layer_types" in fields and fields["layer_types"] is not None:
        fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    # Through JSON, so that overrides are not shared with the config, which edits them.
    return AutoConfig.for_model(architecture, **json.loads(json.dumps(fields)))


def _fill(model: Any, seed: int) -> None:
    """Draws every parameter in float64: the residual stream's parts come out near size one."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    gemma = config.model_type.startswith("gemma")
    scale = config.hidden_size**0.5 if gemma else getattr(config, "embedding_multiplier", 1.0)
    gains = {"q_proj": 1.6, "k_proj": 1.6, "qkv_proj": 1.6, "v_proj": 1.5, "o_proj": 2.0}
    gains |= {"gate_proj": 1.2, "up_proj": 1.2, "gate_up_proj": 1.2, "down_proj": 2.0}
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        kind = name.split(".")[-2]
        if name.endswith(".bias"):
            value = 0.3 * noise
        elif parameter.ndim == 1:
            value = 0.25 * noise if gemma else 1.0 + 0.25 * noise
        elif kind == "embed_tokens":
            value = 0.3 / scale * noise
        elif kind == "lm_head":
            value = noise / parameter.shape[1] ** 0.5
        else:
            value = gains[kind] * noise / parameter.shape[1] ** 0.5
        parameter.copy_(value)


def _scale_logits(model: Any, seed: int) -> None:
    """Sets the gain of the last norm, which the logits are linear in, and asserts the result."""
    config = model.config
    gemma = config.model_type.startswith("gemma")
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(config.vocab_size, (1, 48), generator=generator)
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        config.final_logit_softcapping = None
    gain = LOGIT_STD / float(model(ids, use_cache=False).logits.std())
    config.final_logit_softcapping = cap
    if cap is None:
        del config.final_logit_softcapping
    weight = model.model.norm.weight
    weight.copy_(gain * (1.0 + weight) - 1.0 if gemma else gain * weight)
    std = float(model(ids, use_cache=False).logits.std())
    assert std >= LEAST_LOGIT_STD, f"the logits of {config.model_type} have a std of {std:.2f}"


def _write(model: Any, directory: Path, shards: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    tensors = {name: p.detach().contiguous() for name, p in sorted(model.named_parameters())}
    total = sum(t.nbytes for t in tensors.values())
    groups: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    before = 0
    for name, tensor in tensors.items():
        groups[min(shards - 1, before * shards // total)][name] = tensor
        before += tensor.nbytes
    places: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        save_file(group, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def make_prompt(vocab: int, length: int, seed: int = 0) -> list[int]:
    """`length` seeded token ids under `vocab`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [int(token) for token in torch.randint(vocab, (length,), generator=generator)]


BYTES = 256
SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|begin|>")

_CHAT = (
    "{% for m in messages %}"
    "{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}{{ m['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(directory: Path) -> Path:
    """Adds a byte-level tokenizer with a chat template to a made model of 260 tokens or more.

    Ids 0..255 are single bytes, so a character outside ASCII takes several tokens; 256..259 are
    `SPECIALS`, of which the first ends a text. Ids past those have no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    if vocab_size < BYTES + len(SPECIALS):
        raise ValueError(f"{vocab_size} tokens hold no byte-level tokenizer; make 260 or more")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIALS[0], bos_token=SPECIALS[3]
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(directory)
    return directory
