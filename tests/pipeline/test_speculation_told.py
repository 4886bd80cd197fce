"""Speculation that is off, or does not pay, can be seen: in the plan, in its notes, in answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.planner import Plan, plan, smallest_budget
from pipeline.report import plan_notes
from stages.drafting import DraftModel
from stages.formats import FORMATS
from stages.loading import OpenedModel
from tests import made
from tests.pipeline.made_engine import ALLOWANCES, made_engine

IDS = made.make_prompt(320, 11, seed=81)
TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama", layers=6)


def planned(model: Path, spare: int, *, like: str, substitute: str) -> Plan:
    """The plan for `substitute` in `spare` bytes more than `like` takes at least."""
    opened = OpenedModel(model)
    try:
        kind: dict[str, Any] = {"context": 64, "allowances": ALLOWANCES}
        least = smallest_budget(opened.shape, substitute=like, allow_plain=like == "none", **kind)
        return plan(opened.shape, least + spare, 1.0, substitute=substitute, **kind)
    finally:
        opened.close()


@pytest.mark.parametrize("substitute", ["int8", "int4", "auto"])
async def test_substitutes_that_do_not_fit_are_told_of(model: Path, substitute: str) -> None:
    """They were configured, and an answer comes without them."""
    made_plan = planned(model, 0, like="none", substitute=substitute)
    assert made_plan.step == "plain" and made_plan.width == 0
    names = FORMATS if substitute == "auto" else (substitute,)
    for name in names:
        assert f"- {name} substitutes do not fit: " in plan_notes(made_plan)
    async with made_engine(model, plan=made_plan) as engine:
        answer = await engine.generate(IDS, max_tokens=TOKENS)
        assert engine.plan.reasons == made_plan.reasons
    assert (answer.drafted, answer.tau, answer.ahead_kept) == (0, 0.0, None)
    assert list(answer.token_ids) == made.reference_generate(model, IDS, TOKENS)


@pytest.mark.parametrize("substitute", ["int8", "int4"])
async def test_where_they_fit_drafts_happen(model: Path, substitute: str) -> None:
    made_plan = planned(model, 0, like=substitute, substitute=substitute)
    assert made_plan.step == "substitutes" and made_plan.placement.substitute == substitute
    async with made_engine(model, plan=made_plan) as engine:
        answer = await engine.generate(IDS, max_tokens=TOKENS)
    assert answer.drafted > 0 and answer.tau is not None and answer.tau > 0
    assert answer.rounds < TOKENS - 1


async def test_an_answer_tells_when_drafting_did_not_pay(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that take a minute: soon nothing is drafted but for a probe now and then."""
    run = DraftModel.run

    def slow(draft: DraftModel, *args: Any) -> None:
        run(draft, *args)
        draft.step_s = 60.0

    monkeypatch.setattr(DraftModel, "run", slow)
    async with made_engine(model, timed=True) as engine:
        await engine.generate(IDS, max_tokens=TOKENS)
        answer = await engine.generate(IDS, max_tokens=12)
    assert list(answer.token_ids) == made.reference_generate(model, IDS, 12)
    assert (answer.drafted, answer.tau, answer.rounds) == (0, 0.0, 11)
