"""The model types that fit our loop, and what differs between them outside their layers.

The layers are transformers' own: attention biases, extra norms, residual multipliers and scores
with a soft cap come with them. What a whole-model forward adds around the layers is data here: the
embedding's scale, the window and the rotary table of each layer, the logits' scale and cap.

A type is on the list only if leaving out rejected rows is an exact roll-back: causal attention over
rows of keys and values, each row a function of its own past. Recurrent state, experts that share
capacity, attention to later tokens and frequencies that depend on what was seen before are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch

from routing.errors import ModelFormatError, UnsupportedModelError
from stages.model_files import CONFIG, find_files

EMBEDDING: Final = "model.embed_tokens.weight"
NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"
ONE_ROPE: Final = "all"
"""The kind of rotary table of a model whose layers share one."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
_STATIC_ROPES: Final = frozenset({"default", "linear", "llama3", "yarn", "longrope"})


class _Family(msgspec.Struct, frozen=True):
    """How one model type is built. `prefix` begins its class names in `modeling_{module}`.

    `windows`: no layer has one, every layer has, or those that layer_types calls sliding.
    `rope_by_type`: layers of different types turn by different frequencies.
    """

    module: str
    prefix: str
    windows: Literal["none", "every", "typed"] = "none"
    rope_by_type: bool = False
    gemma: bool = False


_FAMILIES: Final[dict[str, _Family]] = {
    "llama": _Family("llama", "Llama"),
    "mistral": _Family("mistral", "Mistral", windows="every"),
    "qwen2": _Family("qwen2", "Qwen2", windows="typed"),
    "qwen3": _Family("qwen3", "Qwen3", windows="typed"),
    "gemma2": _Family("gemma2", "Gemma2", windows="typed", gemma=True),
    "gemma3_text": _Family("gemma3", "Gemma3", windows="typed", gemma=True, rope_by_type=True),
    "phi3": _Family("phi3", "Phi3", windows="every"),
    "smollm3": _Family("smollm3", "SmolLM3", windows="typed"),
    "granite": _Family("granite", "Granite"),
    "olmo2": _Family("olmo2", "Olmo2"),
}

SUPPORTED: Final[tuple[str, ...]] = tuple(_FAMILIES)
"""The values of `model_type` that load."""


class Modules(msgspec.Struct, frozen=True):
    """transformers' classes of one model type.

    layer(config, layer_idx), norm(hidden_size, eps=config.rms_norm_eps), rotary(config).
    """

    layer: type[torch.nn.Module]
    norm: type[torch.nn.Module]
    rotary: type[torch.nn.Module]


class Architecture(msgspec.Struct, frozen=True):
    """One supported model as its config describes it, outside the layers themselves.

    For each layer, `windows` has the positions that a row may look at, itself included (None: all
    of its past), and `ropes` the kind of its rotary table (None: the layer ignores positions).
    """

    model_type: str
    windows: tuple[int | None, ...]
    ropes: tuple[str | None, ...]
    tied: bool
    embedding_scale: float = 1.0
    scale_in_weights_dtype: bool = False
    logits_divisor: float = 1.0
    softcap: float | None = None

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    @property
    def rope_kinds(self) -> tuple[str, ...]:
        """The kinds of rotary tables that some layer uses, sorted."""
        return tuple(sorted({kind for kind in self.ropes if kind is not None}))

    def modules(self) -> Modules:
        """The classes to build this model's parts with, imported on the first call."""
        family = _FAMILIES[self.model_type]
        module = importlib.import_module(
            f"transformers.models.{family.module}.modeling_{family.module}"
        )
        prefix = family.prefix
        return Modules(
            layer=getattr(module, f"{prefix}DecoderLayer"),
            norm=getattr(module, f"{prefix}RMSNorm"),
            rotary=getattr(module, f"{prefix}RotaryEmbedding"),
        )

    def layer_prefix(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"model.layers.{layer}."

    def embedding_name(self, names: Container[str]) -> str:
        """The tensor to read embedding rows from, given the names a checkpoint holds."""
        return HEAD if self.tied and EMBEDDING not in names else EMBEDDING

    def head_name(self, names: Container[str]) -> str:
        """The tensor that is the head, given the names a checkpoint holds.

        A tied model's checkpoint may hold a head all the same. Where the two differ transformers
        does not tie them, and where they are equal it makes no difference: so a head that is there
        is the head.
        """
        return EMBEDDING if self.tied and HEAD not in names else HEAD

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states from embedding rows (rows, hidden), already in the compute dtype."""
        if self.embedding_scale == 1.0:
            return rows
        if self.scale_in_weights_dtype:  # in bfloat16, gemma's 55.4256 is 55.5
            return rows * torch.tensor(self.embedding_scale, dtype=rows.dtype, device=rows.device)
        return rows * self.embedding_scale

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits from the head's products (rows, any part of the vocabulary), one by one."""
        if self.logits_divisor != 1.0:
            logits = logits / self.logits_divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_config(directory: Path) -> Any:
    """transformers' config of the model in `directory`, which is sure to be of a supported type.

    Code beside the weights is never run: a type that transformers knows is read by transformers'
    class, and any other is refused. Raises ModelNotFoundError, ModelFormatError,
    UnsupportedModelError.
    """
    raw = find_files(directory).config
    path = str(directory / CONFIG)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFormatError(path, f"expected the name of a model_type, found {model_type!r}")
    if model_type not in _FAMILIES:
        raise _unsupported(model_type, _why(raw))

    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # each config class has its own way of saying no
        said = " ".join(str(error).split()) or type(error).__name__
        raise ModelFormatError(path, f"transformers cannot read it: {said}") from error
    _check_sizes(config, path)
    return config


def _check_sizes(config: Any, path: str) -> None:
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name in (*names, "hidden_size", "intermediate_size", "vocab_size"):
        size = getattr(config, name, None)
        if not isinstance(size, int) or size < 1:
            raise ModelFormatError(path, f"{name} is {size!r}, expected a positive number")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % groups:
        raise ModelFormatError(path, f"{heads} heads cannot share {groups} heads of keys evenly")
    for name in ("layer_types", "no_rope_layers"):
        each = getattr(config, name, None)
        if each is not None and len(each) < config.num_hidden_layers:
            raise ModelFormatError(path, f"{name} is shorter than num_hidden_layers")


def check_supported(config: Any) -> Architecture:
    """What our loop needs to know of `config`, a transformers config.

    Raises UnsupportedModelError, with the reason, for a type or a feature that has no exact
    roll-back or no loop here.
    """
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise _unsupported(config.model_type, _why(config.to_dict()))
    if getattr(config, "use_bidirectional_attention", None) or (
        getattr(config, "is_causal", None) is False
    ):
        raise _unsupported(config.model_type, "its attention is bidirectional")
    scale, divisor, softcap = 1.0, 1.0, None
    if family.gemma:
        scale, softcap = config.hidden_size**0.5, config.final_logit_softcapping
    elif config.model_type == "granite":
        scale, divisor = float(config.embedding_multiplier), float(config.logits_scaling)
    return Architecture(
        model_type=config.model_type,
        windows=_windows(config, family),
        ropes=_ropes(config, family),
        tied=bool(config.tie_word_embeddings),
        embedding_scale=scale,
        scale_in_weights_dtype=family.gemma,
        logits_divisor=divisor,
        softcap=softcap,
    )


def _windows(config: Any, family: _Family) -> tuple[int | None, ...]:
    count = config.num_hidden_layers
    if family.windows == "none":
        return (None,) * count
    window: int | None = config.sliding_window
    if family.windows == "every":
        return (window,) * count
    types = config.layer_types[:count]
    if strange := set(types) - {_FULL, _SLIDING}:
        why = f"it has layers of the type {', '.join(sorted(strange))}"
        raise _unsupported(config.model_type, why)
    on = getattr(config, "use_sliding_window", True)
    if _SLIDING in types and not (on and window):
        raise _unsupported(config.model_type, "it has sliding layers but no sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in types)


def _ropes(config: Any, family: _Family) -> tuple[str | None, ...]:
    count = config.num_hidden_layers
    kinds: tuple[str | None, ...] = (ONE_ROPE,) * count
    if family.rope_by_type:
        kinds = tuple(config.layer_types[:count])
    if config.model_type == "smollm3":
        uses = config.no_rope_layers
        kinds = tuple(ONE_ROPE if uses[layer] else None for layer in range(count))
    for kind in sorted({kind for kind in kinds if kind is not None}):
        table = config.rope_parameters if kind == ONE_ROPE else config.rope_parameters[kind]
        rope = table["rope_type"] if table else None
        if rope not in _STATIC_ROPES:
            known = ", ".join(sorted(_STATIC_ROPES))
            why = f"its rotary embedding is of the type {rope!r}, expected one of {known}"
            raise _unsupported(config.model_type, why)
    return kinds


def _unsupported(model_type: str, why: str | None) -> UnsupportedModelError:
    return UnsupportedModelError(model_type, SUPPORTED, why)


def _why(raw: Mapping[str, Any]) -> str | None:
    """The reason to refuse a config of a type that is not on the list, where it shows."""
    text = raw.get("text_config")
    fields = {*raw, *(text if isinstance(text, Mapping) else ())}
    types = raw.get("layer_types") or ()
    if raw.get("is_encoder_decoder"):
        return "it is an encoder and a decoder"
    if fields & {"vision_config", "audio_config", "image_token_id", "image_token_index"}:
        return "it takes images or sound; a checkpoint of its text model alone may load"
    if any("expert" in field for field in fields):
        return "it is a mixture of experts"
    if any(field.startswith(("mamba", "ssm_", "state_size", "linear_")) for field in fields):
        return "it has recurrent layers, whose state cannot be rolled back row by row"
    if strange := {str(kind) for kind in types} - {_FULL, _SLIDING}:
        return f"it has layers of the type {', '.join(sorted(strange))}"
    if "auto_map" in fields:
        return "it needs code of its own, which is never run"
    return None
