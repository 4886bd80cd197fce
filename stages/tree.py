"""Trees as lists: parents come before their children, node 0 is the root. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def ancestor_mask(parents: Sequence[int], nodes: Sequence[int] | None = None) -> torch.Tensor:
    """(rows, len(parents)) bool: node -> itself and its ancestors, for `nodes` (default: all)."""
    full = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            full[node] = full[parent]
        full[node, node] = True
    return full if nodes is None else full[list(nodes)]


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, the root at 0."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def accept(
    tokens: Sequence[int],
    parents: Sequence[int],
    choose: Callable[[int, tuple[int, ...]], int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Walk down from the root while a child carries the token that the target chooses.

    choose(node, below) is the target's token after a node, `below` being the tokens from the
    root's child down to that node. It is asked along the accepted path only, in order. Returns
    (path, answer): the accepted node indices from the root on, and the tokens they stand for
    (root not counted) followed by the bonus token.
    """
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
    }
    path: list[int] = [0]
    answer: tuple[int, ...] = ()
    while True:
        token = choose(path[-1], answer)
        answer = (*answer, token)
        child = children.get((path[-1], token))
        if child is None:
            return tuple(path), answer
        path.append(child)
