"""Rates of products on this machine; here with matrices so small that it takes no time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from stages import product_rates
from stages.compiled import COMPILED, compiled_part
from stages.formats import FORMATS
from stages.product_rates import measure_products
from stages.progress import SilentProgress


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rates, "SHAPE", (128, 64))
    monkeypatch.setattr(product_rates, "_EMPTIED", 1 << 12)
    monkeypatch.setattr(product_rates, "_REPEATS", 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_rate_is_a_positive_number(dtype: str) -> None:
    rates = measure_products(dtype, FORMATS, SilentProgress())
    assert list(rates.low_gbps) == list(FORMATS)
    for rate in (rates.full_gbps, rates.gflops, *rates.low_gbps.values()):
        assert 0 < rate < math.inf


def test_only_the_formats_asked_for_are_measured() -> None:
    assert [*measure_products("float32", ["int2"], SilentProgress()).low_gbps] == ["int2"]
    assert measure_products("float32", [], SilentProgress()).low_gbps == {}


def test_rates_are_bytes_and_operations_by_the_usual_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock on which a product takes 4 s, then 1 s, then 2 s."""
    monkeypatch.setattr(product_rates, "_REPEATS", 3)
    ticks = iter([0.0, 4.0, 10.0, 11.0, 20.0, 22.0] * 3)
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(product_rates, "time", clock)  # and nobody else's
    rates = measure_products("float32", ["int8"], SilentProgress())
    assert rates.full_gbps == pytest.approx(128 * 64 * 4 / 2.0 / 1e9)
    assert rates.gflops == pytest.approx(2 * 64 * 128 * 64 / 2.0 / 1e9)
    assert rates.low_gbps["int8"] == pytest.approx((128 * 64 + 128 * 2) / 2.0 / 1e9)


class Threads:
    """Progress that notes how many threads torch has, and may end the work."""

    def __init__(self, last: int = 1000) -> None:
        self.seen: list[int] = []
        self.sizes: set[int] = set()
        self._last = last

    def step(self, what: str, done: int, total: int) -> None:
        self.sizes.add(total)
        if len(self.seen) == self._last:
            raise InterruptedError
        self.seen.append(torch.get_num_threads())


@pytest.mark.parametrize("last", [0, 1, 1000])
def test_threads_are_as_before_however_it_ends(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full weights are multiplied by one, substitutes by all, as in sweeps and draft steps."""
    width: list[int] = []

    def noted(_: torch.Tensor | None) -> None:
        width.append(torch.get_num_threads())

    monkeypatch.setattr(product_rates, "_forgetting", lambda: noted)
    torch.set_num_threads(3)
    told = Threads(last)
    try:
        measure_products("float32", ["int8"], told)
    except InterruptedError:
        assert last < 1000
    assert torch.get_num_threads() == 3
    assert told.seen == [1, 3][:last]
    assert width == [1, 1, 1, 1, 3, 3][: {0: 0, 1: 4}.get(last)]


@pytest.mark.skipif(COMPILED is None, reason="without the compiled part caches are only filled")
@pytest.mark.parametrize(("offset", "size"), [(0, 4096), (1, 1), (63, 130), (5, 0)])
def test_what_leaves_the_caches_stays_as_it_is(offset: int, size: int) -> None:
    data = torch.arange(8192, dtype=torch.uint8)
    compiled_part.evict(data.data_ptr() + offset, size)
    assert torch.equal(data, torch.arange(8192, dtype=torch.uint8))
    with pytest.raises(TypeError, match="an address and a size"):
        compiled_part.evict(data.data_ptr())


def test_without_the_compiled_part_caches_are_filled_with_what_has_pages_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product_rates, "COMPILED", None)
    sums: list[float] = []
    summed = torch.Tensor.sum

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        sums.append(float(summed(tensor)))
        return summed(tensor)

    monkeypatch.setattr(torch.Tensor, "sum", noted)
    product_rates._forgetting()(torch.zeros(1))
    assert sums == [(1 << 12) / 4]


def test_the_work_can_be_ended_before_each_format_and_has_no_size_in_bytes() -> None:
    told = Threads()
    measure_products("float32", ["int8", "int4"], told)
    assert len(told.seen) == 3
    assert told.sizes == {0}, "where there are no bars, sizes are told in MiB"
