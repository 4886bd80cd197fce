"""A text that grows past the length at which longrope (phi3) changes its frequencies.

All keys computed before are wrong from there on, so the prefix is computed anew. The reference
keeps no cache at all: each token is computed from the whole text before it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from routing.messages import DraftOrder, SweepTimes
from routing.sessions import Session
from stages.committer import Committer
from stages.rope import Rope
from stages.sweep import Sweep
from tests import made
from tests.pipeline.made_engine import made_engine
from tests.pipeline.moments import nothing_held

SWITCH = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = made.longrope(original=SWITCH)
    return made.make_model(tmp_path_factory.mktemp("made"), "phi3", **overrides)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often a prompt of how many rows was computed."""
    seen: Counter[int] = Counter()
    begin = Sweep.__init__

    def noted(sweep: Sweep, *args: Any) -> None:
        begin(sweep, *args)
        seen.update(len(rider.tokens) for rider in sweep.riders if rider.parents is None)

    monkeypatch.setattr(Sweep, "__init__", noted)
    return seen


async def test_the_switch_matters(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, or without computing the prefix anew, the tokens are others."""
    ids = made.make_prompt(320, SWITCH - 6)
    right, _ = made.reference_loop(model, ids, 16)

    async def answer() -> list[int]:
        async with made_engine(model) as engine:
            return list((await engine.generate(ids, max_tokens=16)).token_ids)

    with monkeypatch.context() as patch:
        patch.setattr(Rope, "is_long", lambda *_: False)
        assert await answer() != right
    with monkeypatch.context() as patch:
        patch.setattr(Committer, "_order", _order_without_refill)
        assert await answer() != right
    assert await answer() == right


async def _order_without_refill(
    self: Committer, session: Session, place: int, token: int, _: SweepTimes | None
) -> None:
    assert session.orders is not None
    position = self._kv.committed(place)
    session.orders.send_nowait(DraftOrder(session.id, place, token, position))


@pytest.mark.parametrize(
    "length", [1, SWITCH - 12, SWITCH - 2, SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 9]
)
async def test_across_the_switch(model: Path, prefills: Counter[int], length: int) -> None:
    ids = made.make_prompt(320, length, seed=length)
    tokens = max(12, SWITCH - length + 8)
    right, _ = made.reference_loop(model, ids, tokens)
    async with made_engine(model, delays=length) as engine:
        answer = await engine.generate(ids, max_tokens=tokens)
        nothing_held(engine)
    assert list(answer.token_ids) == right
    crosses = length <= SWITCH
    assert prefills == Counter([length, SWITCH + 1] if crosses else [length])


async def test_across_the_switch_with_what_is_looked_up(
    model: Path, prefills: Counter[int]
) -> None:
    """Trees end before it, and the text goes on to be looked up in behind it."""
    ids = [5, 9] * (SWITCH // 2 - 2)
    right, _ = made.reference_loop(model, ids, 16)
    async with made_engine(model, substitute="lookup", delays=3) as engine:
        answer = await engine.generate(ids, max_tokens=16)
        nothing_held(engine)
    assert list(answer.token_ids) == right
    assert answer.drafted > 0
    assert prefills == Counter([len(ids), SWITCH + 1])


@pytest.mark.parametrize("over", [-1, 0, 1, 2])
async def test_an_answer_that_ends_at_the_switch(
    model: Path, prefills: Counter[int], over: int
) -> None:
    """The last token is not computed from, so a text may end one token past the switch."""
    ids = made.make_prompt(320, SWITCH - 5, seed=1)
    tokens = 5 + over
    right, _ = made.reference_loop(model, ids, tokens)
    async with made_engine(model) as engine:
        answer = await engine.generate(ids, max_tokens=tokens)
    assert list(answer.token_ids) == right
    assert (SWITCH + 1 in prefills) == (over > 1)


@pytest.mark.parametrize("tree", [{"depth": 1, "width": 2}, {"depth": 9, "width": 1}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_sampled_and_with_other_trees(
    model: Path, tree: dict[str, int], temperature: float
) -> None:
    ids = made.make_prompt(320, SWITCH - 7, seed=2)
    kind = {"max_tokens": 16, "temperature": temperature, "seed": 3}
    async with made_engine(model, substitute="none") as engine:
        plain = await engine.generate(ids, **kind)  # type: ignore[arg-type]
    async with made_engine(model, **tree) as engine:
        answer = await engine.generate(ids, **kind)  # type: ignore[arg-type]
    assert answer.drafted > 0 == plain.drafted
    assert answer.token_ids == plain.token_ids
    if temperature == 0:
        assert list(plain.token_ids) == made.reference_loop(model, ids, 16)[0]


async def test_transformers_generate_agrees(model: Path) -> None:
    """With a cache of its own that it drops at the switch."""
    ids = made.make_prompt(320, SWITCH - 4, seed=4)
    async with made_engine(model) as engine:
        answer = await engine.generate(ids, max_tokens=12)
    assert list(answer.token_ids) == made.reference_generate(model, ids, 12)
