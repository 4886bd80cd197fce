"""A file read around the page cache, in whole blocks, by several threads at once.

Weights that stream past are read once a sweep: caching them would only push out what is needed.
O_DIRECT does that on Linux and F_NOCACHE on macOS. Where neither works (tmpfs, some network
filesystems, Windows) reads are buffered and their pages dropped afterwards, and `direct` says so.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
from contextlib import suppress

from routing.errors import LinkError
from stages.pieces import BLOCK

_F_NOCACHE = 48  # fcntl's command on macOS; Python has no name for it


class DirectFile:
    """A file open for aligned reads. Reads are thread-safe; whoever opened it closes it.

    Raises LinkError when it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd, self.direct = _open(path)
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            raise LinkError(path, str(error)) from error
        self._seek = threading.Lock()

    def read_into(self, view: memoryview, offset: int, needed: int) -> None:
        """Reads into `view` from `offset` on, until its first `needed` bytes are filled.

        The view's address and length and the offset must be multiples of BLOCK. Bytes past
        `needed` are filled or left alone. Short reads are gone on with. Raises LinkError when the
        disk fails or the file ends too early.
        """
        done = 0
        while done < needed:
            start = done - done % BLOCK  # a block that came in part is read again as a whole
            try:
                got = self._read(view[start:], offset + start)
            except OSError as error:
                raise LinkError(self.path, str(error)) from error
            if start + got <= done:
                raise LinkError(
                    self.path,
                    f"it ends at byte {offset + done}, {needed - done} bytes before the weights do",
                )
            done = start + got
        if not self.direct:
            self._drop(offset, view.nbytes)

    def close(self) -> None:
        """Closes the file; no read may be under way. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [view], offset)
        with self._seek, io.FileIO(self._fd, closefd=False) as file:
            file.seek(offset)
            return file.readinto(view) or 0

    def _drop(self, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # advice only
                os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _open(path: str) -> tuple[int, bool]:
    """A file descriptor, and whether reads go around the page cache."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):  # refused at open, or at the first read
            fd = os.open(path, flags | os.O_DIRECT)
            try:
                with mmap.mmap(-1, BLOCK) as block:
                    os.preadv(fd, [block], 0)
            except OSError:
                os.close(fd)
                raise
            return fd, True
    fd = os.open(path, flags)
    return fd, _uncache(fd)


def _uncache(fd: int) -> bool:
    """Turns the page cache off for a descriptor on macOS; False elsewhere."""
    try:
        import fcntl
    except ImportError:
        return False
    if os.uname().sysname != "Darwin":
        return False
    fcntl.fcntl(fd, _F_NOCACHE, 1)
    return True
