"""Long steps shown to a person: which one, for how long, doing what; and the commands they run.

A set-up takes a minute or more in silence if pip's output is hidden, and scrolls everything else
away if it is not. So each step is one line that is kept current on a terminal, and a line now and
then elsewhere; the whole output goes to a log, whose end is shown when a command fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

TICK_S = 0.2
HEARTBEAT_S = 20.0
"""Between two lines about the same step where there is no terminal."""
GRACE_S = 10.0
"""How long a command that was told to stop may tidy up."""
TAIL_LINES = 15


class SetupError(Exception):
    """What went wrong and what to do, in words for the person at the terminal."""


class CommandError(SetupError):
    """A command failed: its name, its exit status, the end of what it said, and the log's path."""

    def __init__(self, what: str, status: int, log: Path, tail: Sequence[str]) -> None:
        self.status = status
        self.tail = tuple(tail)
        hint = advice("\n".join(tail))
        super().__init__(
            "\n".join(
                [f"  {line}" for line in tail]
                + [f"{what} failed (exit status {status}).{hint} The whole log: {log}"]
            )
        )


class Steps:
    """Numbers the steps of one set-up and keeps the line of the current one.

    Writes to stderr, so that what the command itself prints can still be piped on.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._clock = clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._number = 0
        self._title = ""
        self._detail = ""
        self._began = 0.0
        self._shown = 0.0

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """One step; its line is closed with the time it took, or with 'stopped'."""
        self._number += 1
        self._title, self._detail = title, ""
        self._began = self._shown = self._clock()
        self._write("", end=False)
        try:
            yield
        except BaseException:
            self._write("stopped")
            raise
        self._write("done")

    def tell(self, detail: str) -> None:
        """What the current step is doing now."""
        self._detail = detail

    def tick(self) -> None:
        """Called often: shows the time that has passed, no more often than is useful."""
        now = self._clock()
        if now - self._shown >= (TICK_S if self._terminal else HEARTBEAT_S):
            self._shown = now
            self._write(self._detail, end=False)

    def _write(self, detail: str, *, end: bool = True) -> None:
        elapsed = self._clock() - self._began
        line = f"[{self._number}/{self._total}] {self._title}"
        if detail:
            line += f": {detail}"
        if elapsed >= 1 or end:
            line += f" ({elapsed:.0f} s)"
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[2K{line[: columns - 1]}" + ("\n" if end else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def run_command(
    what: str,
    command: Sequence[str | Path],
    log: Path,
    steps: Steps,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run `command` to its end, its output summarized in `steps` and appended to `log`.

    Whatever ends this call, Ctrl-C included, the command and what it started have ended too.

    Raises CommandError when the exit status is not 0.
    """
    lines: list[str] = []

    def heard(line: str) -> None:
        lines.append(line)
        detail = summary(line)
        if detail is not None:
            steps.tell(detail)

    with log.open("ab") as sink:
        # In a process group of its own, the command does not get the terminal's Ctrl-C beside us:
        # it is stopped once, by us, also where only this process was told to stop.
        child = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            process_group=0,
        )
        try:
            assert child.stdout is not None
            _listen(child.stdout.fileno(), sink.write, heard, steps.tick)
            status = child.wait()
        finally:
            _stop(child)
    if status != 0:
        raise CommandError(what, status, log, lines[-TAIL_LINES:])


def _listen(
    source: int,
    keep: Callable[[bytes], object],
    heard: Callable[[str], None],
    tick: Callable[[], None],
) -> None:
    rest = b""
    while True:
        if select.select([source], [], [], TICK_S)[0]:
            data = os.read(source, 1 << 16)
            if not data:
                break
            keep(data)
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                heard(line.decode(errors="replace").rstrip())
        tick()
    if rest:
        heard(rest.decode(errors="replace").rstrip())


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(GRACE_S)
        # Its children may take longer than it does, or it may not listen.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.stdout is not None:
        child.stdout.close()


_FILE = re.compile(r"([^/\s]+?)-\d[^/\s]*\.(?:whl|tar\.gz|zip)(?:\.metadata)?(?:\s+(\(.*\)))?\s*$")
_FILE_VERBS = {"Downloading": "downloading", "Using": "from pip's cache:", "Processing": "reading"}


def summary(line: str) -> str | None:
    """What a line of pip's output means for someone who waits, or None if nothing.

    >>> summary("  Downloading torch-2.13.0-cp311-none-any.whl (190.1 MB)")
    'downloading torch (190.1 MB)'
    """
    words = line.split()
    if not words:
        return None
    if words[0] == "Collecting" and len(words) > 1:
        return "choosing " + re.split(r"[=<>~!\[;]", words[1])[0]
    if line.startswith("Installing collected packages:"):
        return f"unpacking {line.count(',') + 1} packages"
    verb = _FILE_VERBS.get(words[0])
    file = _FILE.search(line)
    if verb is None or file is None:
        return None
    size = f" {file[2]}" if file[2] and "from" not in file[2] else ""
    return f"{verb} {file[1]}{size}"


def advice(output: str) -> str:
    """A sentence on the commonest causes of a failed installation, or nothing."""
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return " The disk is full: free some gigabytes and run it again."
    if "Permission denied" in output:
        return " Some files there belong to someone else."
    unreachable = ("NewConnectionError", "Temporary failure", "timed out", "SSLError", "ProxyError")
    if any(word in output for word in unreachable):
        return " The package index cannot be reached: check the network and pip's settings."
    if "No matching distribution" in output:
        return (
            " The package index has no build of that for this Python and machine:"
            " try another Python (3.11 and newer), or check pip's settings."
        )
    return ""
