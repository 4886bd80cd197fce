from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import head
from stages.architectures import ONE_ROPE, Architecture
from stages.device import CpuDevice
from stages.head import HeadScan, LogitRows, Whole
from tests.stages.made_stages import made_skeleton, normal

PLAIN = Architecture("llama", (None,), (ONE_ROPE,), tied=False)
SCALED = Architecture("granite", (None,), (ONE_ROPE,), tied=True, logits_divisor=2.5)
CAPPED = Architecture("gemma2", (None,), (ONE_ROPE,), tied=True, softcap=3.0)
HIDDEN = 6


def small(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Small whole numbers: their products are exact in any order, and often equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, size, generator=generator).to(dtype)


def scanned(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    cuts: Sequence[int],
    *,
    whole: Sequence[Whole] = (),
    architecture: Architecture = PLAIN,
) -> list[int | None]:
    scan = HeadScan(made_skeleton(architecture.finish), hidden, whole)
    edges = [0, *cuts, len(weight)]
    for start, stop in itertools.pairwise(edges):
        scan.see(start, weight[start:stop])
    return scan.chosen()


def first_best(scores: torch.Tensor) -> list[int | None]:
    """The lowest id among equals, by looking at one number after the other."""
    rows = scores.tolist()
    return [row.index(max(row)) for row in rows]


@st.composite
def cut_vocabularies(draw: Any) -> tuple[int, list[int]]:
    vocab = draw(st.integers(1, 40))
    return vocab, sorted(draw(st.sets(st.integers(1, vocab - 1)))) if vocab > 1 else []


@settings(max_examples=60)
@given(
    cut_vocabularies(),
    st.integers(1, 5),
    st.integers(0, 10_000),
    st.sampled_from([PLAIN, SCALED, CAPPED]),
    st.integers(1, 50),
)
def test_any_cut_gives_the_choice_of_the_whole(
    cut: tuple[int, list[int]], rows: int, seed: int, architecture: Architecture, block: int
) -> None:
    vocab, cuts = cut
    hidden, weight = small(rows, HIDDEN, seed=seed), small(vocab, HIDDEN, seed=seed + 1)
    expected = first_best(architecture.finish(hidden @ weight.T))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "BLOCK_ROWS", block)
        assert scanned(hidden, weight, cuts, architecture=architecture) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_go_to_the_lowest_token_wherever_the_cut_is(dtype: torch.dtype) -> None:
    weight = torch.zeros(9, HIDDEN, dtype=dtype)
    weight[[3, 4, 7]] = 1.0
    hidden = torch.ones(2, HIDDEN, dtype=dtype)
    for cut in range(1, 9):
        assert scanned(hidden, weight, [cut]) == [3, 3]
    assert scanned(hidden, weight, range(1, 9)) == [3, 3]


def test_all_scores_alike_choose_token_zero() -> None:
    assert scanned(torch.zeros(2, HIDDEN), torch.ones(9, HIDDEN), [4]) == [0, 0]


@settings(max_examples=40)
@given(
    cut_vocabularies(),
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from([PLAIN, SCALED, CAPPED]),
    st.integers(1, 50),
)
def test_whole_rows_are_the_logits_of_the_whole(
    cut: tuple[int, list[int]],
    crowd: list[tuple[int, bool]],
    seed: int,
    architecture: Architecture,
    block: int,
) -> None:
    """(rows, whether it needs them whole) of some riders; rows of padding behind them."""
    vocab, cuts = cut
    total = sum(rows for rows, _ in crowd)
    hidden, weight = small(total + 2, HIDDEN, seed=seed), small(vocab, HIDDEN, seed=seed + 1)
    logits = architecture.finish(hidden @ weight.T)
    buffer = torch.full((total, vocab), math.nan, dtype=torch.float64)
    whole: list[Whole] = []
    start = filled = 0
    for rows, wanted in crowd:
        if wanted:
            whole.append(Whole(start, start + rows, buffer[filled : filled + rows]))
            filled += rows
        start += rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "BLOCK_ROWS", block)
        tokens = scanned(hidden, weight, cuts, whole=whole, architecture=architecture)
    assert tokens == first_best(logits)
    for rows in whole:
        assert torch.equal(rows.logits, logits[rows.start : rows.stop])
    assert buffer[filled:].isnan().all()


def test_a_rows_logits_are_the_same_bits_whoever_else_is_whole() -> None:
    hidden, weight = normal(8, 96, seed=1), normal(301, 96, seed=2)
    found = []
    for stop in (3, 8):
        logits = torch.empty(stop, 301, dtype=torch.float64)
        scanned(hidden, weight, [100, 250], whole=[Whole(0, stop, logits)])
        found.append(logits[:3])
    assert torch.equal(*found)


@pytest.mark.parametrize("where", [0, 4, 11])
@pytest.mark.parametrize("cuts", [[], [4], [1, 5, 11]])
def test_scores_that_are_no_numbers_choose_nothing(where: int, cuts: list[int]) -> None:
    hidden, weight = small(4, HIDDEN, seed=1), small(12, HIDDEN, seed=2)
    sound = scanned(hidden, weight, cuts)
    assert None not in sound
    broken = weight.clone()
    broken[where, 0] = math.nan
    assert scanned(hidden, broken, cuts) == [None] * 4
    hidden[2, 1] = math.nan  # one row's states: the others are not concerned
    assert scanned(hidden, weight, cuts) == [*sound[:2], None, sound[3]]


def test_infinite_scores_choose_nothing() -> None:
    weight = torch.zeros(6, 1)
    weight[3] = math.inf
    assert scanned(torch.ones(1, 1), weight, [2]) == [None]
    weight[:] = -math.inf
    assert scanned(torch.ones(1, 1), weight, [2]) == [None]
    weight[4] = -1e30  # a number after all
    assert scanned(torch.ones(1, 1), weight, [2]) == [4]


def test_no_more_than_a_block_of_logits_exists_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "BLOCK_ROWS", 8)
    widths: list[int] = []

    def finish(logits: torch.Tensor) -> torch.Tensor:
        widths.append(logits.shape[1])
        return logits

    hidden, weight = normal(3, HIDDEN, seed=1), normal(30, HIDDEN, seed=2)
    scan = HeadScan(made_skeleton(finish), hidden)
    scan.see(0, weight[:20])
    scan.see(20, weight[20:])
    assert widths == [8, 8, 4, 8, 2]
    assert scan.chosen() == (hidden @ weight.T).argmax(dim=1).tolist()


def test_whole_rows_are_accounted_for_and_given_back() -> None:
    device = CpuDevice()
    rows = LogitRows(device, sessions=2, each=3, vocab=1024, dtype=torch.float32)
    assert device.memory.by_name == {"logit rows": 6 * 1024 * 4}
    assert (rows.each, rows.rows) == (3, 6)
    rows.view(0, 2)[:] = 1.0
    assert rows.view(1, 3).sum(dim=1).tolist() == [1024.0, 0.0]
    with pytest.raises(AssertionError, match="logit rows"):
        rows.view(5, 7)
    rows.close()
    assert device.memory.held == 0
    device.close()
