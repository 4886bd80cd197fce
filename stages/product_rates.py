"""What products cost on this machine: rates at which weights are multiplied, by format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch.nn import functional

from stages.progress import Progress
from stages.substitutes import quantize

FEW_ROWS, MANY_ROWS = 4, 64
"""Of a draft step; of a prompt's pack."""
SHAPE = (2048, 1024)
_REPEATS = 9
_EMPTIED = 96 << 20
"""Bytes that are read before each product, which then finds its weights in memory, as in a step
that reads a whole model's."""
_BLOCK_ROWS = 512


class ProductRates(msgspec.Struct, frozen=True):
    """Rates of one thread: the least time of several, as what else the machine does only adds.

    full_gbps: GB/s of full-precision weights, few rows; gflops: billion floating-point operations
    a second, many rows; low_gbps: GB/s of substitutes, few rows, by format.
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
    emptied = torch.zeros(_EMPTIED // 4)

    def seconds(product: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
        product(x)
        found = []
        for _ in range(_REPEATS):
            emptied.sum()
            began = time.perf_counter()
            product(x)
            found.append(time.perf_counter() - began)
        return min(found)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            progress.step("measuring products", 0, 0)
            whole = weight.to(dtype)

            def full(x: torch.Tensor) -> torch.Tensor:
                return functional.linear(x, whole)

            full_gbps = whole.nbytes / seconds(full, few) / 1e9
            gflops = 2 * MANY_ROWS * weight.numel() / seconds(full, many) / 1e9
            low_gbps = {}
            for form in forms:
                progress.step("measuring products", 0, 0)
                substitute = quantize(weight.split(_BLOCK_ROWS), SHAPE, form)
                low_gbps[form] = substitute.nbytes / seconds(substitute.matmul, few) / 1e9
    finally:
        torch.set_num_threads(threads)
    return ProductRates(full_gbps, gflops, low_gbps)
