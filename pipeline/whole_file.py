"""Files that are written whole: beside their place first, and then moved there."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file wholly or not at all: where it fails, what was there before still is, and no
    temporary file is left. Raises OSError."""
    beside = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
