"""The benchmark's side of an arm's process: start it, ask it, end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from routing.errors import PacelineError, UsageError
from tools.bench.groups import MemoryGroup
from tools.bench.protocol import Ask, Baseline, Failed, Job, Loaded, Reply, Run

ROOT = Path(__file__).resolve().parent.parent.parent
_GRACE_S = 10.0
"""How long an arm may take to close what it has open."""

Wanted = TypeVar("Wanted", Baseline, Loaded, Run)


class ArmError(PacelineError):
    """An arm's process has ended before its time."""


class Worker:
    """One arm's process. Give it one job at once; `close` it, whatever has become of it."""

    def __init__(self, job: Job, group: MemoryGroup | None = None) -> None:
        """Starts the process and returns without waiting for it. Takes `group` over."""
        self._kind, self._group = job.kind, group
        self._busy = False
        # A file and not a pipe: nobody has to read it for the arm to go on.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        folder = "-" if group is None else str(group.folder)
        try:
            # In a process group of its own the arm does not get the terminal's Ctrl-C beside us.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.bench.arm", folder],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env=_environment(),
                process_group=0,
            )
        except BaseException:
            self._complaints.close()
            if group is not None:
                group.close()
            raise
        self._say(job)

    def hear(self, kind: type[Wanted]) -> Wanted:
        """Wait for the reply to the job or to an Ask. Raises UsageError or ArmError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._busy = False
        if not line:
            raise ArmError(self._obituary())
        reply = msgspec.json.decode(line, type=Reply)
        if isinstance(reply, Failed):
            error = UsageError if reply.usage else ArmError
            raise error(reply.message if reply.usage else f"Arm {self._kind}: {reply.message}")
        assert isinstance(reply, kind), reply
        return reply

    def ask(self, ask: Ask) -> Run:
        """Have one request answered. Raises as `hear` does."""
        self._say(ask)
        return self.hear(Run)

    def group_peak(self) -> int | None:
        """The most bytes that the arm's group has held, page cache included."""
        return None if self._group is None else self._group.peak()

    def close(self) -> None:
        """End the process and remove its group. May be called again."""
        process = self._process
        try:
            if self._busy:
                process.send_signal(signal.SIGINT)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            # Also on the way out of an interrupted wait.
            if process.poll() is None:
                process.kill()
                process.wait()
            self._complaints.close()
            if self._group is not None:
                self._group.close()

    def _say(self, message: Job | Ask) -> None:
        """Send a message. Whether the arm still lives is seen when its reply is wanted."""
        assert self._process.stdin is not None
        self._busy = True
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def _obituary(self) -> str:
        status = self._process.wait()
        if status == -signal.SIGKILL and self._group is not None:
            limit = self._group.limit >> 20
            return f"Arm {self._kind} was killed: it needed more than its limit of {limit} MiB."
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else "it said nothing"
        return f"Arm {self._kind} ended with status {status}: {last}"


def _environment() -> dict[str, str]:
    """Ours, without the settings: those are in the job, and the same for every arm."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PACELINE_") or name == "PACELINE_CACHE"
    }
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
