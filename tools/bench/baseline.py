"""What memory a process holds that has run a one-layer model and given its weights back.

A budget is counted above this: Python, the libraries, what they keep once they have been used, and
the tokenizer. Freed memory that the allocator has kept is handed to the system first, so the
baseline is the least that it can be, and what an arm leaves lying about counts against the arm.
"""

from __future__ import annotations

import ctypes
import gc
import sys

from pipeline.memory import anonymous_rss
from tools.bench.protocol import Ask, Baseline

ASK = Ask("What is the capital of France?", 6)
"""What the one-layer model is asked."""


def measure_baseline() -> Baseline:
    """Of this process, now."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)
    return Baseline(anonymous_rss())
