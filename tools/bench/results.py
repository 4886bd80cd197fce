"""The JSON object that a benchmark gives to programs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.settings import Settings
from pipeline.whole_file import write_whole
from routing.errors import OptionError
from tools.bench.figures import figure
from tools.bench.machine import describe_machine, describe_versions
from tools.bench.prompts import Prompt
from tools.bench.turns import Arm, Turn

Result = dict[str, Any]


class Options(msgspec.Struct, frozen=True):
    """What benchmarks are told. `gguf` is the model again, in float16, for llama.cpp."""

    settings: Settings
    prompts: tuple[Prompt, ...]
    max_tokens: int
    repeats: int
    gguf: Path | None = None


def begin_result(
    what: str, options: Options, model: str, arms: Mapping[str, Arm], turns: Sequence[Turn]
) -> Result:
    """What every result has; its `arms` are still to be filled in."""
    settings = options.settings
    raw = figure(run.raw_gbps for turn in turns for run in turn.runs.values())
    devices = [arm.loaded.device for arm in arms.values() if arm.loaded is not None]
    return {
        "what": what,
        "model": model,
        "memory": settings.memory,
        "context": settings.context,
        "machine": describe_machine(next(iter(devices), None), raw and raw.median),
        "versions": describe_versions(),
        "prompts": [prompt.id for prompt in options.prompts],
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "seed": settings.seed,
        "simulated_link_gbps": settings.link_gbps,
        "memory_group": next((arm.group_kind for arm in arms.values() if arm.group_kind), None),
        "notes": _notes(settings, arms.values()),
        "arms": {},
    }


def _notes(settings: Settings, arms: Iterable[Arm]) -> list[str]:
    notes = {note for arm in arms for note in arm.notes}
    if settings.context is not None:
        notes.add(f"room for a context of {settings.context} tokens")
    if settings.link_gbps is not None:
        notes.add(f"the link is simulated: {settings.link_gbps:g} GB/s")
    plans = [arm.loaded.plan for arm in arms if arm.loaded is not None]
    if any(plan is not None and plan.direct_reads is False for plan in plans):
        notes.add("the disk takes no direct reads: its figures may be the page cache's")
    return sorted(notes)


def as_json(result: Result) -> Result:
    """The same result as a program reads it from its file."""
    read: Result = msgspec.json.decode(msgspec.json.encode(result))
    return read


def result_bytes(result: Result) -> bytes:
    """What a result's file has in it."""
    return msgspec.json.format(msgspec.json.encode(result)) + b"\n"


def check_writable(path: Path, option: str = "--json") -> None:
    """Raise OptionError now rather than after the measurements if `path` cannot be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(option, str(path), "a file in a directory that can be written")


def make_directory(path: Path, option: str) -> None:
    """Make a directory to write into, if it is not there. Raises OptionError if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = f"a directory that can be made ({error.strerror})"
        raise OptionError(option, str(path), expected) from error
    check_writable(path / "file", option)


def write_file(path: Path, content: bytes, option: str = "--json") -> None:
    """Write a file wholly or not at all. Raises OptionError if it cannot be."""
    try:
        write_whole(path, content)
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise OptionError(option, str(path), expected) from error
