"""Runs of the command line: in the test's process, and in one of its own to be interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from pipeline.cli import run

ROOT = Path(__file__).resolve().parent.parent.parent
SOON_S = 120.0
"""How long an interrupted process may take to end: a watchdog, as the machine may be busy.

It takes 2 to 5 seconds when nothing else runs, and 12 where a few others do.
"""


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of a refusal; nothing else may have been printed."""
        assert self.code == 2, self
        assert self.out == "", self
        assert self.err.startswith("paceline: ") and self.err.count("\n") == 1, self
        return self.err.removeprefix("paceline: ").strip()


class Here:
    """The command line within the test's process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Outcome:
        self._capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Outcome(code, *self._capsys.readouterr())


def command(arguments: Sequence[str | Path], before: str = "") -> list[str]:
    """What starts the console script's function, after the statements `before`."""
    # A shell may have started the tests with Ctrl-C ignored, which processes inherit.
    default = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{default}\n{before}\nfrom pipeline.cli import main\nmain()"
    return [sys.executable, "-c", script, *(str(argument) for argument in arguments)]


def environment(path: Path, **more: str) -> dict[str, str]:
    """With caches and temporary files under `path`."""
    for name in ("cache", "tmp"):
        (path / name).mkdir(exist_ok=True)
    places = {"PACELINE_CACHE": str(path / "cache"), "TMPDIR": str(path / "tmp")}
    return {**os.environ, "PYTHONPATH": str(ROOT), **places, **more}


@contextmanager
def process(
    arguments: Sequence[str | Path], env: Mapping[str, str], before: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """The command line as a process of its own, which ends with the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(arguments, before), stdout=pipe, stderr=pipe, text=True, env=dict(env)
    ) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.kill()


def read_until(stream: IO[str], marker: str) -> str:
    """What a process says, up to the line that has the marker."""
    said = ""
    for line in stream:
        said += line
        if marker in line:
            return said
    raise AssertionError(f"{marker!r} was never said: {said}")


def interrupt(started: subprocess.Popen[str], times: int = 1) -> Outcome:
    """Ctrl-C, and the end of the process."""
    for _ in range(times):
        started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=SOON_S)
    return Outcome(started.returncode, out, err)


def left_behind(path: Path) -> list[Path]:
    """Files under a directory of `environment`."""
    places = [path / "cache", path / "tmp"]
    return [file for place in places for file in place.rglob("*") if not file.is_dir()]
