"""Sequences of three tokens from an engine, drafted or not, against their exact distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from routing.messages import Sampling
from tests import made
from tests.pipeline.made_engine import made_engine
from tests.pipeline.made_requests import ask, told
from tests.stages.test_chi_square import VOCAB, p_value

IDS = [3, 1, 4, 1, 5]
SAMPLING = Sampling(3.0)
DRAWS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama", vocab=VOCAB)


def exact(model: Path) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of three tokens after IDS, by transformers' forward."""
    found: dict[tuple[int, ...], float] = {}
    for first, second in itertools.product(range(VOCAB), repeat=2):
        logits = made.reference_logits(model, [*IDS, first, second])[len(IDS) - 1 :]
        shares = torch.softmax(logits / SAMPLING.temperature, dim=1)
        for third in range(VOCAB):
            share = shares[0, first] * shares[1, second] * shares[2, third]
            found[first, second, third] = float(share)
    return found


@pytest.mark.parametrize("substitute", ["int4", "none"])
async def test_an_engines_samples_follow_the_exact_distribution(
    model: Path, substitute: str
) -> None:
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    async with made_engine(model, queue=DRAWS, substitute=substitute) as engine:
        asked = [ask(engine, IDS, Sampling(3.0, seed), 3) for seed in range(DRAWS)]
        for session in asked:
            answer = await told(session)
            found[tuple(answer.tokens)] += 1
            accepted += answer.session.accepted
    assert (accepted > DRAWS / 2) == (substitute != "none"), "drafts are accepted"
    assert p_value(found, exact(model)) > 1e-3
