"""Memory groups: a kernel-enforced limit for the process of one arm (cgroups, version 1 or 2).

Made at the top of the memory hierarchy as it is seen from here, which takes root's rights: the
arm's own limit is then the only one that counts, and is the same on every machine. The file names
are those of the kernel's documents cgroup-v1/memory and cgroup-v2.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

MOUNT: Final = Path("/sys/fs/cgroup")
_PATIENCE_S: Final = 5.0


class _Layout(msgspec.Struct, frozen=True):
    name: str
    folder: str
    limit: str
    swap: str
    swap_counts_all: bool
    peak: str


_LAYOUTS: Final = (
    _Layout(
        name="cgroup v1",
        folder="memory",
        limit="memory.limit_in_bytes",
        swap="memory.memsw.limit_in_bytes",
        swap_counts_all=True,
        peak="memory.max_usage_in_bytes",
    ),
    _Layout(
        name="cgroup v2",
        folder="",
        limit="memory.max",
        swap="memory.swap.max",
        swap_counts_all=False,
        peak="memory.peak",
    ),
)


class NoGroupError(Exception):
    """No memory group can be made here; the message says why."""


class MemoryGroup:
    """One group, for one process and for no longer than it lives. `close` it."""

    def __init__(self, limit: int, mount: Path = MOUNT) -> None:
        """Make a group that may hold `limit` bytes and swap none. Raises NoGroupError."""
        self._layout = _find(mount)
        self.name = self._layout.name
        self.limit = limit
        self.folder = mount / self._layout.folder / f"paceline-bench-{secrets.token_hex(4)}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise NoGroupError(f"no memory group can be made ({error.strerror})") from None
        try:
            (self.folder / self._layout.limit).write_text(str(limit))
        except OSError as error:
            self.close()
            raise NoGroupError(f"memory groups take no limit here ({error.strerror})") from None
        with suppress(OSError):  # kernels without an account of swap have no such file
            swap = limit if self._layout.swap_counts_all else 0
            (self.folder / self._layout.swap).write_text(str(swap))

    def peak(self) -> int | None:
        """The most bytes that the group has held, page cache included; None if nobody counted."""
        try:
            return int((self.folder / self._layout.peak).read_text()) or None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Remove the group, once its process has gone. May be called again."""
        patience = time.monotonic() + _PATIENCE_S
        while self.folder.exists():
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > patience:
                    return
                time.sleep(0.05)


def join(folder: Path) -> None:
    """Put this process into the group in `folder`."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def _find(mount: Path) -> _Layout:
    for layout in _LAYOUTS:
        top = mount / layout.folder
        if layout.folder and (top / layout.limit).exists():
            return layout
        if not layout.folder and "memory" in _words(top / "cgroup.subtree_control"):
            return layout
    raise NoGroupError("there is no hierarchy of memory groups to make one in")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
