"""Exactly equal logits: the lowest token id, whatever is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from routing.messages import Sampling
from tests import made
from tests.pipeline.made_engine import made_engine
from tests.pipeline.made_requests import ask, told

TWINS = 160
IDS = made.make_prompt(320, 10, seed=51)
TOKENS = 20
SAMPLINGS = [
    Sampling(0.0),
    Sampling(0.0, repetition_penalty=1.0001),  # goes the way of whole rows
    Sampling(0.0, logit_bias=((319, -1.0), (159, -1.0))),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens i and i + 160 have the same row in the head, so each largest logit comes twice.

    A row has one number that is not zero: then its products are exact wherever a kernel puts it.
    """
    directory = made.make_model(tmp_path_factory.mktemp("made"), "llama", tied=False)
    found = 0
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        if "lm_head.weight" in tensors:
            head = torch.zeros_like(tensors["lm_head.weight"])
            for token in range(TWINS):
                head[[token, token + TWINS], token % 64] = (1.0, -1.0, 0.75)[token // 64]
            tensors["lm_head.weight"] = head
            save_file(tensors, path, metadata={"format": "pt"})
            found += 1
    assert found == 1
    return directory


@pytest.mark.parametrize(
    "kind",
    [
        {"substitute": "none"},
        *({"substitute": "int8", "width": width, "whole": True} for width in (1, 2, 3, 4, 6)),
    ],
    ids=str,
)
async def test_equal_logits_give_the_lowest_token(model: Path, kind: dict[str, Any]) -> None:
    expected = made.reference_generate(model, IDS, TOKENS)
    logits = made.reference_logits(model, [*IDS, *expected])[len(IDS) - 1 : -1]
    assert torch.equal(logits[:, :TWINS], logits[:, TWINS:]), "the twins are exactly equal"
    async with made_engine(model, **kind) as engine:
        asked = [ask(engine, IDS, sampling, TOKENS) for sampling in SAMPLINGS]
        answers = [await told(session) for session in asked]
        with_logprobs = await told(ask(engine, IDS, Sampling(0.0), TOKENS, logprobs=2))
    assert answers[0].tokens == with_logprobs.tokens == expected
    for answer in (answers[0], answers[2], with_logprobs):
        assert max(answer.tokens) < TWINS
    for entry in with_logprobs.logprobs:
        (first, best), (second, same) = entry.top
        assert (second, best) == (first + TWINS, same)
