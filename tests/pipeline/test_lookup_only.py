"""Trees that are looked up in the text alone, without substitutes: the target's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.planner import plan, smallest_budget
from routing.messages import Sampling
from stages.loading import OpenedModel
from tests import made
from tests.pipeline.made_engine import ALLOWANCES, made_engine
from tests.pipeline.made_requests import ask, generated, told
from tests.pipeline.moments import nothing_held
from tests.pipeline.test_sampler_lossless import COVER

TOKENS = 40
REPEATS = [5, 9] * 10
"""The made models go on with it for a while, as trained ones do."""
FEW = (1, 2, 3)
LOOKUP: dict[str, Any] = {"substitute": "lookup"}


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / request.param
    return made.make_model(directory, request.param, layers=6)


@pytest.mark.parametrize("kind", [{}, {"device": "simulated", "delays": 2}], ids=["cpu", "shaken"])
async def test_a_text_that_repeats_takes_fewer_sweeps(model: Path, kind: dict[str, Any]) -> None:
    async with made_engine(model, **LOOKUP, **kind) as engine:
        assert engine.plan.step == "lookup" and engine.runtime.draft_model is None
        answer = await engine.generate(REPEATS, max_tokens=TOKENS)
    assert list(answer.token_ids) == made.reference_generate(model, REPEATS, TOKENS)
    assert answer.rounds < TOKENS - 5
    assert answer.drafted >= TOKENS - 1 - answer.rounds > 0
    assert answer.tau is not None and answer.tau > 0
    assert answer.ahead_kept is None


async def test_every_option_gives_transformers_tokens(model: Path) -> None:
    """Alone and in company; few tokens are allowed, so that what is sampled repeats as well."""
    samplings = [
        Sampling(1.0, 3, allowed=FEW),
        Sampling(0.0, frequency_penalty=0.5, allowed=FEW),
        Sampling(1.0, 4),
        *COVER[4::7],
    ]
    async with made_engine(model, sessions=2, **LOOKUP) as engine:
        asked = [ask(engine, REPEATS, sampling, 20) for sampling in samplings]
        found = [await told(session) for session in asked]
        nothing_held(engine)
    for sampling, answer in zip(samplings, found, strict=True):
        assert answer.tokens == generated(model, REPEATS, sampling, 20), sampling
    assert all(answer.session.accepted > 3 for answer in found[:2])


@pytest.mark.parametrize("rows", [1, 3])
async def test_trees_are_no_larger_than_there_are_rows_of_logits(model: Path, rows: int) -> None:
    sampling = Sampling(1.0, 3, allowed=FEW)
    async with made_engine(model, logit_rows=rows, **LOOKUP) as engine:
        answer = await told(ask(engine, REPEATS, sampling, 20))
    assert answer.tokens == generated(model, REPEATS, sampling, 20)
    assert answer.session.drafted <= (rows - 1) * answer.session.rounds
    assert (answer.session.accepted > 0) == (rows > 1)


async def test_what_is_held_whole_is_looked_up_as_well(model: Path) -> None:
    """All weights fit: no sweep waits for any, and rows in a pack's padding are free all the
    same."""
    opened = OpenedModel(model)
    try:
        kind: dict[str, Any] = {"context": 96, "allowances": ALLOWANCES}
        least = smallest_budget(opened.shape, allow_plain=False, **kind)
        held = plan(opened.shape, 2 * least, 1.0, substitute="lookup", **kind)
        none = plan(opened.shape, 2 * least, 1.0, substitute="none", **kind)
    finally:
        opened.close()
    assert (held.step, none.step) == ("resident", "resident")
    assert none.placement == msgspec.structs.replace(held.placement, tree_budget=0, logit_rows=1)
    async with made_engine(model, plan=held, asked="lookup") as engine:
        answer = await engine.generate(REPEATS, max_tokens=TOKENS)
    assert list(answer.token_ids) == made.reference_generate(model, REPEATS, TOKENS)
    assert answer.rounds < TOKENS - 5


async def test_a_request_that_goes_leaves_nothing(model: Path) -> None:
    async with made_engine(model, sessions=2, **LOOKUP) as engine:
        async with engine.stream(REPEATS, max_tokens=60) as stream:
            await anext(stream)
            other = engine.stream(REPEATS, max_tokens=8)
        answer = await other.collect()
        nothing_held(engine)
    assert list(answer.token_ids) == made.reference_generate(model, REPEATS, 8)


@pytest.mark.parametrize(("asked", "said"), [("auto", 1), ("int4", 1), ("lookup", 0)])
async def test_it_says_so_when_only_lookup_is_left(
    model: Path, caplog: pytest.LogCaptureFixture, asked: str, said: int
) -> None:
    async with made_engine(model, asked=asked, **LOOKUP):
        pass
    assert len([m for m in caplog.messages if "looked up in the text alone" in m]) == said
    assert not [m for m in caplog.messages if "speculation is off" in m]
