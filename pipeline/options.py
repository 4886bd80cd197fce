"""What one request may ask for beside its prompt. docs/sampling.md tells users about each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypedDict

from routing.errors import OptionError


class RequestOptions(TypedDict, total=False):
    """Options of Engine.stream, Engine.generate and generate. None is as good as not given.

    max_tokens, temperature and seed default to the engine's settings, without a seed there a fresh
    one is drawn; the others default to what changes nothing.
    """

    max_tokens: int | None
    temperature: float | None
    seed: int | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    banned_tokens: Sequence[int] | None
    allowed_tokens: Sequence[int] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    logprobs: int | bool | None
    """How many of the likeliest tokens to name beside each chosen one; True is 0, False is None."""


NAMES = tuple(RequestOptions.__annotations__)

_FLAGS = {
    "prompt": "PROMPT",
    "messages": "PROMPT",
    "max_tokens": "--max-tokens",
    "temperature": "--temp",
    "seed": "--seed",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "typical_p": "--typical-p",
    "repetition_penalty": "--repeat-penalty",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "logit_bias": "--logit-bias",
    "stop": "--stop",
    "logprobs": "--logprobs",
}


@contextmanager
def named_by_flags() -> Iterator[None]:
    """An OptionError from within the block names the command line's option, not Python's."""
    try:
        yield
    except OptionError as error:
        flag = _FLAGS.get(error.option)
        if flag is None:
            raise
        raise OptionError(flag, error.given, error.expected) from error
