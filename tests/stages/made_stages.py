"""Made trees, shapes and skeletons for the tests of trees, stores, attention and the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import strategies as st

from stages.shapes import LayerShape, MatrixShape, ModelShape
from stages.skeleton import Skeleton


def made_shape(
    *, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, itemsize: int = 8
) -> ModelShape:
    """A shape without matrices: what the KV stores look at."""
    hidden, vocab = heads * head_dim, 32
    return ModelShape(
        architecture="llama",
        layers=tuple(LayerShape(index, ()) for index in range(layers)),
        small_bytes=0,
        vocab=vocab,
        hidden=hidden,
        intermediate=2 * hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head=MatrixShape("lm_head.weight", layers, vocab, hidden, vocab * hidden * itemsize),
        tied=False,
        source_itemsize=itemsize,
        compute_itemsize=itemsize,
        max_positions=64,
    )


def made_skeleton(finish: Callable[[torch.Tensor], torch.Tensor]) -> Skeleton:
    """As much of a skeleton as the head needs: what becomes of products on the way to logits."""
    return cast(Skeleton, SimpleNamespace(architecture=SimpleNamespace(finish=finish)))


@st.composite
def parent_lists(draw: Any, most: int = 10) -> list[int]:
    """Any tree of 1 to `most` nodes, by its parents: the root's is -1, others stand before."""
    nodes = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]


@st.composite
def token_trees(draw: Any, vocab: int = 3, most: int = 12) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree whose siblings have different tokens."""
    tokens, parents = [draw(st.integers(0, vocab - 1))], [-1]
    for _ in range(draw(st.integers(0, most - 1))):
        taken = set(zip(parents, tokens, strict=True))
        free = [
            (parent, token)
            for parent in range(len(tokens))
            for token in range(vocab)
            if (parent, token) not in taken
        ]
        parent, token = draw(st.sampled_from(free))
        parents.append(parent)
        tokens.append(token)
    return tokens, parents


def by_levels(parents: Sequence[int]) -> list[int]:
    """The same tree with its nodes in order of depth, as a drafter grows it."""
    order = sorted(range(len(parents)), key=lambda node: (len(path_to(parents, node)), node))
    place = {node: number for number, node in enumerate(order)}
    return [-1 if parents[node] < 0 else place[parents[node]] for node in order]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def normal(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Seeded normal numbers, the same for every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
