"""Sampled answers are those of transformers' generate with its own processors and our noise.

One token at a time there, drafted trees here: the same tokens, for every option, in every
company.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings

from routing.errors import PacelineError
from routing.messages import Sampling
from stages.noise import Noise
from stages.outcomes import Choice, WholeRows
from stages.packs import Rider
from tests import made
from tests.pipeline import made_requests
from tests.pipeline.made_engine import made_engine
from tests.pipeline.made_requests import Told, ask, told
from tests.processors import samplings

ARCHITECTURES = ("llama", "qwen2", "gemma2", "phi3", "granite")
TOKENS = 12
IDS = made.make_prompt(320, 13, seed=31)
BIAS = ((7, 6.0), (9, -8.0), (300, 3.5))

COVER: list[Sampling] = [
    Sampling(0.0),
    Sampling(0.7, 1),
    Sampling(1.0, 2),
    Sampling(2.0, 3),
    Sampling(1.0, 4, top_k=6),
    Sampling(2.0, 5, top_k=20),
    Sampling(1.0, 6, top_p=0.7),
    Sampling(2.0, 7, top_p=0.9),
    Sampling(1.0, 8, min_p=0.05),
    Sampling(2.0, 9, min_p=0.02),
    Sampling(1.0, 10, typical_p=0.5),
    Sampling(2.0, 11, typical_p=0.9),
    Sampling(0.0, repetition_penalty=1.6),
    Sampling(0.7, 12, repetition_penalty=1.3),
    Sampling(0.0, presence_penalty=2.0),
    Sampling(1.0, 13, presence_penalty=2.0),
    Sampling(0.0, frequency_penalty=1.5),
    Sampling(2.0, 14, frequency_penalty=1.5),
    Sampling(0.0, logit_bias=BIAS),
    Sampling(1.0, 15, logit_bias=BIAS),
    Sampling(0.0, banned=tuple(range(0, 320, 3))),
    Sampling(1.0, 16, banned=tuple(range(0, 320, 3))),
    Sampling(0.0, allowed=tuple(range(40, 90))),
    Sampling(2.0, 17, allowed=tuple(range(40, 90))),
    Sampling(0.7, 18, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    Sampling(2.0, 19, 30, 0.95, 0.01, 0.95, 1.1, 0.5, 0.3, BIAS, (3, 4), tuple(range(200))),
    Sampling(1.0, 20, typical_p=0.8, presence_penalty=-0.5, frequency_penalty=0.7, banned=(1,)),
]
"""Temperatures 0, 0.7, 1 and 2, each option alone, and some together."""

ENGINES: list[dict[str, Any]] = [
    {"substitute": "int4", "sessions": 2, "context": 40, "whole": True},
    {"substitute": "int8", "width": 2, "depth": 6, "whole": True},
    {"substitute": "none", "sessions": 2},
]
"""Wide trees with company, narrow ones alone, and none at all."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / request.param
    return made.make_model(directory, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama")


def generated(directory: Path, sampling: Sampling, n: int = TOKENS) -> list[int]:
    """transformers' own tokens after IDS."""
    return made_requests.generated(directory, IDS, sampling, n)


async def answers(
    directory: Path, samplings: Sequence[Sampling], n: int = TOKENS, **kind: Any
) -> list[Told]:
    async with made_engine(directory, **kind) as engine:
        asked = [ask(engine, IDS, sampling, n) for sampling in samplings]
        return [await told(session) for session in asked]


@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: kind["substitute"])
async def test_every_option_gives_transformers_tokens(model: Path, kind: dict[str, Any]) -> None:
    first = ARCHITECTURES.index(model.name)
    some = [*COVER[first % 3 :: 3], *COVER[-3:]]  # every option meets every kind of tree
    found = await answers(model, some, **kind)
    for sampling, answer in zip(some, found, strict=True):
        assert answer.tokens == generated(model, sampling), sampling
    drafted = sum(answer.session.drafted for answer in found)
    assert (drafted > 0) == (kind["substitute"] != "none")
    accepted = sum(answer.session.accepted for answer in found)
    assert (accepted > TOKENS) == (kind["substitute"] != "none"), "accepted tokens must be met"


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
async def test_fewer_rows_than_nodes_change_nothing(llama: Path, rows: int) -> None:
    """Where the plan has few whole rows of logits, trees are smaller and tokens the same."""
    some = [*COVER[1:27:5], Sampling(0.0)]
    found = await answers(llama, some, substitute="int8", width=4, logit_rows=rows)
    for sampling, answer in zip(some, found, strict=True):
        assert answer.tokens == generated(llama, sampling), sampling
    *whole, plain = (answer.session for answer in found)
    assert all(session.drafted <= session.rounds * (rows - 1) for session in whole)
    assert any(session.drafted for session in whole) == (rows > 1)
    assert plain.drafted > plain.rounds, "greedy answers need no rows of logits"


@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(sampling=samplings(320))
def test_any_options_give_transformers_tokens(llama: Path, sampling: Sampling) -> None:
    assume(sampling.allowed is None or set(sampling.allowed) - set(sampling.banned))
    (found,) = asyncio.run(answers(llama, [sampling], substitute="int8", width=4, whole=True))
    assert found.tokens == generated(llama, sampling)


Choose = Callable[[WholeRows, int, tuple[int, ...]], Choice]
LOOKING_BACK = [
    Sampling(0.0, repetition_penalty=1.6),
    Sampling(0.7, 12, presence_penalty=3.0),
    Sampling(0.7, 13, frequency_penalty=2.0),
]
CHOOSE = WholeRows.choose


def sees(history: Callable[[Rider, tuple[int, ...]], tuple[int, ...]]) -> Choose:
    """A choice whose penalties see `history`(rider, tokens below the root) instead."""

    def choose(rows: WholeRows, row: int, below: tuple[int, ...]) -> Choice:
        rider = rows._rider
        seen = history(rider, below)
        planted = WholeRows(
            msgspec.structs.replace(rider, history=seen),
            rows._logits,
            rows._scorer,
            rows._positions,
        )
        return CHOOSE(planted, row, ())

    return choose


WRONG: dict[str, Choose] = {
    "the last token only": sees(lambda rider, below: (*rider.history, *below)[-1:]),
    "nothing of the path": sees(lambda rider, below: rider.history),
    "rejected tokens too": sees(lambda rider, below: (*rider.history, *rider.tokens[1:], *below)),
    "the answer counted as prompt": sees(
        lambda rider, below: (*rider.history[: rider.prompt], *below)
    ),
}


async def penalized(directory: Path) -> list[list[int]]:
    found = await answers(directory, LOOKING_BACK, 24, substitute="int8", whole=True)
    assert sum(answer.session.accepted for answer in found) > 10, "histories run down the trees"
    return [answer.tokens for answer in found]


async def test_penalties_that_see_the_right_history_are_transformers(llama: Path) -> None:
    right = [generated(llama, sampling, 24) for sampling in LOOKING_BACK]
    assert await penalized(llama) == right


@pytest.mark.parametrize("wrong", WRONG)
async def test_penalties_that_see_a_wrong_history_are_noticed(
    llama: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(WholeRows, "choose", WRONG[wrong])
    found = await penalized(llama)
    for sampling, tokens in zip(LOOKING_BACK, found, strict=True):
        assert tokens != generated(llama, sampling, 24), sampling


@pytest.mark.parametrize("wrong", [-1, 1])
async def test_noise_of_another_position_is_noticed(
    llama: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    row = Noise.row
    monkeypatch.setattr(
        Noise, "row", lambda noise, seed, at, vocab: row(noise, seed, at + wrong, vocab)
    )
    (found,) = await answers(llama, [COVER[2]], whole=True)
    assert found.tokens != generated(llama, COVER[2])


async def test_a_request_without_a_token_left_fails_alone(llama: Path) -> None:
    nothing = Sampling(1.0, 3, allowed=(1, 2), banned=(1, 2))
    async with made_engine(llama, sessions=2, context=40, substitute="int4") as engine:
        broken, sound = ask(engine, IDS, nothing, 5), ask(engine, IDS, COVER[2], TOKENS)
        with pytest.raises(PacelineError, match="not finite"):
            await told(broken)
        assert (await told(sound)).tokens == generated(llama, COVER[2])
