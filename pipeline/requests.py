"""What a caller asks for, checked: the edge where Python values become a Request.

What has no effect is left out: an option at its neutral value, a filter of sampled tokens at
temperature 0, a token named twice. So requests that mean the same are the same, and one that asks
for nothing but greedy decoding is `Sampling.plain`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.options import NAMES
from pipeline.settings import LEAST_TEMPERATURE, Settings
from routing.errors import ContextLengthError, OptionError
from routing.messages import Request, Sampling
from stages.tokenizer import Message, Tokenizer

MOST_TEMPERATURE = 100.0
MOST_STOPS = 16
LONGEST_STOP = 256
"""Characters. Every decoded character is held against every stop string."""
MOST_LOGPROBS = 20
MOST_TOKENS = 1 << 31
"""No vocabulary has so many."""


class Asked(NamedTuple):
    """The options of a request, checked. `max_tokens` as asked, `stop_ids` only those added."""

    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    logprobs: int | None


def make_request(
    number: int,
    prompt: Any,
    messages: Sequence[Message] | None,
    options: Mapping[str, Any],
    *,
    settings: Settings,
    tokenizer: Tokenizer | None,
    vocab: int,
    context: int,
    stop_ids: tuple[int, ...],
) -> Request:
    """The request, with what was not given from the settings and a fresh seed if there is none.

    `options` are RequestOptions as they were given. Raises OptionError for an unknown one and for
    values of the wrong kind or range, ContextLengthError for a prompt that leaves no room for an
    answer.
    """
    asked = check_options(options, settings, vocab)
    if asked.stop and tokenizer is None:
        raise OptionError("stop", options["stop"], "none: this model has no tokenizer, so no text")
    tokens = _prompt(prompt, messages, tokenizer, vocab)
    if len(tokens) >= context:
        raise ContextLengthError(len(tokens), context)
    return Request(
        number,
        tokens,
        min(asked.max_tokens, context - len(tokens)),
        asked.sampling,
        tuple(sorted({*stop_ids, *asked.stop_ids})),
        asked.stop,
        asked.logprobs,
    )


def check_options(
    options: Mapping[str, Any], settings: Settings, vocab: int = MOST_TOKENS
) -> Asked:
    """The options in their canonical form. Raises OptionError; `vocab` bounds the token ids."""
    for name in options:
        if name not in NAMES:
            raise OptionError(name, options[name], f"one of {', '.join(NAMES)}")
    given = {name: value for name, value in options.items() if value is not None}
    limit, logprobs = given.get("max_tokens"), _logprobs(given.get("logprobs"), vocab)
    return Asked(
        settings.max_tokens if limit is None else _whole("max_tokens", limit, 1),
        _sampling(given, settings, vocab),
        _tokens("stop_token_ids", given.get("stop_token_ids", ()), vocab),
        _stop(given.get("stop", ())),
        logprobs,
    )


class _Range(NamedTuple):
    """Numbers from `least` (itself left out if `above`) to `most`."""

    least: float
    most: float
    above: bool = False

    def check(self, option: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Written so that NaN is out of it.
        if not number or not self.least <= value <= self.most or (self.above and value == 0):
            least = f"above {self.least:g}, at most" if self.above else f"from {self.least:g} to"
            raise OptionError(option, value, f"a number {least} {self.most:g}")
        return float(value)


_SHARE = _Range(0, 1, above=True)
_PENALTY = _Range(-2, 2)
_BIAS = _Range(-100, 100)
_FILTERS = {"top_p": _SHARE, "min_p": _Range(0, 1), "typical_p": _SHARE}
_PENALTIES = {
    # Scores are divided and multiplied by it, so that it must stay away from 0 on both sides.
    "repetition_penalty": _Range(0.01, 100),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}


def _sampling(given: Mapping[str, Any], settings: Settings, vocab: int) -> Sampling:
    temperature = _temperature(given.get("temperature", settings.temperature))
    top_k = _whole("top_k", given.get("top_k", 0), 0)
    filters: dict[str, Any] = {
        name: kind.check(name, given[name]) for name, kind in _FILTERS.items() if name in given
    }
    filters["top_k"] = top_k if top_k < vocab else 0
    penalties: dict[str, Any] = {
        name: kind.check(name, given[name]) for name, kind in _PENALTIES.items() if name in given
    }
    banned, allowed = _choice(given, vocab)
    return Sampling(
        temperature,
        _seed(given.get("seed", settings.seed)),
        **(filters if temperature else {}),
        **penalties,
        logit_bias=_bias(given.get("logit_bias", {}), vocab),
        banned=banned,
        allowed=allowed,
    )


def _choice(given: Mapping[str, Any], vocab: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Banned and allowed tokens, no more than one of them: what is allowed and banned is banned."""
    banned = _tokens("banned_tokens", given.get("banned_tokens", ()), vocab)
    if len(banned) == vocab:
        raise OptionError("banned_tokens", "every token", "at least one token left to choose")
    if "allowed_tokens" not in given:
        return banned, None
    named = set(_tokens("allowed_tokens", given["allowed_tokens"], vocab))
    allowed = tuple(sorted(named.difference(banned)))
    if not allowed:
        expected = "at least one token that is not banned"
        raise OptionError("allowed_tokens", given["allowed_tokens"], expected)
    return ((), allowed) if len(named) < vocab else (banned, None)


def _bias(value: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise OptionError("logit_bias", value, "a mapping from token ids to numbers")
    for token in value:
        _token("logit_bias", token, vocab)
    pairs = ((int(token), _BIAS.check("logit_bias", value[token])) for token in value)
    return tuple(sorted(pair for pair in pairs if pair[1] != 0))


def _stop(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else _listed("stop", value, "a text or texts")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= LONGEST_STOP:
            raise OptionError("stop", stop, f"texts of 1 to {LONGEST_STOP} characters")
        if any("\ud800" <= character <= "\udfff" for character in stop):
            raise OptionError("stop", stop, "text that can be encoded as UTF-8")
    if len(set(stops)) > MOST_STOPS:
        raise OptionError("stop", f"{len(set(stops))} texts", f"at most {MOST_STOPS}")
    return tuple(sorted(set(stops)))


def _logprobs(value: Any, vocab: int) -> int | None:
    if value is None or value is False:
        return None
    number = 0 if value is True else value
    if not isinstance(number, int) or not 0 <= number <= MOST_LOGPROBS:
        raise OptionError("logprobs", value, f"a whole number from 0 to {MOST_LOGPROBS}")
    return min(number, vocab)


def _whole(option: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(option, value, f"a whole number of at least {least}")
    return value


def _seed(value: Any) -> int:
    return secrets.randbits(63) if value is None else _whole("seed", value, 0)


def _temperature(value: Any) -> float:
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not (value == 0 or LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE):
        expected = f"0 or a number from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}"
        raise OptionError("temperature", value, expected)
    return float(value)


def _tokens(option: str, value: Any, vocab: int) -> tuple[int, ...]:
    """Token ids, sorted, each once."""
    listed = _listed(option, value, "token ids")
    return tuple(sorted({_token(option, token, vocab) for token in listed}))


def _listed(option: str, value: Any, expected: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise OptionError(option, value, f"{expected}, in a list")
    return tuple(value)


def _token(option: str, token: Any, vocab: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
        raise OptionError(option, token, f"token ids from 0 to {vocab - 1}")
    return token


def _prompt(
    prompt: Any, messages: Sequence[Message] | None, tokenizer: Tokenizer | None, vocab: int
) -> tuple[int, ...]:
    if (prompt is None) == (messages is None):
        raise OptionError("prompt", prompt, "either a prompt or messages, and not both")
    if prompt is not None and not isinstance(prompt, str):
        listed = _listed("prompt", prompt, "a text, or token ids")
        tokens = tuple(_token("prompt", token, vocab) for token in listed)
    elif tokenizer is None:
        raise OptionError("prompt", prompt, "token ids: this model has no tokenizer")
    elif messages is not None:
        tokens = tuple(tokenizer.chat(messages))
    else:
        tokens = tuple(tokenizer.encode(str(prompt)))
    if not tokens:
        raise OptionError("prompt", prompt, "at least one token")
    return tokens
