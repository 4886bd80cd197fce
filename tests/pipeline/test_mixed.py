"""Substitutes in two formats: the target's own tokens all the same, from what was planned for."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.planner import Plan, plan, smallest_budget
from pipeline.predictions import Compute
from stages.formats import head_format, substitute_bytes
from stages.loading import OpenedModel
from stages.weights import Weights
from tests import made
from tests.pipeline.made_engine import ALLOWANCES, made_engine, with_rows

TOKENS = 32
KINDS = {"streamed": 300_000, "fewer bits": 250_000, "held": 1_200_000}
"""Bytes above the smallest budget from where on a mixture is the fastest, behind a slow link."""
QUICK = Compute(draft_layer_s=0.0)
"""So that drafts pay for these models even where all weights fit."""


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose layers have the common shape, and one whose layers go their own way."""
    return made.make_model(tmp_path_factory.mktemp("made") / request.param, request.param)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """The weights of every engine that is made."""
    found: list[Weights] = []
    load = Weights.load

    def noted(*given: Any, **more: Any) -> Weights:
        found.append(load(*given, **more))
        return found[-1]

    monkeypatch.setattr(Weights, "load", noted)
    return found


def mixed(directory: Path, kind: str) -> Plan:
    """The second layer is the most sensitive by far; there is a row of logits for every node."""
    allowances = msgspec.structs.replace(ALLOWANCES, width=3)
    with closing(OpenedModel(directory)) as opened:
        shape = opened.shape
        costs = [8.0 if layer == 1 else 1.0 for layer in range(len(shape.layers))]
        least = smallest_budget(shape, context=96, allowances=allowances)
        budgets = range(least + KINDS[kind], least + KINDS[kind] + 500_000, 10_000)
        plans = (
            plan(shape, budget, 0.01, QUICK, context=96, allowances=allowances, sensitivity=costs)
            for budget in budgets
        )
        found = next(made for made in plans if made.placement.raised)
    assert 1 in found.placement.raised
    return with_rows(found, shape, found.placement.tree_budget + 1)


def check_forms(weights: Weights, placed: Plan, directory: Path) -> None:
    """Each layer's substitutes are as large as in the format that was planned, and the head's."""
    placement = placed.placement
    with closing(OpenedModel(directory)) as opened:
        shape = opened.shape
    sizes, layers = {}, Counter[str]()
    for m in (*shape.matrices(), shape.head):
        form = placement.finer if m.layer in placement.raised else placement.substitute
        assert form is not None
        if m == shape.head:
            form = head_format(form)
        else:
            layers[form] += 1
        sizes[m.name] = substitute_bytes((m.rows, m.cols), form)
    assert len(layers) == 2, "a test of two formats"
    for names, substitute in weights.substitutes.items():
        assert substitute.nbytes == sum(sizes[name] for name in names)
    names = [name for group in weights.substitutes for name in group]
    assert sum(sizes[name] for name in names) == placed.substituted_bytes


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_transformers_own(model: Path, kind: str, loaded: list[Weights]) -> None:
    made_plan, ids = mixed(model, kind), made.make_prompt(320, 19)
    assert (made_plan.step == "resident") == (kind == "held") == made_plan.placement.low_resident
    async with made_engine(model, plan=made_plan, delays=1) as engine:
        (weights,) = loaded
        check_forms(weights, made_plan, model)
        answer = await engine.generate(ids, max_tokens=TOKENS)
    assert list(answer.token_ids) == made.reference_generate(model, ids, TOKENS)
    assert answer.drafted > 0 and answer.tau is not None


async def test_sampled_tokens_do_not_depend_on_it(model: Path) -> None:
    ids, answers = made.make_prompt(320, 9, 5), []
    for placed in (mixed(model, "streamed"), mixed(model, "held"), None):
        kind = {} if placed is not None else {"substitute": "none"}
        async with made_engine(model, plan=placed, **kind) as engine:
            answer = await engine.generate(ids, max_tokens=TOKENS, temperature=0.8, seed=7)
        answers.append(answer.token_ids)
        assert (answer.drafted > 0) == (placed is not None)
    assert answers[0] == answers[1] == answers[2]
