"""Text to token ids and back. A thin layer over transformers' tokenizers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from routing.errors import ModelFormatError, OptionError
from stages.strict_json import read_object

Message = Mapping[str, str]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_PATIENCE = 8
"""Tokens without text after which the next are not waited for: a character has 4 bytes at most."""

_GENERATION_LIMIT = 1_000_000  # bytes of generation_config.json


class Tokenizer:
    """The tokenizer of one model directory."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # "special" is the tokenizer's word for control tokens; added words are none.
        self._control = tuple(
            sorted(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
        )

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """None when the directory has no tokenizer: such a model takes token ids only.

        Raises ModelFormatError when it has one that cannot be read.
        """
        from transformers import AutoTokenizer

        if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            return None
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), trust_remote_code=False, local_files_only=True
            )
            tokenizer.encode("a")  # some settings are looked at no earlier
            return cls(tokenizer)
        except Exception as error:  # every tokenizer class fails in its own way
            said = " ".join(str(error).split())[:300] or type(error).__name__
            problem = f"its tokenizer cannot be read: {said}"
            raise ModelFormatError(str(directory), problem) from error

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with whatever the model puts before any text.

        The text of a control token becomes that token. Raises OptionError for a text that cannot
        be encoded as UTF-8.
        """
        _check_text("prompt", text)
        return [int(token) for token in self._tokenizer.encode(text)]

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Only the template makes control tokens: where a message has the text of one, it stays text.
        Raises OptionError when the model has no chat template or it refuses the messages.
        """
        if not self.has_chat_template:
            raise OptionError(
                "messages", "a conversation", "a plain prompt: this model has no chat template"
            )
        veil = _Veil(self._control, messages)
        try:
            text = self._tokenizer.apply_chat_template(
                veil.messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like
            said = " ".join(str(error).split())[:200]
            expected = f"one that the model's chat template takes ({said})"
            raise OptionError("messages", "a conversation", expected) from error
        return [
            int(token)
            for part, is_text in veil.parts(text)
            for token in self._tokenizer.encode(
                part, add_special_tokens=False, split_special_tokens=is_text
            )
        ]

    def decoder(self) -> Decoder:
        """A new incremental decoder."""
        return Decoder(self._tokenizer)


class _Veil:
    """Messages in which the texts of control tokens are veiled while the template works on them.

    A veiled text is its number between two marks, a character that no message has.
    """

    def __init__(self, control: Sequence[str], messages: Sequence[Message]) -> None:
        texts = [text for one in messages for text in one.values() if isinstance(text, str)]
        for text in texts:
            _check_text("messages", text)
        used = set("".join(texts))
        # From the top of Unicode, where nothing is meant for exchange.
        self._mark = next(mark for mark in map(chr, range(0x10FFFF, 0, -1)) if mark not in used)
        self._control = control
        self._any = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))
        self.messages = [{key: self._veiled(value) for key, value in m.items()} for m in messages]

    def _veiled(self, value: Any) -> Any:
        if not isinstance(value, str) or not self._control:
            return value
        return self._any.sub(
            lambda found: f"{self._mark}{self._control.index(found[0])}{self._mark}", value
        )

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """A rendered text, unveiled, in parts to be encoded; whether control tokens are text there.

        A tokenizer cuts a text at control tokens before all else, so these are the places where it
        may be cut. Without anything veiled there is one part.
        """
        if self._mark not in text:
            yield text, False
            return
        kept = ""
        for number, part in enumerate(re.split(f"({self._any.pattern})", text)):
            if number % 2 or self._mark not in part:
                kept += part
                continue
            if kept:
                yield kept, False
            kept = ""
            yield self._unveiled(part), True
        if kept:
            yield kept, False

    def _unveiled(self, part: str) -> str:
        veiled = f"{self._mark}(\\d+){self._mark}"
        return re.sub(veiled, lambda found: self._control[int(found[1])], part)


def _check_text(option: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 10) : error.end + 10]
        raise OptionError(option, around, "text that can be encoded as UTF-8") from error


class Decoder:
    """Text of a growing list of tokens. Holds back bytes that are not yet a whole character.

    What a token adds depends on those before it (a space, part of a character), but not on those
    far before: it decodes a window of the last few tokens, so a token costs the same anywhere.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._window: list[int] = []
        """Tokens whose text was given, for context, then those whose text was not."""
        self._given = 0
        self._context = ""
        """The text of the tokens that are context."""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return "".join(map(self._step, tokens))

    def flush(self) -> str:
        """What was held back, at the end: bytes that never became a character show as U+FFFD."""
        return self._give(self._decode(self._window), len(self._window))

    def _step(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if len(text) > len(self._context) and not text.endswith(_BROKEN):
            return self._give(text, len(self._window))
        if len(self._window) - self._given >= _PATIENCE:
            return self._give_up(text)
        return ""

    def _give(self, text: str, count: int) -> str:
        """The new part of `text`, that of the window's first `count` tokens: now context."""
        new = text[len(self._context) :]
        del self._window[: self._given]
        self._given = count - self._given
        self._context = self._decode(self._window[: self._given])
        return new

    def _give_up(self, text: str) -> str:
        """Stop waiting for tokens that have no text, or that are broken whatever comes."""
        if not text.endswith(_BROKEN):
            del self._window[self._given :]
            return ""
        last = len(self._window)
        for count in range(last - 1, max(self._given, last - 5), -1):
            # Where the text falls into two, no character lies across.
            before = self._decode(self._window[:count])
            if before + self._decode(self._window[count:]) == text:
                return self._give(before, count)
        return ""

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def stop_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """The tokens that end an answer: generation_config.json's, or else config.json's.

    Raises ModelFormatError when they are no token ids.
    """
    path = directory / "generation_config.json"
    given: Any = None
    if path.exists():
        given = read_object(path, _GENERATION_LIMIT).get("eos_token_id")
    if given is None:
        path, given = directory / "config.json", getattr(config, "eos_token_id", None)
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise ModelFormatError(str(path), f"eos_token_id is {given!r}, expected token ids")
    return tuple(sorted(set(ids)))
