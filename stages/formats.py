"""How many bytes a substitute takes. Exact, pure, no torch: the planner counts with it."""

from __future__ import annotations

GROUP = 64
"""Weights that share a scale."""
BLOCK = 8
"""Rows that the compiled kernels take at once: other formats' rows are padded to it."""
ROW_MULTIPLE = 64
"""int4's rows are: torch's kernel interleaves so many."""

BITS = {"int4": 4, "int8": 8, "nf4": 4, "int6": 6, "int3": 3, "int2": 2}
"""Of a weight's code."""
FORMATS = tuple(BITS)


def stored_rows(rows: int, form: str) -> int:
    """Rows that a substitute of `rows` rows holds."""
    return _up(rows, ROW_MULTIPLE if form == "int4" else BLOCK)


def substitute_bytes(shape: tuple[int, int], form: str) -> int:
    """Bytes that the substitute of a (rows, cols) matrix holds in format `form`."""
    if form not in BITS:
        raise ValueError(f"format {form!r} given, one of {FORMATS} expected")
    rows, cols = shape
    padded = _up(cols, GROUP)
    scales = 2 if form == "int8" else padded // GROUP * 4
    return stored_rows(rows, form) * (padded * BITS[form] // 8 + scales)


def head_format(form: str) -> str:
    """The format of the head's substitute where layers have theirs in `form`.

    At least 6 bits: what a head is off is added to every score, and nothing after it evens it out.
    On SmolLM2 an int4 head lost as much acceptance as all int4 layers together.
    """
    return form if BITS[form] >= BITS["int6"] else "int6"


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
