from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import DeviceMemoryError
from stages.device import PAGE, CpuDevice
from stages.kv import DraftScratch, KVStore
from tests.stages.made_stages import made_shape, normal

LAYERS, KV_HEADS, DIM = 3, 2, 4
SHAPE = made_shape(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, itemsize=4)
CAPACITY = 12
Rows = list[torch.Tensor]
"""What stands in rows, in order: (layers, keys and values, kv_heads, head_dim) each."""


@contextmanager
def stored(places: int = 2, capacity: int = CAPACITY, poison: bool = False) -> Iterator[KVStore]:
    store = KVStore(
        CpuDevice(), SHAPE, places=places, capacity=capacity, dtype=torch.float32, poison=poison
    )
    try:
        yield store
    finally:
        store.close()


def fresh(count: int, seed: int) -> Rows:
    rows = normal(count, LAYERS, 2, KV_HEADS, DIM, seed=seed, dtype=torch.float32)
    return list(rows)


def write(store: KVStore, place: int, rows: Rows, at: int = 0) -> None:
    if not rows:
        return
    for layer in range(LAYERS):
        keys = torch.stack([row[layer, 0] for row in rows], dim=1)
        values = torch.stack([row[layer, 1] for row in rows], dim=1)
        store.write(place, layer, at, keys, values)


def read(store: KVStore, place: int, scratch: int = 0) -> torch.Tensor:
    """(rows, layers, keys and values, kv_heads, head_dim) of what is committed, and scratch."""
    pairs = [torch.stack(store.view(place, layer, scratch)) for layer in range(LAYERS)]
    return torch.stack(pairs).permute(3, 0, 1, 2, 4).clone()


def same(found: torch.Tensor, rows: Rows) -> bool:
    return len(found) == len(rows) and all(map(torch.equal, found, rows))


def test_what_is_written_is_seen_before_it_counts() -> None:
    with stored() as store:
        rows = fresh(5, seed=1)
        write(store, 0, rows[:2])
        write(store, 0, rows[2:], at=2)  # a prompt's second chunk
        assert store.committed(0) == 0
        assert read(store, 0).shape[0] == 0
        assert same(read(store, 0, scratch=5), rows)
        assert same(read(store, 0, scratch=3), rows[:3])


def test_a_view_is_the_store_itself() -> None:
    with stored() as store:
        rows = fresh(2, seed=2)
        write(store, 1, rows[:1])
        keys, values = store.view(1, 0, scratch=1)
        assert keys.shape == values.shape == (KV_HEADS, 1, DIM)
        write(store, 1, rows[1:])
        assert torch.equal(keys[:, 0], rows[1][0, 0])
        assert torch.equal(values[:, 0], rows[1][0, 1])


@st.composite
def lives(draw: Any) -> list[tuple[str, int, int, list[int]]]:
    """Steps of several sessions: (kind, place, rows written, path accepted of them)."""
    steps: list[tuple[str, int, int, list[int]]] = []
    for _ in range(draw(st.integers(1, 10))):
        place = draw(st.integers(0, 2))
        if draw(st.integers(0, 5)) == 0:
            steps.append(("reset", place, 0, []))
            continue
        rows = draw(st.integers(0, 5))
        path = draw(st.lists(st.integers(0, max(0, rows - 1)), unique=True, max_size=rows))
        steps.append(("round", place, rows, sorted(path)))
    return steps


@given(lives(), st.booleans())
def test_commits_keep_exactly_the_accepted_rows(
    steps: list[tuple[str, int, int, list[int]]], poison: bool
) -> None:
    kept: list[Rows] = [[], [], []]
    with stored(places=3, capacity=60, poison=poison) as store:
        for number, (kind, place, count, path) in enumerate(steps):
            if kind == "reset":
                store.reset(place)
                kept[place] = []
            else:
                rows = fresh(count, seed=number)
                write(store, place, rows)
                assert same(read(store, place, scratch=count), kept[place] + rows)
                store.commit(place, path)
                kept[place] += [rows[row] for row in path]
            for each in range(3):
                assert store.committed(each) == len(kept[each])
                assert same(read(store, each), kept[each])
            assert store.rows_held == sum(map(len, kept))
            store.check()


@pytest.mark.parametrize("path", [[], [0], [0, 1, 2], [2], [0, 3, 5], [1, 2, 3, 4, 5]])
def test_a_commit_touches_no_row_but_those_that_move(path: list[int]) -> None:
    with stored(places=1) as store:
        first, second = fresh(3, seed=1), fresh(6, seed=2)
        write(store, 0, first)
        store.commit(0, [0, 1, 2])
        write(store, 0, second)
        before = read(store, 0, scratch=CAPACITY - 3)
        store.commit(0, path)
        after = read(store, 0, scratch=CAPACITY - 3 - len(path))
        kept = 3 + len(path)
        assert same(after[:kept], first + [second[row] for row in path])
        # The rest of the block is as it was, bit for bit, accepted rows above included.
        assert torch.equal(after[kept:], before[kept:])


def test_rows_that_are_where_they_belong_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    select = torch.Tensor.index_select

    def counted(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        copied.append(len(index))
        return select(self, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", counted)
    with stored() as store:
        write(store, 0, fresh(8, seed=3))
        store.commit(0, [0, 1, 2])
        assert copied == []
        write(store, 0, fresh(8, seed=4))
        store.commit(0, [0, 1, 4, 6])
        assert copied == [2]


@pytest.mark.parametrize("poison", [False, True])
def test_a_commit_that_fails_leaves_what_was_committed(
    poison: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise MemoryError("made to fail")

    with stored(poison=poison) as store:
        first, second = fresh(4, seed=1), fresh(5, seed=2)
        write(store, 0, first)
        store.commit(0, [0, 1, 3])
        write(store, 0, second)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "index_select", fails)
            with pytest.raises(MemoryError):
                store.commit(0, [0, 2, 4])
        kept = [first[0], first[1], first[3]]
        assert store.committed(0) == 3
        assert same(read(store, 0), kept)
        store.commit(0, [0, 2, 4])  # the scratch is whole too
        assert same(read(store, 0), [*kept, second[0], second[2], second[4]])


@pytest.mark.parametrize(
    "path",
    [
        [1, 0],
        [0, 0],
        [0, 2, 2],
        [0, CAPACITY - 2],
        pytest.param([-1]),
    ],
)
def test_a_path_that_cannot_be_is_a_bug(path: list[int]) -> None:
    with stored() as store:
        rows = fresh(4, seed=1)
        write(store, 0, rows)
        store.commit(0, [0, 1])
        with pytest.raises(AssertionError):
            store.commit(0, path)
        assert same(read(store, 0), rows[:2])


def test_rows_past_the_capacity_are_a_bug() -> None:
    with stored() as store:
        write(store, 0, fresh(CAPACITY, seed=1))  # all of it is fine
        store.commit(0, list(range(CAPACITY - 2)))
        whole = read(store, 0)
        for count, at in ((3, 0), (1, 2), (2, 1)):
            with pytest.raises(AssertionError, match="capacity"):
                write(store, 0, fresh(count, seed=2), at=at)
        assert torch.equal(read(store, 0), whole)


def test_a_full_place_still_commits() -> None:
    with stored() as store:
        rows = fresh(CAPACITY, seed=1)
        write(store, 0, rows)
        store.commit(0, [0, CAPACITY - 1])
        assert same(read(store, 0), [rows[0], rows[-1]])


def test_poison_is_wherever_nothing_counts() -> None:
    with stored(poison=True) as store:
        assert read(store, 0, scratch=CAPACITY).isnan().all()
        write(store, 0, fresh(6, seed=1))
        assert not read(store, 0, scratch=6).isnan().any()
        store.commit(0, [0, 2])
        assert not read(store, 0).isnan().any()
        assert read(store, 0, scratch=CAPACITY - 2)[2:].isnan().all()
        write(store, 1, fresh(3, seed=2))
        store.commit(1, [0, 1, 2])
        store.reset(0)
        assert store.committed(0) == 0
        assert read(store, 0, scratch=CAPACITY).isnan().all()
        assert not read(store, 1).isnan().any()


def test_memory_is_booked_and_given_back() -> None:
    device = CpuDevice()
    store = KVStore(device, SHAPE, places=3, capacity=CAPACITY, dtype=torch.float32)
    block = LAYERS * 2 * KV_HEADS * CAPACITY * DIM * 4
    assert device.memory.by_name == {"kv": 3 * (-(-block // PAGE) * PAGE)}
    store.close()
    store.close()
    assert device.memory.held == 0


def test_too_little_memory_is_said() -> None:
    with pytest.raises(DeviceMemoryError):
        KVStore(CpuDevice(limit=PAGE - 1), SHAPE, places=1, capacity=CAPACITY, dtype=torch.float32)


def test_a_store_that_does_not_fit_holds_nothing() -> None:
    device = CpuDevice(limit=2 * PAGE)
    with pytest.raises(DeviceMemoryError):
        KVStore(device, SHAPE, places=3, capacity=CAPACITY, dtype=torch.float32)
    assert device.memory.held == 0


def test_draft_rows_stand_by_node_and_layer() -> None:
    device = CpuDevice()
    scratch = DraftScratch(device, SHAPE, rows=6, dtype=torch.float32)
    rows = normal(LAYERS, 2, KV_HEADS, 6, DIM, seed=1, dtype=torch.float32)
    for layer in range(LAYERS):
        scratch.write(layer, 0, rows[layer, 0, :, :1], rows[layer, 1, :, :1])
        scratch.write(layer, 1, rows[layer, 0, :, 1:], rows[layer, 1, :, 1:])
    for layer in range(LAYERS):
        for count in (0, 1, 4, 6):
            keys, values = scratch.view(layer, count)
            assert torch.equal(keys, rows[layer, 0, :, :count])
            assert torch.equal(values, rows[layer, 1, :, :count])
    scratch.write(1, 2, rows[0, 0, :, :1], rows[0, 1, :, :1])  # the next tree overwrites
    assert torch.equal(scratch.view(1, 3)[0][:, 2], rows[0, 0, :, 0])
    assert torch.equal(scratch.view(2, 3)[0][:, 2], rows[2, 0, :, 2])
    scratch.close()
    assert device.memory.held == 0


@pytest.mark.parametrize("at", [5, 6, 9])
def test_draft_rows_past_the_end_are_a_bug(at: int) -> None:
    scratch = DraftScratch(CpuDevice(), SHAPE, rows=6, dtype=torch.float32)
    count = 2 if at == 5 else 1
    rows = torch.ones(KV_HEADS, count, DIM)
    try:
        with pytest.raises(AssertionError):
            scratch.write(0, at, rows, rows)
    finally:
        scratch.close()
