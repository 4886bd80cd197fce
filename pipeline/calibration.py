"""How fast this machine computes, measured once a day and kept in the cache, for the planner."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.predictions import Compute
from pipeline.whole_file import write_whole
from routing.errors import OptionError
from stages.cache import cache_dir
from stages.compiled import COMPILED
from stages.product_rates import measure_products
from stages.progress import Progress
from stages.shapes import ModelShape

LEAST_WEIGHTS = 20_000_000
"""A smaller model has answered before anything is measured: it is planned with usual figures."""
COMPILED_LAYER_S = 4e-5
"""A draft layer besides its products, where the compiled part runs it (some hundred rows of KV)."""
DRAFT_S = 1.3e-3
"""A draft step besides its layers, with a vocabulary of 49,000; of a small model it is far less."""
KEPT_S = 24 * 3600
"""Seconds that figures are kept: the machine may have been busy when they were measured."""
_VERSION = 3


def calibrated(shape: ModelShape, dtype: str, forms: Sequence[str], progress: Progress) -> Compute:
    """Rates for a model of this shape that computes in `dtype` ("torch.float32" and so on).

    Measured at a machine's first call of a day, in some seconds; at every call where there can be
    no cache directory.
    """
    if sum(m.elements for m in (*shape.matrices(), shape.head)) < LEAST_WEIGHTS:
        return Compute()
    try:
        path = cache_dir() / "calibrations" / f"{_key(dtype, forms)}.json"
    except OptionError:  # told of where a model needs the cache: this one may need none
        return _measured(dtype, forms, progress)
    found = _read(path, forms)
    if found is None:
        found = _measured(dtype, forms, progress)
        _write(path, found)
    return found


def _measured(dtype: str, forms: Sequence[str], progress: Progress) -> Compute:
    rates = measure_products(dtype.removeprefix("torch."), forms, progress)
    usual = Compute()
    return Compute(
        memory_gbps=rates.full_gbps,
        gflops=rates.gflops,
        low_gbps=usual.low_gbps | rates.low_gbps,
        draft_layer_s=usual.draft_layer_s if COMPILED is None else COMPILED_LAYER_S,
        draft_s=DRAFT_S,
        measured=True,
    )


def _key(dtype: str, forms: Sequence[str]) -> str:
    """Of this machine, as far as it bears on products, and of what is measured."""
    from importlib.metadata import version

    parts = (
        _VERSION,
        platform.node(),
        platform.machine(),
        os.cpu_count(),
        version("torch"),
        COMPILED,
        dtype,
        *forms,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _read(path: Path, forms: Sequence[str]) -> Compute | None:
    """None too for a file that is old, damaged or another version's."""
    try:
        if not 0 <= time.time() - path.stat().st_mtime < KEPT_S:
            return None
        found = msgspec.json.decode(path.read_bytes(), type=Compute)
    except (OSError, msgspec.MsgspecError):
        return None
    # A field that is missing has its usual value.
    rates = (found.memory_gbps, found.gflops, *(found.low_gbps.get(form, 0.0) for form in forms))
    return found if found.measured and min(rates) > 0 else None


def _write(path: Path, found: Compute) -> None:
    """Wholly or not at all. A disk that is full costs a measurement the next time, no more."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(found))
