"""Invariant 1: the target's own tokens, whatever is drafted, streamed, cut or shaken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.growth import Growth
from tests import made
from tests.pipeline.made_engine import made_engine

TOKENS = 40


@pytest.fixture(scope="module", params=made.ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / request.param
    made.make_model(directory, request.param)
    return directory


def prompt(length: int, seed: int = 0) -> list[int]:
    return made.make_prompt(320, length, seed)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
async def test_greedy_tokens_are_transformers_own(model: Path, device: str) -> None:
    ids = prompt(19)
    async with made_engine(model, device=device, delays=1, spare=200_000) as engine:
        answer = await engine.generate(ids, max_tokens=TOKENS)
    assert list(answer.token_ids) == made.reference_generate(model, ids, TOKENS)
    assert answer.drafted > 0, "a test of speculation must speculate"
    assert answer.finish_reason == "length"


async def test_a_hostile_drafter_changes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that have nothing to do with the model: almost none is accepted, tokens are equal."""
    noise = torch.Generator().manual_seed(0)

    def unrelated(*_: object) -> torch.Tensor:
        return torch.randn(1, 320, generator=noise).log_softmax(dim=-1)

    def run(self: object, place: int, growth: Growth, nodes: list[int], *_: object) -> None:
        growth.begin(nodes)
        growth.extend(nodes, torch.cat([unrelated() for _ in nodes]))

    monkeypatch.setattr("stages.drafting.DraftModel.run", run)
    ids = prompt(11, seed=3)
    async with made_engine(model) as engine:
        answer = await engine.generate(ids, max_tokens=TOKENS)
    assert list(answer.token_ids) == made.reference_generate(model, ids, TOKENS)
    assert answer.tau is not None and answer.tau < 1


@pytest.mark.parametrize("temperature", [0.7, 1.5])
async def test_sampled_tokens_do_not_depend_on_drafts(model: Path, temperature: float) -> None:
    ids = prompt(9, seed=5)
    answers = []
    for kind in (
        {"substitute": "int4"},
        {"substitute": "int8", "depth": 2},
        {"substitute": "none"},
    ):
        async with made_engine(model, whole=True, **kind) as engine:
            answers.append(
                await engine.generate(ids, max_tokens=24, temperature=temperature, seed=77)
            )
    first, second, plain = (answer.token_ids for answer in answers)
    assert first == second == plain
    assert answers[2].drafted == 0


async def test_what_is_resident_is_drafted_for_by_substitutes(model: Path) -> None:
    """In memory that holds everything, and a second time in fewer bits."""
    ids = prompt(13, seed=9)
    async with made_engine(model, substitute="int8", spare=1 << 24) as engine:
        placement, memory = engine.plan.placement, engine.runtime.device.memory
        assert engine.plan.step == "resident" and placement.low_resident
        assert memory.by_name["substitutes"] == engine.plan.substituted_bytes > 0
        assert memory.by_name["resident"] == engine.plan.resident_bytes
        answer = await engine.generate(ids, max_tokens=24)
    assert list(answer.token_ids) == made.reference_generate(model, ids, 24)
    assert answer.tau is not None and answer.tau > 0, "some of what it drafts is accepted"
