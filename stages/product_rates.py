"""What products cost on this machine: rates at which weights are multiplied, by format."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch.nn import functional

from stages.compiled import COMPILED, compiled_part
from stages.progress import Progress
from stages.substitutes import quantize

FEW_ROWS, MANY_ROWS = 4, 64
"""Of a draft step; of a prompt's pack."""
SHAPE = (2048, 1024)
_REPEATS = 25
_EMPTIED = 96 << 20
"""Bytes that are read to empty caches, where the compiled part cannot do better."""
_BLOCK_ROWS = 512


class ProductRates(msgspec.Struct, frozen=True):
    """Rates of weights that come from memory, as in a step that reads a whole model's.

    full_gbps: GB/s of full-precision weights, few rows, one thread; gflops: billion floating-point
    operations a second, many rows, one thread; low_gbps: GB/s of substitutes, few rows, by format,
    with every thread that torch has, since mostly nothing else is computed while drafts are made.
    """

    full_gbps: float
    gflops: float
    low_gbps: dict[str, float]


def measure_products(name: str, forms: Sequence[str], progress: Progress) -> ProductRates:
    """In some tenths of a second for each format. `name`: full precision, as "float32"."""
    (rows, cols), dtype = SHAPE, getattr(torch, name)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, cols, generator=generator)
    few, many = (
        torch.randn(count, cols, generator=generator).to(dtype) for count in (FEW_ROWS, MANY_ROWS)
    )
    forget = _forgetting()
    threads = torch.get_num_threads()
    try:
        with torch.no_grad():
            torch.set_num_threads(1)
            progress.step("measuring products", 0, 0)
            whole = weight.to(dtype)

            def full(x: torch.Tensor) -> torch.Tensor:
                return functional.linear(x, whole)

            full_gbps = whole.nbytes / _seconds(lambda: full(few), lambda: forget(whole)) / 1e9
            seconds = _seconds(lambda: full(many), lambda: forget(whole))
            gflops = 2 * MANY_ROWS * weight.numel() / seconds / 1e9
            torch.set_num_threads(threads)
            low_gbps = {}
            for form in forms:
                progress.step("measuring products", 0, 0)
                low_gbps[form] = _low_gbps(weight, form, few, forget)
    finally:
        torch.set_num_threads(threads)
    return ProductRates(full_gbps, gflops, low_gbps)


def _low_gbps(
    weight: torch.Tensor, form: str, x: torch.Tensor, forget: Callable[[torch.Tensor | None], None]
) -> float:
    substitute = quantize(weight.split(_BLOCK_ROWS), SHAPE, form)
    packed = None if substitute.compiled is None else substitute.compiled.data
    return substitute.nbytes / _seconds(lambda: substitute.matmul(x), lambda: forget(packed)) / 1e9


def _seconds(product: Callable[[], object], forget: Callable[[], None]) -> float:
    """The median: what a machine shares with others slows it down in earnest too."""
    product()
    found = []
    for _ in range(_REPEATS):
        forget()
        began = time.perf_counter()
        product()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _forgetting() -> Callable[[torch.Tensor | None], None]:
    """What makes weights leave the caches; those that it is not told it can only push out."""
    filling: list[torch.Tensor] = []

    def forget(weights: torch.Tensor | None) -> None:
        if weights is not None and COMPILED is not None:
            compiled_part.evict(weights.data_ptr(), weights.nbytes)
            return
        if not filling:  # not with zeros: those can all be one page, until they are written
            filling.append(torch.ones(_EMPTIED // 4))
        filling[0].sum()

    return forget
