"""Whether these tests would notice: something is broken on purpose, and the tokens must change.

A comparison of tokens proves nothing on a model that hardly looks at its history, or in an engine
that hardly uses what it has committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from stages.kv import KVStore
from tests import made
from tests.pipeline.made_engine import made_engine

TOKENS = 28
IDS = made.make_prompt(320, 14, seed=21)
Commit = Callable[[KVStore, int, Sequence[int]], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama")


async def tokens_of(model: Path) -> list[int]:
    async with made_engine(model, width=4, poison=False) as engine:
        answer = await engine.generate(IDS, max_tokens=TOKENS)
        assert answer.drafted > 0
    return list(answer.token_ids)


def corrupts(layer: int, half: int, row: int) -> Commit:
    """Turns one row of keys (half 0) or values (1) around, once, after the second round."""
    commit = KVStore.commit
    commits: list[int] = []

    def planted(kv: KVStore, place: int, path: Sequence[int]) -> None:
        commit(kv, place, path)
        commits.append(kv.committed(place))
        if len(commits) == 3:
            kv.view(place, layer)[half][:, row] *= -1

    return planted


@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize(("layer", "row"), [(0, 0), (1, 7), (2, -1), (3, 12)])
async def test_one_corrupted_row_changes_the_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch, layer: int, half: int, row: int
) -> None:
    right = made.reference_generate(model, IDS, TOKENS)
    monkeypatch.setattr(KVStore, "commit", corrupts(layer, half, row))
    wrong = await tokens_of(model)
    assert wrong[0] == right[0], "nothing was corrupted yet"
    assert wrong != right


async def test_nothing_corrupted_changes_nothing(model: Path) -> None:
    assert await tokens_of(model) == made.reference_generate(model, IDS, TOKENS)


def commits_siblings(kv: KVStore, place: int, path: Sequence[int]) -> None:
    """As many rows as were accepted, but the first ones of the tree."""
    COMMIT(kv, place, range(len(path)))


def commits_one_too_early(kv: KVStore, place: int, path: Sequence[int]) -> None:
    """The row before the last is committed twice, and the last one not at all."""
    COMMIT(kv, place, path)
    if len(path) > 1:
        for layer in range(4):
            for rows in kv.view(place, layer):
                rows[:, -1] = rows[:, -2]


COMMIT = KVStore.commit


@pytest.mark.parametrize("planted", [commits_siblings, commits_one_too_early])
async def test_wrong_rows_committed_change_the_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch, planted: Commit
) -> None:
    monkeypatch.setattr(KVStore, "commit", planted)
    assert await tokens_of(model) != made.reference_generate(model, IDS, TOKENS)


async def test_what_a_substitute_would_compute_changes_the_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed rows that are only nearly the target's: rounded to about one part in a hundred."""
    write = KVStore.write

    def planted(
        kv: KVStore, place: int, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        write(kv, place, layer, row, keys.bfloat16().double(), _rounded(values))

    monkeypatch.setattr(KVStore, "write", planted)
    assert await tokens_of(model) != made.reference_generate(model, IDS, TOKENS)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax(dim=-1, keepdim=True) / 63
    return torch.round(x / step) * step
