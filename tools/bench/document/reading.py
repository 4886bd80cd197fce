"""Results out of JSON files: damaged and foreign ones are refused in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from routing.errors import UsageError
from tools.bench.document.benchmarks import BENCHMARKS
from tools.bench.results import Result


class ResultFileError(UsageError):
    """A file that is no result of a benchmark."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(
            f"{path} is no result that can be reported ({problem}); expected a file that"
            f" `python -m tools.bench WHAT --json FILE` wrote, WHAT one of {', '.join(BENCHMARKS)}."
        )


class Machine(msgspec.Struct, frozen=True):
    """See machine.py."""

    system: str
    cores: int
    ram_bytes: int
    device: str | None
    link_gbps: float | None
    memory_gbps: float | None


class _Shared(msgspec.Struct, frozen=True):
    """What every result has."""

    what: str
    model: str
    memory: int | None
    machine: Machine
    versions: dict[str, str | None]
    prompts: list[str]
    max_tokens: int
    repeats: int
    notes: list[str]
    arms: dict[str, dict[str, Any]]
    command: str | None = None


class Read(NamedTuple):
    """One result, where it was read from, and what it has in common with others."""

    path: Path
    result: Result
    shared: _Shared

    @property
    def machine(self) -> Machine:
        """The machine that it was measured on."""
        return self.shared.machine


def read_results(paths: Iterable[Path]) -> list[Read]:
    """In the order of a document's sections; within one, as the files were given.

    Raises ResultFileError.
    """
    order = list(BENCHMARKS)
    return sorted((_read(path) for path in paths), key=lambda one: order.index(one.shared.what))


def _read(path: Path) -> Read:
    try:
        content = path.read_bytes()
        shared = msgspec.json.decode(content, type=_Shared)
        result: Result = msgspec.json.decode(content)
    except OSError as error:
        raise ResultFileError(path, error.strerror or str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResultFileError(path, str(error)) from error
    if shared.what not in BENCHMARKS:
        raise ResultFileError(path, f"what is {shared.what!r}")
    return Read(path, result, shared)


def absent_arms(read: Read) -> Sequence[tuple[str, str]]:
    """Arms without figures, or without some, and why, as the result has it."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for name, arm in read.shared.arms.items():
        at = [(f"{name} at {key}", one) for key, one in arm.items() if isinstance(one, dict)]
        found += [(name, arm), *at]
    told = [(name, one.get("skipped") or one.get("failed")) for name, one in found]
    return [(name, why) for name, why in told if isinstance(why, str)]
