"""Paceline: language models larger than the memory they are given, losslessly.

The public names, nothing else.
"""

from __future__ import annotations

from pipeline.answers import Answer, Delta, Timings, Usage
from pipeline.engine import Engine, generate
from pipeline.options import RequestOptions
from pipeline.stream import TokenStream
from routing.errors import (
    BudgetError,
    BusyError,
    ContextLengthError,
    DeviceMemoryError,
    DiskFullError,
    EngineClosedError,
    EngineError,
    LinkError,
    ModelFormatError,
    ModelNotFoundError,
    OptionError,
    PacelineError,
    UnsupportedModelError,
    UsageError,
)
from routing.messages import TokenLogprob

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "BudgetError",
    "BusyError",
    "ContextLengthError",
    "Delta",
    "DeviceMemoryError",
    "DiskFullError",
    "Engine",
    "EngineClosedError",
    "EngineError",
    "LinkError",
    "ModelFormatError",
    "ModelNotFoundError",
    "OptionError",
    "PacelineError",
    "RequestOptions",
    "Timings",
    "TokenLogprob",
    "TokenStream",
    "UnsupportedModelError",
    "Usage",
    "UsageError",
    "generate",
]
