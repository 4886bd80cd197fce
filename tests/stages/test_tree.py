from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.tree import accept, ancestor_mask, depths
from tests.stages.made_stages import parent_lists, path_to, token_trees

Path = tuple[int, ...]


@given(parent_lists(), st.data())
def test_the_mask_of_a_tree_is_that_of_its_paths(parents: list[int], data: st.DataObject) -> None:
    mask = ancestor_mask(parents)
    assert mask.dtype is torch.bool
    assert mask.shape == (len(parents), len(parents))
    for node, seen in enumerate(mask):
        assert seen.nonzero().flatten().tolist() == sorted(path_to(parents, node))
    nodes = data.draw(st.lists(st.integers(0, len(parents) - 1), min_size=1))
    assert torch.equal(ancestor_mask(parents, nodes), mask[nodes])
    assert depths(parents) == [len(path_to(parents, node)) - 1 for node in range(len(parents))]


@given(token_trees(), st.integers(0, 10_000))
def test_acceptance_is_what_one_token_at_a_time_gives(
    tree: tuple[list[int], list[int]], seed: int
) -> None:
    tokens, parents = tree

    def target(path: Path) -> int:
        return hash((seed, *path)) % 3

    chosen = [
        target(tuple(tokens[step] for step in path_to(parents, node)))
        for node in range(len(tokens))
    ]
    asked: list[int] = []

    def choose(node: int, below: Path) -> int:
        asked.append(node)
        assert below == tuple(tokens[step] for step in path_to(parents, node)[1:])
        return chosen[node]

    path, answer = accept(tokens, parents, choose)
    assert tuple(asked) == path, "only what is accepted is scored"
    text = [tokens[0]]
    for token in answer:
        assert token == target(tuple(text))
        text.append(token)
    assert list(path) == path_to(parents, path[-1])
    assert tuple(tokens[node] for node in path[1:]) == answer[:-1]
    # It goes as far as the tree does: no draft carries the bonus token.
    assert (path[-1], answer[-1]) not in set(zip(parents, tokens, strict=True))
    # The longest path all of whose tokens the target would have chosen, by trying all.
    agreed = [
        node
        for node in range(len(tokens))
        if all(chosen[parents[step]] == tokens[step] for step in path_to(parents, node)[1:])
    ]
    assert path[-1] == max(agreed, key=lambda node: len(path_to(parents, node)))


def test_a_root_alone_gives_the_next_token() -> None:
    assert accept([5], [-1], lambda node, below: 9) == ((0,), (9,))


def test_the_roots_own_token_is_no_draft_of_itself() -> None:
    # The target repeats the root's token, which is nobody's child.
    assert accept([5, 6], [-1, 0], lambda node, below: 5) == ((0,), (5,))
