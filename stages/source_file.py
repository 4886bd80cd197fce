"""One file of a model, opened once and read by byte range.

Everything is read with ``pread`` into memory the caller owns: nothing is mapped, so no page of the
file ever counts as this process's memory. Read-ahead is off, because the reads are embedding rows
and single tensors; a large read gives the pages back afterwards, since weights that stay in our
memory need not be in the page cache as well.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from routing.errors import LinkError, ModelFormatError

# The kernel moves at most 2 GiB in one call, and a smaller piece lets a signal in.
_PIECE = 1 << 28
# From this size on the pages are worth giving back; small reads are rows that come up again.
_LARGE = 1 << 20


class SourceFile:
    """A regular file open for reading. Reads are thread-safe; the opener closes it."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.size = size
        self._fd: int | None = fd

    @classmethod
    def open(cls, path: Path) -> SourceFile:
        """Open ``path``. Raises ModelFormatError if it is not a file that can be read."""
        try:
            # Without O_NONBLOCK a named pipe would hang us here.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ModelFormatError(str(path), "it is missing") from None
        except (OSError, ValueError) as error:
            raise ModelFormatError(str(path), f"it cannot be opened ({error})") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise ModelFormatError(str(path), "it is not a regular file")
        _advise(fd, 0, 0, "POSIX_FADV_RANDOM")
        return cls(path, fd, status.st_size)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` (bytes) with the file's bytes from ``offset`` on.

        Raises LinkError when the disk fails or the file has become shorter than it was.
        """
        if self._fd is None:
            raise ValueError(f"{self.path} was read after it had been closed")
        done = 0
        while done < view.nbytes:
            try:
                count = os.preadv(self._fd, [view[done : done + _PIECE]], offset + done)
            except OSError as error:
                raise LinkError(str(self.path), error.strerror or str(error)) from error
            if count == 0:
                raise LinkError(
                    str(self.path),
                    f"it ends at byte {offset + done}, but had {self.size} bytes when opened",
                )
            done += count
        if view.nbytes >= _LARGE:
            _advise(self._fd, offset, view.nbytes, "POSIX_FADV_DONTNEED")

    def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset`` on. The caller has checked both against ``size``."""
        buffer = bytearray(nbytes)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def close(self) -> None:
        """Close the file; a second call does nothing. No read may be under way."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _advise(fd: int, offset: int, nbytes: int, advice: str) -> None:
    """Tell the kernel about our reads, where it listens (macOS has no such call)."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice that is not taken changes no result
            os.posix_fadvise(fd, offset, nbytes, getattr(os, advice))
