"""The noise is keyed, so every test here is of a fixed function: a chi-square either holds or not.

Bounds are the 0.999 quantiles of their distributions.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages import noise as noises
from stages.noise import Noise, gumbel

CHI_SQUARE = {7: 24.32, 49: 85.35}
DRAWS = 3000
BIG = st.integers(0, 2**64 - 1)
LOGITS = torch.tensor([1.5, -0.3, 0.5, 0.0, 1.9, -0.4, 1.0, 1.8], dtype=torch.float64)


def chi_square(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.min() >= 5, "too few draws for a chi-square"
    return float(((found - expected) ** 2 / expected).sum())


def choices(
    keys: Iterable[tuple[int, int]], logits: torch.Tensor, temperature: float
) -> torch.Tensor:
    noise = torch.stack([gumbel(seed, position, 0, len(logits)) for seed, position in keys])
    return (logits / temperature + noise).argmax(dim=1)


@given(BIG, st.integers(0, 2**32), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_noise_is_the_same_whatever_range_is_asked_for(
    seed: int, position: int, start: int, count: int, after: int
) -> None:
    whole = gumbel(seed, position, 0, start + count + after)
    assert torch.equal(gumbel(seed, position, start, start + count), whole[start : start + count])


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**70))
def test_noise_is_finite_float32_for_any_seed_and_position(seed: int, position: int) -> None:
    noise = gumbel(seed, position, 49_000, 49_152)
    assert noise.dtype is torch.float32
    assert noise.shape == (152,)
    assert noise.isfinite().all()
    assert torch.equal(noise, gumbel(seed % 2**64, position % 2**64, 49_000, 49_152))  # wraps


@pytest.mark.parametrize(
    "bits",
    [
        0,
        pytest.param(-1),
    ],
)
def test_both_ends_of_the_counter_give_finite_noise(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noises, "_mix", lambda x: torch.full_like(x, bits))
    assert gumbel(0, 0, 0, 3).isfinite().all()


def test_noise_takes_nothing_from_the_shared_generators() -> None:
    before, python = torch.get_rng_state(), random.getstate()
    first = gumbel(3, 4, 0, 10)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python
    torch.manual_seed(123)
    assert torch.equal(gumbel(3, 4, 0, 10), first)


def test_noise_follows_the_gumbel_distribution() -> None:
    """Kolmogorov and Smirnov's test over the tokens of one position."""
    uniform = torch.exp(-torch.exp(-gumbel(0, 17, 0, 20_000).double())).sort().values
    steps = torch.arange(1, 20_001) / 20_000
    assert (uniform - steps).abs().max() < 1.95 / 20_000**0.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_over_positions_follows_the_softmax(temperature: float) -> None:
    tokens = choices(((11, position) for position in range(DRAWS)), LOGITS, temperature)
    expected = torch.softmax(LOGITS / temperature, dim=0) * DRAWS
    found = torch.bincount(tokens, minlength=len(expected)).double()
    assert chi_square(found, expected) < CHI_SQUARE[7]


def test_sampling_over_seeds_follows_the_softmax() -> None:
    tokens = choices(((seed, 5) for seed in range(DRAWS)), LOGITS, 1.0)
    expected = torch.softmax(LOGITS, dim=0) * DRAWS
    assert chi_square(torch.bincount(tokens, minlength=8).double(), expected) < CHI_SQUARE[7]


@pytest.mark.parametrize(
    ("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (1, -1), (2**32, 0), (0, 256)]
)
def test_neighbors_do_not_tell_of_each_other(seed_step: int, position_step: int) -> None:
    """Joint choices of two keys, over eight tokens alike: 64 cells, 49 degrees of freedom."""
    flat = torch.zeros(8, dtype=torch.float64)
    keys = [(seed, 300 + position) for seed in range(20) for position in range(100)]
    others = [(seed + seed_step, position + position_step) for seed, position in keys]
    first, second = choices(keys, flat, 1.0), choices(others, flat, 1.0)
    table = torch.bincount(first * 8 + second, minlength=64).view(8, 8).double()
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / len(keys)
    assert chi_square(table, expected) < CHI_SQUARE[49]


def test_no_two_keys_near_zero_share_their_noise() -> None:
    rows = [gumbel(seed, position, 0, 8) for seed in range(40) for position in range(40)]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


def test_seeds_do_not_cancel_out_positions() -> None:
    """Where seed and position enter alike, some pairs meet at one key."""
    golden = 0x9E3779B97F4A7C15
    rows = [gumbel((position - 1) * golden + 1, position, 0, 8) for position in range(4)]
    assert len({tuple(row.tolist()) for row in rows}) == 4


@pytest.mark.parametrize("vocab", [1, 8, 8192, 8193, 20_000])
def test_a_row_is_the_noise_of_the_whole_vocabulary(vocab: int) -> None:
    """Whatever blocks it is made in, bit for bit."""
    assert torch.equal(Noise().row(3, 5, vocab), gumbel(3, 5, 0, vocab))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=12), st.integers(1, 3))
def test_kept_noise_is_the_noise(wanted: list[tuple[int, int]], kept: int) -> None:
    noise = Noise(positions=kept)
    for seed, position in wanted:
        assert torch.equal(noise.row(seed, position, 7), gumbel(seed, position, 0, 7))
        assert len(noise._rows) <= kept


def test_a_row_is_made_once_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(seed: int, position: int, start: int, stop: int) -> torch.Tensor:
        made.append(position)
        return gumbel(seed, position, start, stop)

    monkeypatch.setattr(noises, "gumbel", counted)
    noise = Noise(positions=2)
    for position in (1, 2, 1, 2, 3, 2, 1):
        noise.row(0, position, 5)
    assert made == [1, 2, 3, 1]  # 1 made room for 3: it was used least recently


def test_threads_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def slow(seed: int, position: int, start: int, stop: int) -> torch.Tensor:
        made.append(position)
        return gumbel(seed, position, start, stop)

    monkeypatch.setattr(noises, "gumbel", slow)
    noise = Noise(positions=8)
    begin = threading.Barrier(4)

    def ask(_: int) -> list[torch.Tensor]:
        begin.wait()
        return [noise.row(9, position, 3000) for position in range(8)]

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(ask, range(4))
    assert sorted(made) == list(range(8))
    assert all(a is b for rows in others for a, b in zip(first, rows, strict=True))
