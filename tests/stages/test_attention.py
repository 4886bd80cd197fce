"""Attention over stores against a dense reference, row by row along each row's own path.

Stores are poisoned: a key that nobody should see is a NaN, and would spoil the row that saw it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stages import attention
from stages.attention import (
    DraftRiders,
    How,
    PromptMask,
    Riders,
    Span,
    SweepRiders,
    TreeMask,
)
from stages.device import CpuDevice
from stages.kv import DraftScratch, KVStore
from stages.packs import cut_packs
from stages.tree import ancestor_mask, depths
from tests.stages.made_stages import by_levels, made_shape, normal, parent_lists, path_to
from tests.stages.test_packs import rider

HEADS, KV_HEADS, DIM = 6, 2, 4
SHAPE = made_shape(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
CAPACITY = 64
HOWS = st.builds(
    How,
    scale=st.sampled_from([0.5, 1.3]),
    window=st.sampled_from([None, 1, 2, 5, 40]),
    softcap=st.sampled_from([None, 0.8, 5.0]),
)
LAYERS = len(SHAPE.layers)
EACH = st.tuples(HOWS, HOWS)
"""What each layer asks: windows differ by layer, and one mask serves them all."""


class Rows(NamedTuple):
    """Queries (heads, rows, dim), keys and values (kv_heads, rows, dim) of some rows."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def part(self, start: int, stop: int) -> Rows:
        return Rows(*(each[:, start:stop] for each in self))


def made_rows(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Rows:
    return Rows(
        normal(HEADS, count, DIM, seed=3 * seed, dtype=dtype),
        normal(KV_HEADS, count, DIM, seed=3 * seed + 1, dtype=dtype),
        normal(KV_HEADS, count, DIM, seed=3 * seed + 2, dtype=dtype),
    )


def joined(rows: Sequence[Rows]) -> Rows:
    return Rows(*(torch.cat(parts, dim=1) for parts in zip(*rows, strict=True)))


def dense(old: Rows, own: Rows, parents: Sequence[int], how: How) -> torch.Tensor:
    """Each row decoded as if its path were all there is: committed rows, ancestors, itself."""
    out = torch.zeros_like(own.q)
    for node in range(own.q.shape[1]):
        path = path_to(parents, node)
        keys = torch.cat((old.k, own.k[:, path]), dim=1)
        values = torch.cat((old.v, own.v[:, path]), dim=1)
        if how.window is not None:
            keys, values = keys[:, -how.window :], values[:, -how.window :]
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = keys[group] @ own.q[head, node] * how.scale
            if how.softcap is not None:
                scores = torch.tanh(scores / how.softcap) * how.softcap
            out[head, node] = torch.softmax(scores, dim=0) @ values[group]
    return out


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


class Bench:
    """A poisoned store with `committed` rows a place, the same in every layer but for a factor."""

    def __init__(self, committed: Sequence[int], dtype: torch.dtype = torch.float64) -> None:
        self.device = CpuDevice()
        self.kv = KVStore(
            self.device, SHAPE, places=len(committed), capacity=CAPACITY, dtype=dtype, poison=True
        )
        self.old = [made_rows(rows, 100 + place, dtype) for place, rows in enumerate(committed)]
        for place, old in enumerate(self.old):
            for layer in range(LAYERS):
                self.kv.write(place, layer, 0, old.k * (layer + 1), old.v)
            self.kv.commit(place, range(committed[place]))

    def committed(self, place: int, layer: int = 0) -> Rows:
        old = self.old[place]
        return Rows(old.q, old.k * (layer + 1), old.v)

    def tree_mask(self, place: int, parents: Sequence[int]) -> TreeMask:
        committed = self.kv.committed(place)
        positions = torch.tensor([committed + depth for depth in depths(parents)])
        return TreeMask(committed, positions, ancestor_mask(parents))


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


@settings(max_examples=40)
@given(parent_lists(), st.integers(0, 9), EACH, st.integers(0, 1000))
def test_a_tree_attends_along_its_paths(
    parents: list[int], committed: int, each: tuple[How, How], seed: int
) -> None:
    bench = Bench([committed])
    rows = made_rows(len(parents), seed)
    span = Span(0, 0, len(parents), 0, bench.tree_mask(0, parents))
    riders = SweepRiders(bench.kv, [span])
    for layer, how in enumerate(each):
        out = riders.attend(layer, *rows, how)
        expected = dense(bench.committed(0, layer), rows, parents, how)
        assert_same(out, expected)
        for found, wanted in zip(bench.kv.view(0, layer, len(parents)), rows[1:], strict=True):
            assert torch.equal(found[:, committed:], wanted)


@settings(max_examples=40)
@given(
    st.integers(1, 14),
    st.integers(0, 5),
    st.lists(st.integers(1, 13), max_size=4),
    EACH,
    st.integers(0, 1000),
)
def test_chunks_of_a_prompt_equal_the_whole(
    count: int, committed: int, cuts: list[int], each: tuple[How, How], seed: int
) -> None:
    """Layer by layer, as a sweep passes all chunks through one before it fetches the next."""
    bench = Bench([committed])
    rows = made_rows(count, seed)
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    longest = max(stop - start for start, stop in itertools.pairwise(edges))
    mask = PromptMask(longest, committed + count)
    for layer, how in enumerate(each):
        parts = []
        for start, stop in itertools.pairwise(edges):
            chunk = mask.chunk(stop - start, committed + start)
            riders = SweepRiders(bench.kv, [Span(0, 0, stop - start, start, chunk)])
            parts.append(riders.attend(layer, *rows.part(start, stop), how))
        expected = dense(bench.committed(0, layer), rows, chain(count), how)
        assert_same(torch.cat(parts, dim=1), expected)


@st.composite
def crowds(draw: Any) -> list[tuple[list[int] | None, int, int]]:
    """(parents or None for a prompt, rows, committed rows) of one to four riders."""
    crowd: list[tuple[list[int] | None, int, int]] = []
    for _ in range(draw(st.integers(1, 4))):
        committed = draw(st.integers(0, 6))
        if draw(st.booleans()):
            parents = draw(parent_lists(most=7))
            crowd.append((parents, len(parents), committed))
        else:
            crowd.append((None, draw(st.integers(1, 12)), committed))
    return crowd


@settings(max_examples=40)
@given(crowds(), st.integers(1, 8), st.integers(0, 3), HOWS)
def test_riders_in_packs_attend_as_if_alone(
    crowd: list[tuple[list[int] | None, int, int]], pack_rows: int, padding: int, how: How
) -> None:
    """Packs as a sweep cuts them, each padded with rows that must come out as zeros."""
    bench = Bench([committed for _, _, committed in crowd])
    own = [made_rows(rows, seed) for seed, (_, rows, _) in enumerate(crowd)]
    riders = [rider(parents, rows, committed) for parents, rows, committed in crowd]
    masks = [
        PromptMask(min(rows, pack_rows), committed + rows)
        if parents is None
        else bench.tree_mask(place, parents)
        for place, (parents, rows, committed) in enumerate(crowd)
    ]
    found: list[list[torch.Tensor]] = [[] for _ in crowd]
    for pack in cut_packs(riders, pack_rows):
        spans: list[Span] = []
        for chunk in pack:
            begin = spans[-1].stop if spans else 0
            count, mask = chunk.stop - chunk.start, masks[chunk.rider]
            if isinstance(mask, PromptMask):
                mask = mask.chunk(count, crowd[chunk.rider][2] + chunk.start)  # type: ignore[assignment]
            spans.append(Span(chunk.rider, begin, begin + count, chunk.start, cast(TreeMask, mask)))
        packed = joined(
            [own[chunk.rider].part(chunk.start, chunk.stop) for chunk in pack]
            + [made_rows(padding, seed=77)]
        )
        out = SweepRiders(bench.kv, spans).attend(0, *packed, how)
        assert out.shape == packed.q.shape
        assert not out[:, spans[-1].stop :].any()
        for span in spans:
            found[span.place].append(out[:, span.start : span.stop])
    for place, (parents, rows, _) in enumerate(crowd):
        expected = dense(bench.committed(place), own[place], parents or chain(rows), how)
        assert_same(torch.cat(found[place], dim=1), expected)


@settings(max_examples=40)
@given(parent_lists(), st.integers(0, 9), EACH, st.integers(0, 1000))
def test_a_draft_grown_by_levels_equals_the_tree(
    parents: list[int], committed: int, each: tuple[How, How], seed: int
) -> None:
    parents = by_levels(parents)
    bench = Bench([0, committed])
    scratch = DraftScratch(bench.device, SHAPE, rows=len(parents), dtype=torch.float64)
    before = [stored.clone() for stored in bench.kv.view(1, 1)]
    rows = made_rows(len(parents), seed)
    levels = depths(parents)
    outs: list[list[torch.Tensor]] = [[] for _ in each]
    for level in range(max(levels) + 1):
        nodes = [node for node, depth in enumerate(levels) if depth == level]
        first, last = nodes[0], nodes[-1]
        positions = torch.tensor([committed + depth for depth in levels[: last + 1]])
        mask = TreeMask(committed, positions, ancestor_mask(parents[: last + 1], nodes))
        riders = DraftRiders(bench.kv, scratch, 1, first, committed, mask)
        for layer, how in enumerate(each):
            outs[layer].append(riders.attend(layer, *rows.part(first, last + 1), how))
    for layer, how in enumerate(each):
        expected = dense(bench.committed(1, layer), rows, parents, how)
        assert_same(torch.cat(outs[layer], dim=1), expected)
    # Draft rows never get among the target's.
    assert bench.kv.committed(1) == committed
    for found, wanted in zip(bench.kv.view(1, 1), before, strict=True):
        assert torch.equal(found, wanted)
    keys, _ = bench.kv.view(1, 1, scratch=CAPACITY - committed)
    assert keys[:, committed:].isnan().all()


def test_a_row_is_bit_equal_whoever_rides_beside_it() -> None:
    how = How(0.5, 6, None)
    parents = [-1, 0, 0, 1, 1, 3]
    rows = made_rows(6, seed=1, dtype=torch.float32)
    outs = []
    for other in (2, 9):
        bench = Bench([5, other], torch.float32)
        beside = made_rows(3, seed=other, dtype=torch.float32)
        spans = [
            Span(1, 0, 3, 0, bench.tree_mask(1, chain(3))),
            Span(0, 3, 9, 0, bench.tree_mask(0, parents)),
        ]
        out = SweepRiders(bench.kv, spans).attend(0, *joined([beside, rows]), how)
        outs.append(out[:, 3:])
    assert torch.equal(*outs)
    torch.testing.assert_close(
        outs[0], dense(bench.committed(0), rows, parents, how), rtol=1e-5, atol=1e-5
    )


def test_accepted_rows_serve_the_next_tree() -> None:
    """Two rounds with a rejected branch between them equal one long text."""
    how = How(0.7, 4, None)
    bench = Bench([3])
    first, second = made_rows(5, seed=1), made_rows(3, seed=2)
    parents = [-1, 0, 0, 2, 3]
    riders = SweepRiders(bench.kv, [Span(0, 0, 5, 0, bench.tree_mask(0, parents))])
    riders.attend(0, *first, how)
    bench.kv.commit(0, [0, 2, 3])
    riders = SweepRiders(bench.kv, [Span(0, 0, 3, 0, bench.tree_mask(0, [-1, 0, 0]))])
    out = riders.attend(0, *second, how)
    kept = Rows(*(each[:, [0, 2, 3]] for each in first))
    old = joined([bench.committed(0), kept])
    assert_same(out, dense(old, second, [-1, 0, 0], how))


@pytest.mark.parametrize("window", [None, 3])
def test_masks_of_a_prompt_are_parts_of_one_triangle(window: int | None) -> None:
    mask = PromptMask(4, 10)
    for before in range(7):
        for rows in range(1, 5):
            bias = mask.chunk(rows, before).bias(window, torch.float64)
            assert bias.shape == (rows, before + rows)
            for row, key in itertools.product(range(rows), range(before + rows)):
                distance = before + row - key
                seen = distance >= 0 and (window is None or distance < window)
                assert bias[row, key] == (0.0 if seen else float("-inf"))
    storages = {
        mask.bias(rows, before, window, torch.float64).untyped_storage().data_ptr()
        for rows, before in ((4, 0), (2, 5), (1, 6))
    }
    assert len(storages) == 1


def test_the_registered_function_passes_on_what_the_layer_asks() -> None:
    attention.register()
    attention.register()
    call = ALL_ATTENTION_FUNCTIONS[attention.IMPLEMENTATION]
    seen: list[Any] = []

    class Spy:
        def attend(
            self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
        ) -> torch.Tensor:
            seen.append((layer, q.shape, k.shape, how))
            return q

    spy: Riders = Spy()
    rows = made_rows(5, seed=1)
    module, lead = SimpleNamespace(layer_idx=3), [each[None] for each in rows]
    out, weights = call(
        module, *lead, None, scaling=0.5, riders=spy, sliding_window=7, softcap=2.0, dropout=0.0
    )
    assert weights is None
    assert torch.equal(out, rows.q.transpose(0, 1)[None])  # (1, rows, heads, head_dim)
    call(module, *lead, None, scaling=0.25, riders=spy)
    shapes = (3, (HEADS, 5, DIM), (KV_HEADS, 5, DIM))
    assert seen == [(*shapes, How(0.5, 7, 2.0)), (*shapes, How(0.25, None, None))]
