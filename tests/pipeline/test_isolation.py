"""Who rides along changes nothing: each session is answered as it would be alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.answers import Answer
from pipeline.engine import Engine
from routing.messages import ToVerifier
from routing.sessions import SessionTable
from stages.sweep import Sweep
from stages.verifier import Verifier
from tests import made
from tests.pipeline.made_engine import made_engine
from tests.pipeline.moments import idle, nothing_held

ARCHITECTURES = ("llama", "gemma2", "longrope")
"""Plain; sliding windows, soft-caps and a scaled embedding; frequencies that hang on the length."""

LAYERS = 9
"""With fewer all weights fit beside four sessions, and nothing is drafted."""

Known = dict[Path, list[tuple[int, ...]]]

ASKED: list[dict[str, Any]] = [
    {"prompt": made.make_prompt(320, 5, seed=1), "max_tokens": 14},
    {"prompt": made.make_prompt(320, 31, seed=2), "max_tokens": 10, "temperature": 0.9, "seed": 1},
    {"prompt": made.make_prompt(320, 17, seed=3), "max_tokens": 18},
    {"prompt": made.make_prompt(320, 17, seed=3), "max_tokens": 12, "temperature": 0.9, "seed": 2},
    {"prompt": made.make_prompt(320, 1, seed=4), "max_tokens": 16, "temperature": 1.6, "seed": 1},
    {"prompt": made.make_prompt(320, 23, seed=5), "max_tokens": 1},
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / request.param
    if request.param == "longrope":
        return made.make_model(directory, "phi3", layers=LAYERS, **made.longrope(original=24))
    return made.make_model(directory, request.param, layers=LAYERS)


async def side_by_side(engine: Engine, asked: list[dict[str, Any]]) -> list[Answer]:
    answers: dict[int, Answer] = {}

    async def caller(number: int) -> None:
        answers[number] = await engine.generate(**asked[number])

    async with anyio.create_task_group() as callers:
        for number in range(len(asked)):
            callers.start_soon(caller, number)
    nothing_held(engine)
    assert sum(answer.drafted for answer in answers.values()) > 20, "they speculate"
    return [answers[number] for number in range(len(asked))]


@pytest.fixture(scope="module")
def alone() -> Known:
    """What each gets alone, by model: filled by the first test that wants it."""
    return {}


async def answered_alone(model: Path, known: Known) -> list[tuple[int, ...]]:
    if model not in known:
        async with made_engine(model) as engine:
            answers = [await engine.generate(**asked) for asked in ASKED]
        known[model] = [answer.token_ids for answer in answers]
        for asked, tokens in zip(ASKED, known[model], strict=True):
            if "temperature" not in asked:
                right, _ = made.reference_loop(model, asked["prompt"], asked["max_tokens"])
                assert list(tokens) == right
    return known[model]


@pytest.fixture
def convoy(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """All who live ride in every sweep; the numbers of riders seen.

    Otherwise two sessions would take turns, the one drafting while the other is verified.
    """
    begin, serve, end = Sweep.__init__, Verifier._serve, SessionTable.end
    together: set[int] = set()
    waits: list[anyio.CancelScope] = []

    def noted(sweep: Sweep, *args: Any) -> None:
        begin(sweep, *args)
        together.add(len(sweep.riders))

    async def gathering(verifier: Verifier, messages: Sequence[ToVerifier]) -> None:
        gathered = list(messages)
        while len(gathered) < verifier._sessions.live:
            with anyio.CancelScope() as scope:
                waits.append(scope)
                gathered.append(await verifier._inbox.receive())
        await serve(verifier, gathered)

    def ends(table: SessionTable, *args: Any) -> None:
        end(table, *args)
        while waits:  # whoever has ended is not waited for
            waits.pop().cancel()

    monkeypatch.setattr(Sweep, "__init__", noted)
    monkeypatch.setattr(Verifier, "_serve", gathering)
    monkeypatch.setattr(SessionTable, "end", ends)
    return together


@pytest.mark.parametrize(("sessions", "device"), [(2, "cpu"), (4, "simulated")])
async def test_all_in_one_sweep_as_alone(
    model: Path, convoy: set[int], alone: Known, sessions: int, device: str
) -> None:
    """More requests than places: sweeps are joined and left at different times."""
    expected = await answered_alone(model, alone)
    kind: dict[str, Any] = {"sessions": sessions, "device": device, "delays": sessions}
    async with made_engine(model, **kind) as engine:
        answers = await side_by_side(engine, ASKED)
    assert [answer.token_ids for answer in answers] == expected
    assert sessions in convoy and len(convoy) > 1, "a test of company must have some, and change"


async def test_taking_turns_as_alone(model: Path, alone: Known) -> None:
    expected = await answered_alone(model, alone)
    async with made_engine(model, sessions=3, delays=3) as engine:
        answers = await side_by_side(engine, ASKED)
    assert [answer.token_ids for answer in answers] == expected


async def test_neighbors_that_leave_change_nothing(model: Path, alone: Known) -> None:
    expected = await answered_alone(model, alone)
    dice = random.Random(3)

    async def leaver(engine: Engine) -> None:
        for _ in range(3):
            ids = made.make_prompt(320, dice.randint(1, 40), seed=dice.randint(0, 9))
            left = dice.randint(0, 2)
            stream = engine.stream(ids, max_tokens=40, temperature=1.0, seed=1)
            async for _ in stream:
                if left == 0:
                    break
                left -= 1
            del stream

    async with made_engine(model, sessions=3, delays=9) as engine:
        async with anyio.create_task_group() as callers:
            callers.start_soon(leaver, engine)
            callers.start_soon(leaver, engine)
            for number in (2, 3):
                answer = await engine.generate(**ASKED[number])
                assert answer.token_ids == expected[number]
        await idle(engine)
        nothing_held(engine)


async def test_the_noise_of_one_is_not_the_noise_of_another(model: Path) -> None:
    """The same prompt under two seeds side by side, and under one seed twice."""
    asked = [dict(ASKED[3], seed=seed) for seed in (5, 6, 5)]
    async with made_engine(model, sessions=3) as engine:
        first, second, third = await side_by_side(engine, asked)
    assert first.token_ids == third.token_ids != second.token_ids
