"""The public names: what a program may import, and that nothing comes or goes unnoticed."""

from __future__ import annotations

import re
from pathlib import Path

import paceline
from pipeline.options import NAMES

PUBLIC = """
Answer BudgetError BusyError ContextLengthError Delta DeviceMemoryError DiskFullError Engine
EngineClosedError EngineError LinkError ModelFormatError ModelNotFoundError OptionError
PacelineError RequestOptions Timings TokenLogprob TokenStream UnsupportedModelError Usage
UsageError generate
"""


def test_the_public_names() -> None:
    assert sorted(paceline.__all__) == PUBLIC.split()
    assert all(hasattr(paceline, name) for name in PUBLIC.split())


def test_every_option_is_explained() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "sampling.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(NAMES)
