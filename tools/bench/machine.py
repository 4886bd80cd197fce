"""The machine and the versions that figures were measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from statistics import median

import psutil
import torch

import paceline

PACKAGES = ("torch", "transformers", "accelerate", "llama-cpp-python")


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine(device: str | None, link_gbps: float | None) -> dict[str, object]:
    """The `machine` object of a result. Bandwidths in GB/s; null what was not measured."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "ram_bytes": psutil.virtual_memory().total,
        "device": device,
        "link_gbps": link_gbps,
        "memory_gbps": measure_copy(),
    }


def describe_versions() -> dict[str, str | None]:
    """The `versions` object of a result; null what is not installed."""
    found: dict[str, str | None] = {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def measure_copy(nbytes: int = 64 << 20, repeats: int = 5) -> float:
    """GB/s at which one thread copies memory, in bytes copied (as many again are read)."""
    source, target = bytearray(nbytes), bytearray(nbytes)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        memoryview(target)[:] = source
        times.append(time.perf_counter() - began)
    return nbytes / median(times) / 1e9


def measure_read(nbytes: int = 256 << 20, repeats: int = 5) -> float:
    """GB/s at which as many threads as torch uses now read memory, much more than caches hold."""
    # Ones, since pages that were never written are all the same one.
    source = torch.ones(nbytes // 4)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        source.sum()
        times.append(time.perf_counter() - began)
    return source.nbytes / median(times) / 1e9
