from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import LinkError
from stages.checkpoint import Checkpoint
from stages.embedding import Embedding
from tests.stages.made_files import sharded
from tests.stages.made_stages import normal

NAME = "model.embed_tokens.weight"
VOCAB, HIDDEN = 24, 8
WEIGHT = normal(VOCAB, HIDDEN, seed=0, dtype=torch.bfloat16)


class Counted:
    """A checkpoint that writes down which rows were read, and fails while `broken`."""

    def __init__(self, weight: torch.Tensor = WEIGHT) -> None:
        self.weight = weight
        self.reads: list[list[int]] = []
        self.handed: list[torch.Tensor] = []
        self.broken = False
        self.pause_s = 0.0

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        assert name == NAME
        if self.broken:
            raise LinkError("embeddings", "made to fail")
        self.reads.append(list(rows))
        self.handed.append(self.weight[list(rows)])
        time.sleep(self.pause_s)
        return self.handed[-1]


def same(rows: torch.Tensor) -> torch.Tensor:
    return rows


def made(counted: Counted, cached: int, dtype: torch.dtype = torch.float32) -> Embedding:
    return Embedding(cast(Checkpoint, counted), NAME, dtype, same, cached)


def true(tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return WEIGHT.to(dtype)[list(tokens)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(sharded(tmp_path, {"a.safetensors": {NAME: WEIGHT}})) as opened:
        yield opened


def test_rows_are_the_checkpoints_in_the_order_asked(checkpoint: Checkpoint) -> None:
    embedding = Embedding(checkpoint, NAME, torch.float32, same, cached=8)
    for tokens in ([5, 0, 5, 23, 5], [23], [0, 7, 5], list(range(VOCAB)), [3, 3]):
        rows = embedding.rows(tokens)
        assert rows.dtype is torch.float32
        assert torch.equal(rows, true(tokens))


def test_rows_are_converted_before_they_are_scaled(checkpoint: Checkpoint) -> None:
    """The architecture's scale is applied in the compute dtype, once, and cached with the row."""
    calls: list[torch.dtype] = []

    def scaled(rows: torch.Tensor) -> torch.Tensor:
        calls.append(rows.dtype)
        return rows * 1.7

    embedding = Embedding(checkpoint, NAME, torch.float64, scaled, cached=8)
    for _ in range(2):
        assert torch.equal(embedding.rows([1, 4]), true([1, 4], torch.float64) * 1.7)
    assert calls == [torch.float64]


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), max_size=12),
    st.integers(0, 6),
)
def test_any_history_gives_the_checkpoints_rows(asked: list[list[int]], cached: int) -> None:
    counted = Counted()
    embedding = made(counted, cached)
    for tokens in asked:
        rows = embedding.rows(tokens)
        assert torch.equal(rows, true(tokens))
        rows.fill_(7.0)  # the caller's own: what is kept does not change
        assert len(embedding._rows) <= cached
    for read in counted.reads:
        assert read == sorted(set(read))


def test_only_missing_rows_are_read() -> None:
    counted = Counted()
    embedding = made(counted, cached=4)
    for tokens in ([3, 1, 3], [1, 2], [3, 2, 1]):
        embedding.rows(tokens)
    assert counted.reads == [[1, 3], [2]]


def test_the_rows_used_last_are_kept() -> None:
    counted = Counted()
    embedding = made(counted, cached=2)
    for token in (1, 2, 1, 3):  # 3 drives out 2, as 1 was used after it
        embedding.rows([token])
    embedding.rows([1])
    assert counted.reads == [[1], [2], [3]]
    embedding.rows([2])
    assert counted.reads[-1] == [2]


def test_a_kept_row_does_not_hold_the_batch_it_came_in() -> None:
    counted = Counted()
    embedding = made(counted, cached=4, dtype=torch.bfloat16)  # nothing is converted
    embedding.rows([1, 2, 3])
    held = sum(row.untyped_storage().nbytes() for row in embedding._rows.values())
    assert held == 3 * HIDDEN * 2
    counted.handed[0].fill_(9.0)
    assert torch.equal(embedding.rows([2]), true([2], torch.bfloat16))


def test_a_failed_read_leaves_it_working() -> None:
    counted = Counted()
    embedding = made(counted, cached=4)
    embedding.rows([1])
    counted.broken = True
    with pytest.raises(LinkError):
        embedding.rows([1, 2])
    assert torch.equal(embedding.rows([1]), true([1]))
    counted.broken = False
    assert torch.equal(embedding.rows([2, 1]), true([2, 1]))
    assert counted.reads == [[1], [2]]


def test_two_threads_share_it() -> None:
    """A cache smaller than a request, so that each drives out what the other counts on."""
    counted = Counted()
    counted.pause_s = 0.0005
    embedding = made(counted, cached=3)
    wrong: list[object] = []

    def ask(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(40):
                tokens = torch.randint(6, (4,), generator=generator).tolist()
                if not torch.equal(embedding.rows(tokens), true(tokens)):
                    wrong.append(tokens)
        except Exception as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert len(embedding._rows) <= 3
