"""The memory limits that a container or a service manager has put on this process.

A process belongs to a group under each mounted memory hierarchy (version 2, version 1, or a mix),
and every group from there up to the root may have a limit of its own. The files are those of the
kernel's documents cgroup-v2 and cgroup-v1/memory. All paths are taken below a root, so that tests
can lay out a machine of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

# Version 1 has no word for "no limit": it shows the largest page-aligned number instead.
_UNLIMITED: Final = 1 << 62


class GroupLimit(msgspec.Struct, frozen=True):
    """One group with a limit. All in bytes; ``path`` is the file that sets the limit.

    ``used`` is what the group could not give back: its usage less the file pages that the kernel
    drops when somebody needs the room (a container that has read a large file is not full).
    """

    path: Path
    limit: int
    used: int


class _Mount(msgspec.Struct, frozen=True):
    version: int
    root: PurePosixPath  # the group that is seen at the mount point
    point: Path


def group_limits(root: Path = Path("/")) -> list[GroupLimit]:
    """The limits on this process's own memory groups and on their parents, innermost first.

    Empty where there are none: other systems, no container, files that cannot be read.
    """
    found = []
    groups = _own_groups(_text(root / "proc/self/cgroup"))
    for mount in _mounts(root):
        if mount.version in groups:
            for folder in _upwards(mount, groups[mount.version]):
                limit = (_version_2 if mount.version == 2 else _version_1)(folder)
                if limit is not None:
                    found.append(limit)
    return found


def _own_groups(text: str) -> dict[int, PurePosixPath]:
    """This process's group in each version, from /proc/self/cgroup: lines "id:controllers:path"."""
    groups = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            groups[1] = PurePosixPath(path)
    return groups


def _mounts(root: Path) -> Iterator[_Mount]:
    """The mounted memory hierarchies, from /proc/self/mountinfo (see proc_pid_mountinfo(5))."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or len(kind) < 3:
            continue
        place = PurePosixPath(_plain(fields[3])), root / _plain(fields[4]).lstrip("/")
        if kind[0] == "cgroup2":
            yield _Mount(2, *place)
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield _Mount(1, *place)


def _plain(field: str) -> str:
    r"""A path as mountinfo writes it: blanks and backslashes stand as \040 and \134."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _upwards(mount: _Mount, group: PurePosixPath) -> Iterator[Path]:
    """The folders of ``group`` and of its parents, as far up as the mount shows them."""
    try:
        below = group.relative_to(mount.root)
    except ValueError:
        # In a container the path may be the host's, which is not to be seen from here; what is
        # mounted is then the container's own group.
        below = PurePosixPath()
    if ".." in below.parts:
        below = PurePosixPath()
    for part in (below, *below.parents):
        yield mount.point / part
        if part == PurePosixPath():
            return


def _version_2(folder: Path) -> GroupLimit | None:
    # Above memory.high the kernel does not kill but slows a group down to a crawl.
    limits = [
        (limit, folder / name)
        for name in ("memory.max", "memory.high")
        if (limit := _number(folder / name)) is not None
    ]
    usage = _number(folder / "memory.current")
    if not limits or usage is None:
        return None
    limit, path = min(limits)
    stat = _stat(folder)
    file_pages = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return GroupLimit(path, limit, max(0, usage - file_pages))


def _version_1(folder: Path) -> GroupLimit | None:
    path = folder / "memory.limit_in_bytes"
    limit, usage = _number(path), _number(folder / "memory.usage_in_bytes")
    if limit is None or usage is None:
        return None
    stat = _stat(folder)
    # The least limit of all parents, those included that a container cannot see.
    limit = min(limit, stat.get("hierarchical_memory_limit", limit))
    if limit >= _UNLIMITED:
        return None
    # The plain counters leave out the groups below; old kernels may lack the others.
    file_pages = sum(
        stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file")
    )
    return GroupLimit(path, limit, max(0, usage - file_pages))


def _stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return {
        pair[0]: int(pair[1])
        for pair in pairs
        if len(pair) == 2 and pair[1].isascii() and pair[1].isdigit()
    }


def _number(path: Path) -> int | None:
    """The number in ``path``; None for "max", for nonsense and where there is no such file."""
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
