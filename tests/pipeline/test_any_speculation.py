"""Any request to any engine: the tokens of decoding one at a time, however they are drafted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from routing.messages import Sampling
from stages.drafting import DraftModel
from stages.growth import Growth
from tests import made
from tests.pipeline.made_engine import made_engine
from tests.pipeline.made_requests import ask, generated, told
from tests.pipeline.moments import nothing_held
from tests.processors import samplings

ARCHITECTURES = ("llama", "qwen2", "gemma2", "phi3", "granite")
VOCAB = 320
CONTEXT = 56
LAYERS = 10
"""With fewer all weights fit where two sessions draft eight nodes a step: no substitutes."""


class Case(NamedTuple):
    """A request, and the engine that it is put to."""

    architecture: str
    prompt: list[int]
    sampling: Sampling
    tokens: int
    kind: dict[str, Any]


@st.composite
def cases(draw: Any) -> Case:
    """Any of five architectures, any options, any tree, drafting ahead or not."""
    width, depth = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    sampling = draw(samplings(VOCAB))
    assume(sampling.allowed is None or set(sampling.allowed) - set(sampling.banned))
    nodes = draw(st.integers(1, width * depth))
    kind: dict[str, Any] = {"substitute": draw(st.sampled_from(["int4", "int8", "lookup", "none"]))}
    if kind["substitute"] != "none":
        rows = draw(st.one_of(st.none(), st.integers(1, nodes + 1)))
        ahead = draw(st.sampled_from([0, 1, 9, 24]))
        kind |= {"width": width, "depth": depth, "budget": nodes, "ahead": ahead}
        kind |= {"logit_rows": rows}
    kind |= {"sessions": draw(st.integers(1, 2)), "context": CONTEXT}
    kind |= {"device": draw(st.sampled_from(["cpu", "simulated"]))}
    kind |= {"delays": draw(st.one_of(st.none(), st.integers(0, 9)))}
    return Case(
        draw(st.sampled_from(ARCHITECTURES)),
        draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)),
        sampling,
        draw(st.integers(1, 24)),
        kind,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("made")
    return {name: made.make_model(directory / name, name, layers=LAYERS) for name in ARCHITECTURES}


async def answered(directory: Path, case: Case) -> list[list[int]]:
    """Of as many equal requests as the engine has places."""
    async with made_engine(directory, **case.kind) as engine:
        places = range(case.kind["sessions"])
        asked = [ask(engine, case.prompt, case.sampling, case.tokens) for _ in places]
        tokens = [(await told(session)).tokens for session in asked]
        nothing_held(engine)
    return tokens


def check(models: dict[str, Path], case: Case) -> None:
    directory = models[case.architecture]
    expected = generated(directory, case.prompt, case.sampling, case.tokens)
    for tokens in asyncio.run(answered(directory, case)):
        assert tokens == expected


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_any_engine_gives_transformers_tokens(models: dict[str, Path], case: Case) -> None:
    check(models, case)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_many_engines_give_transformers_tokens(models: dict[str, Path], case: Case) -> None:
    check(models, case)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_unrelated_drafter_at_many_lengths(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Cache positions would drift: hardly a draft comes true, and now and then one does."""
    noise = torch.Generator().manual_seed(0)

    def run(self: DraftModel, place: int, growth: Growth, nodes: list[int], *_: object) -> None:
        growth.begin(nodes)
        growth.extend(nodes, torch.randn(len(nodes), VOCAB, generator=noise).log_softmax(dim=-1))

    monkeypatch.setattr(DraftModel, "run", run)
    directory = models["llama"]
    drafted = accepted = 0
    async with made_engine(directory, sessions=2, width=4) as engine:
        for length in (1, 2, 4, 13, 40):
            ids = made.make_prompt(VOCAB, length, seed=length)
            sampling = Sampling(temperature, length)
            limits = (1, 2, 3, 5, 22)
            asked = [ask(engine, ids, sampling, limit) for limit in limits]
            right = generated(directory, ids, sampling, max(limits))
            for limit, session in zip(limits, asked, strict=True):
                assert (await told(session)).tokens == right[:limit], (length, limit)
                drafted += session.drafted
                accepted += session.accepted
    assert drafted > 200 and accepted > 0, (drafted, accepted)


@pytest.mark.parametrize("substitute", ["int8", "none"])
async def test_a_seed_counts_at_temperature_two(models: dict[str, Path], substitute: str) -> None:
    """Two runs are equal, in one engine and in another; two seeds are not."""
    ids = made.make_prompt(VOCAB, 9, seed=71)
    found: list[list[int]] = []
    for _ in range(2):
        async with made_engine(models["llama"], substitute=substitute) as engine:
            for seed in (0, 1, 0):
                found.append((await told(ask(engine, ids, Sampling(2.0, seed), 16))).tokens)
    first, other, again, *later = found
    assert first == again and first != other
    assert later == found[:3]
    assert first == generated(models["llama"], ids, Sampling(2.0, 0), 16)
