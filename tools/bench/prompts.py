"""The prompts that a benchmark asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import msgspec

from routing.errors import OptionError

DEFAULT = Path(__file__).resolve().parent.parent / "prompts.jsonl"


class Prompt(msgspec.Struct, frozen=True):
    """One line of a prompts file. `complexity` is low, medium or high."""

    id: str
    category: str
    complexity: str
    prompt: str


class TokenPrompt(msgspec.Struct, frozen=True):
    """A prompt of exactly these token ids."""

    id: str
    prompt: tuple[int, ...]


def cut_prompts(text: Sequence[int], lengths: Sequence[int], repeats: int) -> Iterator[TokenPrompt]:
    """For each repeat a prompt of each length, cut out of `text` (begun anew at its end) at a place
    of its own. The first repeat takes the lengths as they come, the others begin at another one.
    """
    for repeat in range(repeats):
        for index in range(len(lengths)):
            length = lengths[(index + repeat) % len(lengths)]
            start = (repeat * len(lengths) + index) * len(text) // (repeats * len(lengths))
            tokens = tuple(islice(cycle(text), start, start + length))
            yield TokenPrompt(f"{length} tokens, {repeat + 1}", tokens)


def read_prompts(path: Path, limit: int | None) -> tuple[Prompt, ...]:
    """At most `limit` prompts, spread evenly over the file so that every category has its share.

    Raises OptionError when the file cannot be read or is no list of prompts.
    """
    expected = "a file of JSON lines with id, category, complexity and prompt"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        prompts = [msgspec.json.decode(line, type=Prompt) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise OptionError("--prompts", str(path), f"{expected} ({error})") from error
    if not prompts or len({prompt.id for prompt in prompts}) < len(prompts):
        raise OptionError("--prompts", str(path), f"{expected}, at least one, no id twice")
    count = len(prompts) if limit is None else min(limit, len(prompts))
    return tuple(prompts[index * len(prompts) // count] for index in range(count))
