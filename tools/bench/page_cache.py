"""Files that the kernel still has in memory from earlier runs are charged to nobody's limit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress


def drop(paths: Iterable[str]) -> bool:
    """Ask the kernel to forget the pages of these files; False where that cannot be asked.

    Pages that a living process has mapped stay. Needs no rights but to read the files.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    try:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                with suppress(OSError):  # a page that is not yet on the disk cannot be dropped
                    os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    except OSError:
        return False
    return True
