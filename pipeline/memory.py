"""How much memory there is for us, and how much of it we hold.

What counts as ours is anonymous memory: pages of files are the kernel's to drop, and nothing here
maps weights. A budget is kept if the anonymous memory stays below it at every moment, so it is
sampled from a thread while the work runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec
import psutil

from pipeline.cgroups import group_limits

_STATUS: Final = Path("/proc/self/status")


class AvailableMemory(msgspec.Struct, frozen=True):
    """What this process can count on, in bytes.

    ``limit`` is the most it could ever hold (memory of the machine, or a container's smaller
    limit), ``available`` what it could take now on top of what it holds already, and ``source``
    says what bounds ``available``: "physical memory" or the path of the group's file.
    """

    limit: int
    available: int
    source: str


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """The memory of the machine, cut down to the limits of every control group around us.

    Page cache is not used memory, neither the machine's nor a group's. ``root`` is where /proc and
    /sys are looked up for control groups; the machine's own memory is always asked of psutil.
    """
    machine = psutil.virtual_memory()
    limit, available, source = int(machine.total), int(machine.available), "physical memory"
    for group in group_limits(root):
        limit = min(limit, group.limit)
        room = max(0, group.limit - group.used)
        if room < available:
            available, source = room, str(group.path)
    return AvailableMemory(limit, available, source)


def anonymous_rss(status: Path = _STATUS) -> int:
    """Bytes of anonymous memory that this process has in RAM now.

    Linux's RssAnon; shared mappings and mapped files are not in it. Elsewhere psutil's unique set
    size, which is close to it for a process that maps no large files.
    """
    try:
        text = status.read_bytes()
    except OSError:
        text = b""
    for line in text.splitlines():
        if line.startswith(b"RssAnon:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_full_info().uss)


class PeakSampler:
    """Watches memory while a block runs: ``with PeakSampler() as memory: ...``.

    ``baseline`` is what was held on entry and ``peak`` the most seen since, entry and exit
    included, both in bytes; ``peak`` can be read at any time and stays after the block. A rise
    shorter than ``interval_s`` may be missed. May be used again, which starts over.
    """

    def __init__(self, interval_s: float = 0.004, read: Callable[[], int] = anonymous_rss) -> None:
        self.baseline = 0
        self.peak = 0
        self._interval_s = interval_s
        self._read = read
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PeakSampler:
        assert self._thread is None, "a sampler watches one block at a time"
        self.baseline = self.peak = self._read()
        self._ended.clear()
        self._thread = threading.Thread(target=self._watch, name="peak-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._ended.set()
        self._thread.join()
        self._thread = None
        self.peak = max(self.peak, self._read())

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.peak = max(self.peak, self._read())
