"""Scores against transformers' own processors, run on one row at a time, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.messages import Sampling
from stages.noise import Noise, gumbel
from stages.sampling import Scorer, best
from tests.processors import processors, samplings, truncation
from tests.stages.made_stages import normal

VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)
OPTIONS = samplings(VOCAB)


def made_rows(rows: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (4 * normal(rows, VOCAB, seed=seed)).to(dtype)


def expected(
    logits: torch.Tensor, sampling: Sampling, prompt: int, history: Sequence[int]
) -> torch.Tensor:
    """Of one row (vocab,), by the reference."""
    ids = torch.tensor([history], dtype=torch.int64)
    scores: torch.Tensor = processors(sampling, prompt)(ids, logits[None].clone())
    return scores[0]


@settings(max_examples=80)
@given(
    OPTIONS,
    st.lists(st.lists(TOKENS, min_size=3, max_size=12), min_size=1, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_scores_are_those_of_transformers_processors(
    sampling: Sampling, histories: list[list[int]], seed: int, dtype: torch.dtype
) -> None:
    """Several rows with histories of unequal length, and each of them alone: the same bits."""
    logits = made_rows(len(histories), seed, dtype)
    before = logits.clone()
    positions = [len(history) for history in histories]
    scorer = Scorer(sampling, 2, Noise(), VOCAB)
    found = scorer.scores(logits, histories, positions)
    assert torch.equal(logits, before), "the logits are the caller's"
    assert found.dtype is dtype
    for row, history in enumerate(histories):
        alone = scorer.scores(logits[row : row + 1], [history], [positions[row]])[0]
        assert torch.equal(found[row], alone)
        reference = expected(logits[row], sampling, 2, history)
        assert torch.equal(found[row].isneginf(), reference.isneginf())
        kept = ~reference.isneginf()
        # A zero is the same with either sign; presence and frequency are rounded alike.
        assert torch.equal(found[row][kept], reference[kept])
        assert best(found[row]) == (int(reference.argmax()) if kept.any() else None)


ONE_BY_ONE = [
    Sampling(0.7, 3),
    Sampling(1.0, 3, top_k=5),
    Sampling(1.0, 3, top_p=0.6),
    Sampling(1.0, 3, min_p=0.1),
    Sampling(2.0, 3, typical_p=0.5),
    Sampling(0.0, 3, repetition_penalty=1.7),
    Sampling(0.0, 3, presence_penalty=1.5),
    Sampling(0.0, 3, frequency_penalty=0.8),
    Sampling(0.0, 3, logit_bias=((4, 30.0),)),
    Sampling(0.0, 3, banned=tuple(range(0, VOCAB, 2))),
    Sampling(0.0, 3, allowed=(5, 6, 7)),
]


@pytest.mark.parametrize("sampling", ONE_BY_ONE, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_processed_in_float32(sampling: Sampling, dtype: torch.dtype) -> None:
    logits = made_rows(3, 1, dtype)
    history = list(range(12))
    found = Scorer(sampling, 2, Noise(), VOCAB).scores(logits, [history] * 3, [12] * 3)
    wide = Scorer(sampling, 2, Noise(), VOCAB).scores(logits.float(), [history] * 3, [12] * 3)
    assert found.dtype is torch.float32
    assert torch.equal(found, wide)


@pytest.mark.parametrize("sampling", ONE_BY_ONE, ids=str)
def test_every_option_changes_something(sampling: Sampling) -> None:
    """Or a test that compares two ways of applying it would see nothing."""
    logits = made_rows(200, 2)
    plain = Sampling(1.0 if sampling.temperature else 0.0, sampling.seed)
    history = [0, 1, *range(0, VOCAB, 2), *range(0, VOCAB, 4)]
    asked = ([history] * 200, list(range(200)))
    one, other = (Scorer(s, 2, Noise(), VOCAB).scores(logits, *asked) for s in (sampling, plain))
    assert not torch.equal(one, other)
    if sampling.top_k != 5:  # the five best are nearly always where a sample falls
        assert one.argmax(1).tolist() != other.argmax(1).tolist()


def test_histories_are_not_read_where_nothing_looks_back() -> None:
    logits = made_rows(2, 3)
    scorer = Scorer(Sampling(1.0, 5, top_p=0.5, banned=(3,)), 0, Noise(), VOCAB)
    assert scorer.scores(logits, (), (7, 8)).shape == logits.shape


def test_greedy_scores_are_the_logits() -> None:
    logits = made_rows(2, 4)
    found = Scorer(Sampling(0.0, seed=3), 0, Noise(), VOCAB).scores(logits, (), (1, 2))
    assert torch.equal(found, logits)


def test_the_prompt_counts_for_repetition_only() -> None:
    logits = torch.full((1, VOCAB), 2.0)
    history = [1, 1, 2, 3, 3]  # two of them the prompt's

    def scores(**options: float) -> list[float]:
        scorer = Scorer(Sampling(**options), 2, Noise(), VOCAB)  # type: ignore[arg-type]
        return scorer.scores(logits, [history], [5])[0, :5].tolist()

    assert scores(repetition_penalty=2.0) == [2.0, 1.0, 1.0, 1.0, 2.0]
    assert scores(presence_penalty=0.5) == [2.0, 2.0, 1.5, 1.5, 2.0]
    assert scores(frequency_penalty=0.5) == [2.0, 2.0, 1.5, 1.0, 2.0]


def test_no_token_left_is_no_choice() -> None:
    scorer = Scorer(Sampling(1.0, 1, allowed=(1, 2), banned=(2, 1)), 0, Noise(), VOCAB)
    assert best(scorer.scores(made_rows(1, 5), (), (3,))[0]) is None


def test_no_number_is_no_choice() -> None:
    row = made_rows(1, 6)[0]
    row[7] = torch.nan
    assert best(row) is None
    row[7] = torch.inf
    assert best(row) is None
    row[7] = -torch.inf
    assert best(row) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 16, 100, 5000, 49152])
def test_of_equal_scores_the_lowest_token_wins(dtype: torch.dtype, size: int) -> None:
    for first in {0, size // 3, size - 1}:
        row = torch.zeros(size, dtype=dtype)
        row[first:] = 1.0
        assert best(row) == first
        row[:] = -torch.inf
        row[first::7] = -3.0
        assert best(row) == first


def test_drafter_and_verifier_choose_alike() -> None:
    """float32 for the one and float64 for the other."""
    logits = made_rows(200, 7)
    scorer = Scorer(Sampling(1.0, 5, top_p=0.9), 0, Noise(), VOCAB)
    positions = range(200)
    exact = scorer.scores(logits, (), positions).argmax(1)
    rough = scorer.scores(logits.float(), (), positions).argmax(1)
    assert torch.equal(exact, rough)


@given(OPTIONS, st.integers(0, 10_000))
def test_a_shortlist_of_everything_changes_nothing(sampling: Sampling, seed: int) -> None:
    logits, history = made_rows(1, seed), [list(range(8))]
    whole = Scorer(sampling, 2, Noise(), VOCAB)
    short = Scorer(sampling, 2, Noise(), VOCAB, shortlist=VOCAB)
    found = [scorer.scores(logits, history, [8]) for scorer in (whole, short)]
    assert torch.equal(*found)


def test_a_shortlist_chooses_alike_where_rows_are_peaked() -> None:
    """As drafts do: the truncation of the likeliest ten is nearly that of all forty."""
    logits = made_rows(200, 8)
    sampling = Sampling(0.7, 2, top_p=0.9, min_p=0.01)
    found = [
        Scorer(sampling, 0, Noise(), VOCAB, shortlist=size).scores(logits, (), range(200))
        for size in (None, 10)
    ]
    same = (found[0].argmax(1) == found[1].argmax(1)).double().mean()
    assert same > 0.95
    assert (found[1].isfinite().sum(1) <= 10).all()


def test_what_truncation_leaves_is_what_transformers_leaves() -> None:
    logits = made_rows(50, 9)
    for sampling in ONE_BY_ONE[1:5]:
        kept = Scorer(sampling, 0, Noise(), VOCAB).scores(logits, (), range(50)).isfinite()
        theirs = torch.cat([truncation(sampling)(None, row[None]) for row in logits])
        assert torch.equal(kept, theirs.isfinite())
        assert not kept.all() and kept.any(1).all()


def test_noise_is_that_of_the_position() -> None:
    flat = torch.zeros(3, VOCAB, dtype=torch.float64)
    found = Scorer(Sampling(1.0, 11), 0, Noise(), VOCAB).scores(flat, (), (4, 9, 4))
    for row, position in zip(found, (4, 9, 4), strict=True):
        assert torch.equal(row, gumbel(11, position, 0, VOCAB).double())
    other = msgspec.structs.replace(Sampling(1.0), seed=12)
    assert not torch.equal(found, Scorer(other, 0, Noise(), VOCAB).scores(flat, (), (4, 9, 4)))
