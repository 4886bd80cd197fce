"""The compiled outlook says what torch's log_softmax, topk and entropy say."""

from __future__ import annotations

import math

import pytest
import torch

from stages import outlook
from stages.compiled import COMPILED, compiled_part
from stages.outlook import of_log_probs, of_scores


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 320, 4097, 49152])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("spread", [0.01, 4.0, 60.0])
def test_it_is_torchs(vocab: int, temperature: float, spread: float) -> None:
    made = torch.Generator().manual_seed(vocab)
    scores = torch.randn(3, vocab, generator=made) * spread + 5
    if vocab > 31:
        scores[1, 10:20] = -math.inf
        scores[2, 8:] = -math.inf
    log_probs = torch.log_softmax(scores.double() / temperature, dim=1)
    wanted, found = of_log_probs(log_probs, 8), of_scores(scores, temperature, 8)
    assert found.entropy == pytest.approx(wanted.entropy, rel=1e-4, abs=1e-5)
    for row in range(3):
        ours, theirs = found.likeliest[row], wanted.likeliest[row]
        assert [t for _, t in ours] == [t for _, t in theirs]
        assert [v for v, _ in ours] == pytest.approx([v for v, _ in theirs], rel=1e-5, abs=1e-4)
        assert found.log_prob(row, 0) == pytest.approx(float(log_probs[row, 0]), abs=1e-3)


@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.1, 1.3])
def test_nothing_is_more_than_certain(temperature: float) -> None:
    """Or a child would score above its parent, and be sent without it."""
    scores = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    scores[torch.arange(200), torch.arange(200) % 64] += torch.linspace(20, 300, 200)
    found = of_scores(scores, temperature, 8)
    for row, likeliest in enumerate(found.likeliest):
        assert likeliest[0][0] <= 0.0
        assert found.log_prob(row, likeliest[0][1]) <= 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_no_numbers_have_no_children(bad: float) -> None:
    scores = torch.randn(2, 100)
    scores[0] = bad
    found = of_scores(scores, 0.6, 8)
    assert found.likeliest[0] == []
    assert math.isnan(found.entropy[0])
    assert len(found.likeliest[1]) == 8


def test_the_lowest_of_equals_comes_first() -> None:
    scores = torch.zeros(1, 40)
    scores[0, 17:21] = 1.0
    if COMPILED is not None:
        assert [t for _, t in of_scores(scores, 1.0, 6).likeliest[0]] == [17, 18, 19, 20, 0, 1]


def test_without_the_compiled_part_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(2, 500)
    ours = of_scores(scores, 0.6, 8)
    monkeypatch.setattr(outlook, "COMPILED", None)
    theirs = of_scores(scores, 0.6, 8)
    assert [[t for _, t in row] for row in ours.likeliest] == [
        [t for _, t in row] for row in theirs.likeliest
    ]
    assert ours.log_prob(1, 7) == pytest.approx(theirs.log_prob(1, 7), abs=1e-5)


@pytest.mark.skipif(COMPILED is None, reason="the compiled part is not there")
def test_the_module_refuses_what_is_no_number() -> None:
    for arguments in ((), (1, 2, 3), (1, 1, 5, 1.0, 6, 1, 1, 1), (1, 1, 5, "", 1, 1, 1, 1)):
        with pytest.raises((TypeError, ValueError)):
            compiled_part.outlook(*arguments)
