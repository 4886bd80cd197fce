"""Log-probabilities are those of teacher forcing: one forward of transformers over the whole text.

Accepted tokens included, for which an engine has no forward of their own.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from routing.messages import Sampling, TokenLogprob
from tests import made
from tests.pipeline.made_engine import made_engine
from tests.pipeline.made_requests import Told, ask, told

IDS = made.make_prompt(320, 11, seed=41)
TOKENS = 24
SAMPLINGS = [
    Sampling(0.0),
    Sampling(1.0, 5),
    Sampling(0.7, 6, top_k=20, repetition_penalty=1.4),
    Sampling(0.0, banned=tuple(range(0, 320, 2)), frequency_penalty=1.0),
]
KINDS: list[dict[str, Any]] = [
    {"substitute": "int8", "whole": True},
    {"substitute": "int4", "width": 2, "depth": 5, "whole": True},
    {"substitute": "none"},
]


@pytest.fixture(scope="module", params=["llama", "gemma2", "granite"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / request.param
    return made.make_model(directory, request.param)


async def answers(model: Path, count: int | None, **kind: Any) -> list[Told]:
    async with made_engine(model, **kind) as engine:
        asked = [ask(engine, IDS, s, TOKENS, logprobs=count) for s in SAMPLINGS]
        return [await told(session) for session in asked]


def check(model: Path, answer: Told, count: int) -> None:
    """Every entry against transformers, to 1e-9."""
    assert len(answer.logprobs) == len(answer.tokens) == TOKENS
    logits = made.reference_logits(model, [*IDS, *answer.tokens])[len(IDS) - 1 : -1]
    expected = torch.log_softmax(logits, dim=1)
    for row, token, entry in zip(expected, answer.tokens, answer.logprobs, strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-9)
        assert entry.logprob < 0.0, "a probability of exactly one is a place that was not filled"
        best = torch.topk(row, count)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["substitute"])
async def test_logprobs_equal_teacher_forcing(model: Path, kind: dict[str, Any]) -> None:
    found = await answers(model, 4, **kind)
    for answer in found:
        check(model, answer, 4)
    if kind["substitute"] != "none":
        assert sum(answer.session.accepted for answer in found) > TOKENS


async def test_logprobs_change_no_token_and_come_only_where_asked_for(model: Path) -> None:
    without = await answers(model, None, **KINDS[0])
    assert all(answer.logprobs == [] for answer in without)
    only_chosen = await answers(model, 0, **KINDS[0])
    assert all(entry.top == () for answer in only_chosen for entry in answer.logprobs)
    assert [answer.tokens for answer in without] == [answer.tokens for answer in only_chosen]


async def test_trees_do_not_move_a_score(model: Path) -> None:
    """The same logits whatever tree a node hangs in, but for the rounding of sums in attention."""
    found = [await answers(model, 3, **kind) for kind in KINDS]
    for one, other in itertools.pairwise(found):
        for a, b in zip(one, other, strict=True):
            assert a.tokens == b.tokens
            assert numbers(a.logprobs) == pytest.approx(numbers(b.logprobs), abs=1e-12)


def numbers(logprobs: list[TokenLogprob]) -> list[float]:
    return [value for entry in logprobs for value in (entry.logprob, *(p for _, p in entry.top))]
