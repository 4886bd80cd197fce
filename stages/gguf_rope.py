"""The rotary embedding that a GGUF file describes: scaled how, and on how much of a head.

llama.cpp keeps some of it in metadata and some in small tensors of factors; transformers' loader
reads neither. A model without its scaling answers well until its context grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from routing.errors import ModelFormatError
from stages.gguf_header import GgufHeader
from stages.gguf_support import unsupported
from stages.strict_json import shown

LLAMA3_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
FACTORS: Final[tuple[str, ...]] = (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that hold no weights: they scale the rotary frequencies and become part of the config."""

# Every Llama 3 was stretched from this context with these bands; its file has only the result.
_LLAMA3_LOW: Final = 1.0
_LLAMA3_HIGH: Final = 4.0
_LLAMA3_CONTEXT: Final = 8192


def rope_fields(
    header: GgufHeader, own: dict[str, Any], factors: dict[str, Sequence[float]]
) -> dict[str, Any]:
    """The fields of a config that concern the rotary embedding, apart from its base.

    ``own`` holds the architecture's metadata without their prefix, sizes checked; ``factors`` the
    values of those tensors of FACTORS that the file has. Raises UnsupportedModelError for a
    scaling that has no counterpart, ModelFormatError for one that lacks a part.
    """
    fields = _rotated(header, own)
    scaling = _scaling(header, own, factors)
    if scaling is not None:
        fields["rope_scaling"] = scaling
        if scaling["rope_type"] == "longrope":
            fields["original_max_position_embeddings"] = _trained(header, own)
    return fields


def _rotated(header: GgufHeader, own: dict[str, Any]) -> dict[str, Any]:
    """The part of each head that is rotated: all of it, except in phi3."""
    width = own["embedding_length"] // own["attention.head_count"]
    head_dim = own.get("attention.key_length", width)
    rotated = own.get("rope.dimension_count", head_dim)
    if header.architecture != "phi3":
        if rotated != head_dim:
            why = f"{rotated} of {head_dim} dimensions of a head are rotated"
            raise unsupported(header.architecture, why)
        return {}
    if head_dim != width or not 0 < rotated <= head_dim:
        raise unsupported(header.architecture, f"its heads have {head_dim} dimensions, not {width}")
    return {"partial_rotary_factor": rotated / head_dim}


def _scaling(
    header: GgufHeader, own: dict[str, Any], factors: dict[str, Sequence[float]]
) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    if header.architecture == "llama" and set(factors) == {LLAMA3_FACTORS}:
        return _llama3(header, own, factors[LLAMA3_FACTORS])
    if header.architecture == "phi3" and set(factors) == {LONG_FACTORS, SHORT_FACTORS}:
        return {
            "rope_type": "longrope",
            "short_factor": list(factors[SHORT_FACTORS]),
            "long_factor": list(factors[LONG_FACTORS]),
        }
    if factors:
        raise unsupported(header.architecture, f"it has {', '.join(sorted(factors))}")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _factor(header, own)}
    if kind == "yarn" and not any(key.startswith("rope.scaling.yarn_") for key in own):
        return {
            "rope_type": "yarn",
            "factor": _factor(header, own),
            "original_max_position_embeddings": _trained(header, own),
        }
    raise unsupported(header.architecture, f"its rotary scaling is {shown(str(kind))}")


def _factor(header: GgufHeader, own: dict[str, Any]) -> float:
    factor: Any = own.get("rope.scaling.factor")
    if type(factor) not in (int, float) or factor < 1:
        raise ModelFormatError(
            str(header.path), f"its rope.scaling.factor is {ascii(factor)[:80]}, expected 1 or more"
        )
    return float(factor)


def _trained(header: GgufHeader, own: dict[str, Any]) -> int:
    trained = own.get("rope.scaling.original_context_length")
    if type(trained) is not int:
        raise ModelFormatError(
            str(header.path), "its rotary embedding is scaled, but from which context is not said"
        )
    return trained


def _llama3(
    header: GgufHeader, own: dict[str, Any], values: Sequence[float]
) -> dict[str, Any] | None:
    """Llama 3's scaling, found again from what each frequency is divided by.

    That is 1 for the high frequencies, the factor itself for the low ones, and a blend of the two
    between (after the code published with Llama 3.1).
    """
    factor = max(values)
    base = own.get("rope.freq_base", 10_000.0)
    if min(values) < 1 or type(base) is not float or base <= 1:
        raise ModelFormatError(str(header.path), "its rope_freqs.weight or rope.freq_base is wrong")
    if factor == 1:
        return None
    context = own.get("rope.scaling.original_context_length", _LLAMA3_CONTEXT)
    for index, value in enumerate(values):
        turns = context * base ** (-index / len(values)) / (2 * math.pi)
        blend = min(1.0, max(0.0, (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)))
        if not math.isclose(value, 1 / ((1 - blend) / factor + blend), rel_tol=1e-3):
            raise unsupported(header.architecture, "its rope_freqs.weight are not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": context,
    }
