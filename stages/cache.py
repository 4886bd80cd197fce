"""The cache directory, and directories that appear there whole or not at all.

A cached directory is written under a name that ends in ``.partial-XXXXXXXX`` beside its final
place and renamed when it is complete, so whoever finds the final name finds everything. A process
that is killed cannot clean up behind itself; the next one that writes to the same place does. It
knows a dead writer by its lock: each holds one on a file in its partial directory, and the kernel
lets go of it when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import platformdirs

from routing.errors import DiskFullError, OptionError

_LOCK: Final = ".lock"
_PARTIAL: Final = ".partial-"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def cache_dir() -> Path:
    """Where prepared models are kept: PACELINE_CACHE if set, else the user's cache directory.

    The directory is made. Raises OptionError if it cannot be, or cannot be written.
    """
    given = os.environ.get("PACELINE_CACHE")
    path = Path(given).expanduser() if given else platformdirs.user_cache_path("paceline")
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError("PACELINE_CACHE", str(path), "a directory that can be made") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OptionError("PACELINE_CACHE", str(path), "a directory that can be written")
    return path


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still write where ``path``, which exists, lies."""
    return shutil.disk_usage(path).free


@contextmanager
def atomic_directory(final: Path, needed: int = 0) -> Iterator[Path]:
    """A new directory to write into, which becomes ``final`` when the block ends well.

    ``needed`` is the number of bytes about to be written. If the block raises anything at all,
    KeyboardInterrupt included, everything written is removed. When another process has made
    ``final`` in the meantime, its directory stays and ours is removed: both hold the same.

    Raises DiskFullError if fewer than ``needed`` bytes are free, or if the disk or the quota turns
    out to be full while the block runs.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    if (free := free_bytes(final.parent)) < needed:
        raise DiskFullError(str(final), needed, free)
    partial = final.with_name(f"{final.name}{_PARTIAL}{secrets.token_hex(4)}")
    try:
        partial.mkdir()
        with _locked(partial):
            yield partial
            _settle(partial)
        _rename(partial, final)
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(str(final), needed, free_bytes(final.parent)) from error
        raise
    finally:
        # Gone already when all went well.
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Mark ``directory`` as having a living writer, as long as the block runs."""
    new = directory / f"{_LOCK}.new"
    with new.open("wb") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        # The lock is held before its file can be found: nobody ever meets it free.
        new.rename(directory / _LOCK)
        yield
        (directory / _LOCK).unlink()


def _remove_abandoned(final: Path) -> None:
    """Remove the partial directories of ``final`` whose writers are dead.

    One that has no lock file yet (or none any more) is being made (or finished) and is left alone.
    """
    for partial in final.parent.glob(f"{_escaped(final.name)}{_PARTIAL}*"):
        try:
            with (partial / _LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
        except OSError:  # held by a living writer, or gone
            continue


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _settle(directory: Path) -> None:
    """Bring all files to the disk, so that no power cut leaves the final name with empty files."""
    for path in [*sorted(directory.rglob("*")), directory]:
        if path.is_file() or path.is_dir():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _rename(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
