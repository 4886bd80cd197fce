"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable


def trim() -> None:
    """Collect garbage, then `give_back`. Quantizing leaves some 100 MB behind, which would count
    against a budget for good."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Hand memory that was freed but kept by the C allocator back. Does nothing but on glibc.

    Takes some milliseconds. Once a sweep it keeps what lies about to a few MB instead of thirty.
    """
    call = _malloc_trim()
    if call is not None:
        call(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
