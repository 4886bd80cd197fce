"""What torch and bitsandbytes tell of the machine."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from stages import nf4
from stages.hardware import check_nf4, inspect_hardware, measure_memory


def test_a_machine_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hardware = inspect_hardware()
    assert hardware.accelerator is None
    assert hardware.cores >= 1
    assert hardware.torch_version == torch.__version__


def test_an_accelerator_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(name="Made 9000", total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: made)
    assert inspect_hardware().accelerator == "Made 9000, 24576 MiB"


def test_memory_is_measured() -> None:
    assert 0.01 < measure_memory(1 << 20, 3) < 10_000


def test_nf4_is_tried() -> None:
    assert check_nf4() == importlib.metadata.version("bitsandbytes")


def test_nf4_that_gives_nonsense_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4.Nf4, "dequantize", lambda self: torch.full((64, 64), torch.nan))
    with pytest.raises(ValueError, match="came back"):
        check_nf4()
