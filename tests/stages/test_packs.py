from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from routing.messages import Sampling
from stages.packs import Chunk, Rider, cut_packs
from tests.stages.made_stages import parent_lists, path_to


def rider(parents: list[int] | None, rows: int, position: int = 0, session: int = 0) -> Rider:
    own = None if parents is None else tuple(parents)
    return Rider(session, session, position, tuple(range(rows)), own, Sampling())


@st.composite
def crowds(draw: Any) -> list[Rider]:
    """Up to six riders, trees and prompts mixed."""
    riders = []
    for session in range(draw(st.integers(0, 6))):
        position = draw(st.integers(0, 30))
        if draw(st.booleans()):
            parents = draw(parent_lists(most=9))
            riders.append(rider(parents, len(parents), position, session))
        else:
            riders.append(rider(None, draw(st.integers(1, 25)), position, session))
    return riders


@given(crowds(), st.integers(1, 12))
def test_every_row_rides_once_and_in_order(riders: list[Rider], pack_rows: int) -> None:
    chunks = [chunk for pack in cut_packs(riders, pack_rows) for chunk in pack]
    rows = [(chunk.rider, row) for chunk in chunks for row in range(chunk.start, chunk.stop)]
    assert rows == [(i, row) for i, each in enumerate(riders) for row in range(len(each.tokens))]
    assert all(chunk.start < chunk.stop for chunk in chunks)


@given(crowds(), st.integers(1, 12))
def test_trees_stay_whole_and_packs_within_bounds(riders: list[Rider], pack_rows: int) -> None:
    for pack in cut_packs(riders, pack_rows):
        trees = [chunk for chunk in pack if riders[chunk.rider].parents is not None]
        for chunk in trees:
            assert (chunk.start, chunk.stop) == (0, len(riders[chunk.rider].tokens))
        alone = len(pack) == 1 and trees == pack  # a tree that is larger than a pack may be
        assert alone or sum(chunk.stop - chunk.start for chunk in pack) <= pack_rows
        assert pack


@given(crowds(), st.integers(1, 12))
def test_no_pack_is_begun_before_its_time(riders: list[Rider], pack_rows: int) -> None:
    packs = cut_packs(riders, pack_rows)
    for pack, following in itertools.pairwise(packs):
        room = pack_rows - sum(chunk.stop - chunk.start for chunk in pack)
        first = following[0]
        whole = riders[first.rider].parents is not None
        assert room <= 0 or (whole and first.stop - first.start > room)


def test_a_prompt_is_cut_where_a_pack_is_full() -> None:
    riders = [rider([-1, 0, 0], 3), rider(None, 10), rider([-1, 0], 2)]
    assert cut_packs(riders, 4) == [
        [Chunk(0, 0, 3), Chunk(1, 0, 1)],
        [Chunk(1, 1, 5)],
        [Chunk(1, 5, 9)],
        [Chunk(1, 9, 10), Chunk(2, 0, 2)],
    ]


def test_a_tree_larger_than_a_pack_rides_alone() -> None:
    riders = [rider(None, 2), rider([-1, 0, 0, 0, 0, 0], 6), rider(None, 1)]
    assert cut_packs(riders, 4) == [[Chunk(0, 0, 2)], [Chunk(1, 0, 6)], [Chunk(2, 0, 1)]]


@given(parent_lists(), st.integers(0, 50))
def test_nodes_stand_behind_the_committed_rows_by_their_depth(
    parents: list[int], position: int
) -> None:
    tree = rider(parents, len(parents), position)
    depths = [len(path_to(parents, node)) - 1 for node in range(len(parents))]
    assert tree.positions() == [position + depth for depth in depths]
    assert tree.asked() == list(range(len(parents)))


def test_a_prompt_is_consecutive_and_asks_its_last_row() -> None:
    prompt = rider(None, 5, position=3)
    assert prompt.positions() == [3, 4, 5, 6, 7]
    assert prompt.asked() == [4]


def test_whole_rows_are_for_options_and_logprobs() -> None:
    plain = rider(None, 3)
    assert not plain.whole
    for sampling in (Sampling(0.5), Sampling(banned=(3,)), Sampling(presence_penalty=0.1)):
        assert msgspec.structs.replace(plain, sampling=sampling).whole
    assert not msgspec.structs.replace(plain, sampling=Sampling(seed=4)).whole
    assert msgspec.structs.replace(plain, logprobs=0).whole
