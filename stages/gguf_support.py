"""Which architectures can be converted from a GGUF file, and how the others are refused."""

from __future__ import annotations

from typing import Final

from routing.errors import UnsupportedModelError

CONVERSION: Final = 1
"""Raised whenever the same file would be converted to something else: part of the cache's key."""

CONVERTIBLE: Final = ("gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3")
"""The values of ``general.architecture`` that transformers has a map for and we have a loop for.

Mistral's and SmolLM2's files say llama. transformers maps more (mixtures of experts, encoders,
state spaces), which this runtime does not run.
"""


def unsupported(architecture: str, why: str) -> UnsupportedModelError:
    """The refusal of a GGUF file of ``architecture``."""
    return UnsupportedModelError(architecture[:80], CONVERTIBLE, f"as a GGUF file: {why}")


def one_line(error: Exception) -> str:
    """What another library said, as a part of our own message."""
    return " ".join(str(error).split())[:200] or type(error).__name__
