"""The transformers config that a GGUF file's metadata describe.

transformers has a table from llama.cpp's key names to its own, one for each architecture that it
can load from such files. The table is not complete: what scales the rotary frequencies, soft-caps,
windows and head sizes have no entry, and a model loaded without them answers well for a while and
badly after. Those are filled in here. Of the architectures in the table those are taken which this
runtime has a loop for; the others are refused by name.

Mistral's models are called llama in GGUF files and become llama here: the computation is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from routing.errors import ModelFormatError
from stages.gguf_header import GgufHeader, StringArray, Value
from stages.gguf_rope import rope_fields
from stages.gguf_support import CONVERTIBLE, one_line, unsupported

# What the config calls its layers, in the keys of transformers' table.
_SIZES: Final = (
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "context_length",
)
_OPTIONAL_SIZES: Final = (
    "attention.head_count_kv",
    "attention.key_length",
    "rope.dimension_count",
    "rope.scaling.original_context_length",
)


def model_config(header: GgufHeader, factors: dict[str, Sequence[float]]) -> Any:
    """The config, of the class that transformers has for it, ``architectures`` included.

    ``factors`` holds the values of those tensors of FACTORS that the file has. Raises
    UnsupportedModelError for what has no counterpart, ModelFormatError for what makes no sense.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    _check_architecture(header)
    fields = _config_fields(header, factors)
    try:
        config = AutoConfig.for_model(**fields)
    except Exception as error:  # whatever its validation objects to
        raise ModelFormatError(
            str(header.path),
            f"its metadata describe no {header.architecture} model ({one_line(error)})",
        ) from error
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def _check_architecture(header: GgufHeader) -> None:
    architecture, fields = header.architecture, header.fields
    if architecture not in CONVERTIBLE:
        raise unsupported(
            architecture[:80], "there is no map for it; its safetensors directory may work"
        )
    if fields.get("split.count", 0) not in (0, 1):
        raise unsupported(architecture, "it is one of several parts; merge them to one file first")
    if fields.get(f"{architecture}.expert_count", 0) != 0:
        raise unsupported(architecture, "it is a mixture of experts")
    if fields.get(f"{architecture}.attention.causal", True) is not True:
        raise unsupported(architecture, "its attention is not causal")
    for key in ("logit_scale", "residual_scale", "embedding_scale", "attention.scale"):
        if f"{architecture}.{key}" in fields:
            raise unsupported(architecture, f"it has a {key}, which is not in such models")


def _config_fields(header: GgufHeader, factors: dict[str, Sequence[float]]) -> dict[str, Any]:
    """The arguments of the config's class."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    architecture = header.architecture
    own: dict[str, Any] = {
        key.removeprefix(f"{architecture}."): _plain(value)
        for key, value in header.fields.items()
        if key.startswith(f"{architecture}.")
    }
    for key, value in own.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelFormatError(str(header.path), f"{architecture}.{key} is {value}")
    for key in (*_SIZES, *(key for key in _OPTIONAL_SIZES if key in own)):
        if type(own.get(key)) is not int or own[key] < 1:
            raise ModelFormatError(
                str(header.path),
                f"{architecture}.{key} is {ascii(own.get(key))[:80]}, expected a positive number",
            )
    if own["block_count"] > len(header.tensors):
        raise ModelFormatError(
            str(header.path),
            f"it claims {own['block_count']} layers, but holds {len(header.tensors)} tensors",
        )
    table = GGUF_CONFIG_MAPPING[architecture]
    fields: dict[str, Any] = {
        name: own[key] for key, name in table.items() if name is not None and key in own
    }
    fields.setdefault("num_key_value_heads", own["attention.head_count"])
    fields["model_type"] = "gemma3_text" if architecture == "gemma3" else architecture
    fields["vocab_size"] = _vocabulary(header)
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    fields |= _special_tokens(header, fields["vocab_size"])
    fields |= _unmapped(header, own)
    fields |= rope_fields(header, own, factors)
    return fields


def _plain(value: Value) -> Value:
    """A size given once for each layer is one number where the layers agree."""
    if isinstance(value, tuple) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _vocabulary(header: GgufHeader) -> int:
    """Rows of the embedding: a file may call fewer tokens by name than it has rows for."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(str(header.path), "it holds no matrix token_embd.weight")
    tokens = header.fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not 0 < tokens.count <= embedding.shape[0]:
        raise ModelFormatError(
            str(header.path),
            f"it names {tokens.count if isinstance(tokens, StringArray) else 'no'} tokens, "
            f"expected as many as its embedding has rows ({embedding.shape[0]})",
        )
    return embedding.shape[0]


def _special_tokens(header: GgufHeader, vocabulary: int) -> dict[str, Any]:
    """Ids of the tokens that begin, end and pad a text. The end of a turn ends an answer too."""

    def token(key: str) -> int | None:
        value = header.fields.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < vocabulary):
            raise ModelFormatError(
                str(header.path),
                f"tokenizer.ggml.{key}_token_id is {ascii(value)[:80]}, expected a token id "
                f"under {vocabulary}",
            )
        return value

    ends = [end for key in ("eos", "eot") if (end := token(key)) is not None]
    ends = list(dict.fromkeys(ends))
    return {
        "bos_token_id": token("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": token("padding"),
    }


def _unmapped(header: GgufHeader, own: dict[str, Any]) -> dict[str, Any]:
    """What transformers' table lacks, apart from the rotary embedding."""
    architecture = header.architecture
    fields: dict[str, Any] = {}
    head_dim = own.get("attention.key_length")
    if head_dim is not None and own.get("attention.value_length", head_dim) != head_dim:
        raise unsupported(architecture, "its keys and values differ in size")
    if head_dim is not None and architecture != "phi3":
        fields["head_dim"] = head_dim
    if architecture == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        fields["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    if architecture == "phi3" and own.get("attention.sliding_window"):
        fields["sliding_window"] = own["attention.sliding_window"]
    if architecture in ("gemma2", "gemma3"):
        for key, name in (
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("rope.freq_base_swa", "rope_local_base_freq"),
        ):
            if key in own:
                fields[name] = own[key]
        # Known by their depth, as in llama.cpp: only the 27B models scale by other than head_dim.
        large = own["block_count"] == {"gemma2": 46, "gemma3": 62}[architecture]
        scale = own["embedding_length"] // own["attention.head_count"] if large else head_dim
        if scale is not None:
            fields["query_pre_attn_scalar"] = scale
    return fields
