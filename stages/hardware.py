"""What torch and bitsandbytes can tell of this machine."""

from __future__ import annotations

import importlib.metadata
import time

import msgspec
import torch

from stages.device import available_cores
from stages.formats import GROUP


class Hardware(msgspec.Struct, frozen=True):
    """`accelerator` is its name, None where there is none."""

    cores: int
    cpu_capability: str
    torch_version: str
    accelerator: str | None


def inspect_hardware() -> Hardware:
    """Look, without touching an accelerator's memory."""
    accelerator = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        accelerator = f"{properties.name}, {properties.total_memory >> 20} MiB"
    capability = torch.backends.cpu.get_cpu_capability()
    return Hardware(available_cores(), capability, torch.__version__, accelerator)


def measure_memory(nbytes: int = 64 << 20, repeats: int = 5) -> float:
    """GB/s at which one thread copies memory: bytes copied, not bytes touched. The median."""
    source = torch.ones(nbytes, dtype=torch.uint8).numpy()
    target = torch.zeros(nbytes, dtype=torch.uint8).numpy()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began)
    return nbytes / sorted(times)[repeats // 2] / 1e9


def check_nf4() -> str:
    """bitsandbytes' version, once it has quantized something.

    Raises ImportError when it is not installed, and whatever it raises when it does not work.
    """
    version = importlib.metadata.version("bitsandbytes")

    from stages.nf4 import Nf4

    weight = torch.linspace(-1, 1, GROUP * GROUP).reshape(GROUP, GROUP)
    error = (Nf4([weight], (GROUP, GROUP)).dequantize() - weight).abs().max()
    if not error < 0.5:
        raise ValueError(f"a matrix within 1 came back {error:.2g} off")
    return version
