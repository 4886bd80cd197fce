"""Sizes of substitutes: pure, exact, and known without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stages.formats import BITS, FORMATS, head_format, substitute_bytes


@pytest.mark.parametrize(
    ("form", "shape", "nbytes"),
    [
        ("int4", (64, 64), 64 * 32 + 64 * 4),
        ("int4", (49152, 576), 49152 * (288 + 9 * 4)),
        ("int8", (64, 64), 64 * 64 + 64 * 2),
        ("int8", (3, 100), 8 * 128 + 8 * 2),
        ("nf4", (3, 128), 8 * 64 + 8 * 2 * 4),
        ("int3", (8, 64), 128 + 64 + 32),
        ("int3", (3, 100), 8 * (128 * 3 // 8 + 2 * 4)),
        ("int2", (8, 64), 128 + 32),
        ("int2", (49152, 576), 49152 * (144 + 9 * 4)),
    ],
)
def test_sizes_by_hand(form: str, shape: tuple[int, int], nbytes: int) -> None:
    assert substitute_bytes(shape, form) == nbytes


@pytest.mark.parametrize("form", FORMATS)
def test_more_weights_never_take_fewer_bytes(form: str) -> None:
    sizes = [1, 31, 63, 64, 65, 128, 577]
    by_rows = [substitute_bytes((rows, 96), form) for rows in sizes]
    by_cols = [substitute_bytes((96, cols), form) for cols in sizes]
    assert by_rows == sorted(by_rows)
    assert by_cols == sorted(by_cols)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="int5"):
        substitute_bytes((64, 64), "int5")


@pytest.mark.parametrize("form", FORMATS)
def test_heads_have_six_bits_or_what_layers_have(form: str) -> None:
    head = head_format(form)
    assert head in FORMATS
    assert BITS[head] >= 6
    assert head == (form if BITS[form] >= 6 else "int6")
    assert head_format(head) == head
    shape = (49152, 576)
    assert substitute_bytes(shape, head) >= substitute_bytes(shape, form)


def test_the_planner_needs_no_torch() -> None:
    code = "import sys, stages.formats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
