"""Sequences of three tokens over a vocabulary of eight, against their exact distribution.

At the level of scoring and acceptance, with and without drafts: the model is a table of logits for
each prefix. The noise is keyed, so each test is of a fixed function and either holds or not. One
uniform number used for two choices shows, which the last tests make sure of.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
import torch

from routing.messages import Sampling
from stages.noise import Noise
from stages.sampling import Scorer, best
from stages.tree import accept
from tests.processors import truncation

VOCAB, LENGTH, PROMPT = 8, 3, 5
SEEDS = 2000
LEAST = 5.0  # expected in a cell of a chi-square; smaller ones are counted together

Path = tuple[int, ...]
Sampler = Callable[[Sampling, int], Path]
Position = Callable[[int], int]

OPTIONS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(2.0),
    Sampling(1.0, top_k=3),
    Sampling(1.0, top_p=0.7),
    Sampling(1.0, min_p=0.2),
    Sampling(1.0, typical_p=0.6),
]


def names(sampling: Sampling) -> str:
    options = msgspec.structs.asdict(sampling)
    return ",".join(f"{k}={v}" for k, v in options.items() if v != getattr(Sampling(), k))


def table() -> dict[Path, torch.Tensor]:
    """Logits (1, vocab) after each prefix: the next token depends on all before it."""
    generator = torch.Generator().manual_seed(5)
    prefixes = [p for n in range(LENGTH) for p in itertools.product(range(VOCAB), repeat=n)]
    return {
        prefix: torch.randn(1, VOCAB, generator=generator, dtype=torch.float64) * 1.2
        for prefix in prefixes
    }


TABLE = table()


def exact(sampling: Sampling) -> dict[Path, float]:
    """Probability of each sequence, by transformers' processors."""
    shaping = truncation(sampling)
    rows = {p: shaping(None, logits).softmax(1)[0].tolist() for p, logits in TABLE.items()}
    return {
        path: math.prod(rows[path[:n]][path[n]] for n in range(LENGTH))
        for path in itertools.product(range(VOCAB), repeat=LENGTH)
    }


class Target:
    """The table as a target model: the choice after a prefix."""

    def __init__(self, sampling: Sampling, seed: int, place: Position = lambda at: at) -> None:
        own = msgspec.structs.replace(sampling, seed=seed)
        self._scorer = Scorer(own, PROMPT, NOISE, VOCAB)
        self._place = place
        self.asked = 0

    def after(self, prefix: Path) -> int:
        self.asked += 1
        at = self._place(PROMPT + len(prefix))
        token = best(self._scorer.scores(TABLE[prefix], [prefix], [at])[0])
        assert token is not None
        return token


NOISE = Noise(positions=8)


def plain(sampling: Sampling, seed: int, place: Position = lambda at: at) -> Path:
    """One token at a time."""
    target, text = Target(sampling, seed, place), ()
    while len(text) < LENGTH:
        text = (*text, target.after(text))
    return text


def drafted(sampling: Sampling, seed: int, place: Position = lambda at: at) -> Path:
    """In rounds: a random tree is drafted, and accepted as far as the target goes along."""
    target, text = Target(sampling, seed, place), ()
    draws = random.Random(seed)
    while len(text) < LENGTH:
        tokens, parents, depth = [0], [-1], [len(text)]
        for node in range(1, 12):
            parent = draws.randrange(node)
            token = draws.randrange(VOCAB)
            if depth[parent] < LENGTH - 1 and (parent, token) not in zip(
                parents, tokens, strict=True
            ):
                tokens.append(token)
                parents.append(parent)
                depth.append(depth[parent] + 1)
            else:  # keeps the numbers of the nodes
                tokens.append(-node)
                parents.append(0)
                depth.append(len(text) + 1)

        def choose(node: int, below: Path, before: Path = text) -> int:
            return target.after((*before, *below))

        _, answer = accept(tokens, parents, choose)
        text = (*text, *answer)
    assert target.asked == LENGTH, "only what is accepted is scored"
    return text


def p_value(found: Counter[Path], expected: dict[Path, float]) -> float:
    """Of a chi-square test: the probability of a fit as poor as this, or poorer."""
    draws = sum(found.values())
    assert not [path for path in found if expected[path] == 0.0], "a token that was cut off"
    cells: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for path, share in expected.items():
        if share * draws >= LEAST:
            cells.append((found[path], share * draws))
        else:
            rest[0] += found[path]
            rest[1] += share * draws
    if rest[1] >= LEAST:
        cells.append((rest[0], rest[1]))
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def draws(sampler: Sampler, sampling: Sampling, seeds: int = SEEDS) -> Counter[Path]:
    return Counter(sampler(sampling, seed) for seed in range(seeds))


@pytest.mark.parametrize("sampling", OPTIONS, ids=names)
def test_samples_follow_the_exact_distribution(sampling: Sampling) -> None:
    """Drafted ones over all seeds; that they are the undrafted ones is looked at in a few."""
    expected = exact(sampling)
    assert math.isclose(sum(expected.values()), 1.0, rel_tol=1e-12)
    assert p_value(draws(drafted, sampling), expected) > 1e-3
    some = range(0, SEEDS, 10)
    assert [plain(sampling, s) for s in some] == [drafted(sampling, s) for s in some]


def test_the_test_itself_accepts_and_refuses() -> None:
    """torch's own sampler passes; another option's distribution does not."""
    expected = exact(OPTIONS[0])
    paths, shares = list(expected), torch.tensor(list(expected.values()))
    generator = torch.Generator().manual_seed(1)
    told = torch.multinomial(shares, SEEDS, replacement=True, generator=generator).tolist()
    assert p_value(Counter(paths[index] for index in told), expected) > 1e-3
    assert p_value(draws(plain, OPTIONS[1]), expected) < 1e-9


@pytest.mark.parametrize("sampler", [plain, drafted])
@pytest.mark.parametrize(
    "place",
    [lambda at: PROMPT, lambda at: at - at % 2, lambda at: max(at, PROMPT + 1)],
    ids=["one for all", "one for two", "the second for the first as well"],
)
def test_one_uniform_number_used_twice_is_noticed(
    sampler: Callable[[Sampling, int, Position], Path], place: Position
) -> None:
    sampling = OPTIONS[0]
    found = Counter(sampler(sampling, seed, place) for seed in range(SEEDS))
    assert p_value(found, exact(sampling)) < 1e-9
