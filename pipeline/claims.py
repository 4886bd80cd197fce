"""What a plan charges before any weight: sizes that do not depend on which matrices are resident.

Every number here mirrors an allocation of the stages (KV store, head scan, sweep, embedding). They
are bounds, not estimates: the sum of a plan's claims must stay above the measured peak.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from stages.shapes import ModelShape

MIB = 1024 * 1024
_PAGE = 4096  # buffers of a device are whole pages
_SMALL_TENSORS = 6  # norms and biases of a layer, at most
_ROW_OBJECT_BYTES = 512  # a cached embedding row is a tensor of its own: object, storage, padding
_NOISE_BYTES = 40  # a token's noise while it is made: int64 and float64 steps of it
_FINISHED_LOGITS = ("gemma2", "granite")  # scaled or soft-capped after the product, in copies
_CAPPED_ATTENTION = ("gemma2",)  # soft-capped scores are computed step by step, in copies


class Claim(msgspec.Struct, frozen=True):
    """`nbytes` of the budget, for the thing called `name`."""

    name: str
    nbytes: int


class Allowances(msgspec.Struct, frozen=True):
    """How generously the stages may work. The stages must keep to the same numbers.

    workspace_bytes: allocator, Python objects, worker stacks: all that no other claim names.
    embedding_rows: rows of the embedding kept after use. head_block_rows: vocabulary rows scored
    at once. activation_factor: copies of a layer's widest rows that live at the same time.
    prefill_rows: rows that pass a layer in one call. ahead_rows: nodes that the drafter may run
    while a tree of as many or more is being verified. noise_rows: rows of sampling noise that are
    kept; noise_block: tokens whose noise is made at once. width: nodes a level of a draft tree;
    depths: the tree depths that the planner may choose from; lookup_depth: that of a tree that is
    looked up, one node a level. row_multiple: packs are padded to it. slots: numbers of slots that
    the planner may choose from; of equal plans the first wins. With 1 nothing arrives while a piece
    is computed.
    """

    workspace_bytes: int = 26 * MIB
    embedding_rows: int = 512
    head_block_rows: int = 8192
    activation_factor: int = 2
    prefill_rows: int = 64
    ahead_rows: int = 64
    noise_rows: int = 4
    noise_block: int = 8192
    width: int = 4
    depths: tuple[int, ...] = (4, 8, 12, 16, 24, 32)
    lookup_depth: int = 15
    row_multiple: int = 4
    slots: tuple[int, ...] = (3, 2, 4)


class TreeSize(NamedTuple):
    """The largest tree of a plan. `run`: by a draft model; otherwise it is looked up."""

    depth: int = 0
    width: int = 0
    run: bool = False

    @property
    def nodes(self) -> int:
        """Its root not counted; 0: nothing is drafted."""
        return self.depth * self.width


def padded(rows: int, multiple: int) -> int:
    """`rows` rounded up to a whole multiple."""
    return -(-rows // multiple) * multiple


def kv_row_bytes(shape: ModelShape) -> int:
    """Keys and values of one token in every layer."""
    return 2 * len(shape.layers) * shape.kv_heads * shape.head_dim * shape.compute_itemsize


def draft_rows(tree: TreeSize, allowances: Allowances) -> int:
    """Nodes that the drafter runs at most: a tree, and what is drafted ahead of its verdict."""
    return tree.nodes + 1 + min(tree.nodes, allowances.ahead_rows) if tree.run else 0


def verify_rows(tree: TreeSize, allowances: Allowances) -> int:
    """Rows that one session brings to a sweep: tree and root, padded."""
    return padded(tree.nodes + 1, allowances.row_multiple)


def pack_rows(context: int, allowances: Allowances) -> int:
    """Prompt rows that pass a layer in one call."""
    return min(allowances.prefill_rows, padded(context, allowances.row_multiple))


def work_claims(
    shape: ModelShape,
    allowances: Allowances,
    *,
    context: int,
    sessions: int,
    tree: TreeSize,
    head_rows: int,
    logit_rows: int,
) -> tuple[Claim, ...]:
    """Everything but weights, ring and decode buffer, in the order in which it is claimed.

    `logit_rows` are whole rows of logits of one session.
    """
    row = kv_row_bytes(shape)
    cached = min(shape.vocab, allowances.embedding_rows)
    scratch = sessions * verify_rows(tree, allowances)
    drafted = draft_rows(tree, allowances)
    embedding = cached * (shape.hidden * shape.compute_itemsize + _ROW_OBJECT_BYTES)
    pages = _PAGE * (len(shape.layers) * _SMALL_TENSORS + 1)
    return (
        Claim("small tensors", shape.small_bytes + pages),
        Claim("embedding rows", embedding),
        Claim("KV cache", sessions * context * row),
        Claim("KV scratch", (scratch + drafted) * row + _PAGE * (sessions + 1)),
        Claim("logits", _logits(shape, allowances, sessions, tree, head_rows)),
        Claim("logit rows", _PAGE + logit_rows * logit_row_bytes(shape, sessions)),
        Claim("noise", _noise(shape, allowances)),
        Claim("activations", _activations(shape, allowances, context, sessions, tree)),
        Claim("prompt states", sessions * context * _state_bytes(shape)),
        Claim("workspace", allowances.workspace_bytes),
    )


def context_token_bytes(shape: ModelShape, sessions: int) -> int:
    """What one token of context costs at least: what a smaller context gives back."""
    return sessions * (kv_row_bytes(shape) + _state_bytes(shape))


def logit_row_bytes(shape: ModelShape, sessions: int) -> int:
    """One whole row of logits for each session."""
    return sessions * shape.vocab * shape.compute_itemsize


def _state_bytes(shape: ModelShape) -> int:
    """One prompt row between layers: its hidden state, its cosines and sines."""
    return (shape.hidden + 2 * shape.head_dim) * shape.compute_itemsize


def _logits(
    shape: ModelShape, allowances: Allowances, sessions: int, tree: TreeSize, head_rows: int
) -> int:
    """The verifier's block of logits or, after it, a row being scored; the drafter's rows of a
    level; and what requests add to every row (logit_bias), which both sides keep."""
    item = shape.compute_itemsize
    scored = max(4, item)  # 16-bit logits are scored in float32
    block = min(head_rows, allowances.head_block_rows)
    rows = sessions * verify_rows(tree, allowances)
    copies = 3 if shape.architecture in _FINISHED_LOGITS else 1
    verifier = max(rows * block * copies * item, scoring_bytes(shape))
    biases = sessions * shape.vocab * scored
    if not tree.run:
        return verifier + biases
    drafter = allowances.width * shape.vocab * (item + 12)
    return verifier + drafter + biases + sessions * shape.vocab * 4


def scoring_bytes(shape: ModelShape) -> int:
    """What a row of logits takes while options are applied to it, in float32 at least.

    Typical sampling takes most: scores in six stages beside the row's own, indices, and half of
    both again in the sort itself; a row of 16 bits is copied first.
    """
    return shape.vocab * (8 * max(4, shape.compute_itemsize) + 24)


def _noise(shape: ModelShape, allowances: Allowances) -> int:
    """Rows of noise (float32) that are kept, two that are used but kept no more, one in making."""
    made = _NOISE_BYTES * min(shape.vocab, allowances.noise_block)
    return 4 * shape.vocab * (allowances.noise_rows + 2) + made


def _activations(
    shape: ModelShape, allowances: Allowances, context: int, sessions: int, tree: TreeSize
) -> int:
    """One layer call on a pack, every rider's mask, and scores where attention keeps them.

    Fused attention keeps none; soft-capped attention and the drafter's two-part one do.
    """
    pack = pack_rows(context, allowances)
    rows = max(pack, sessions * verify_rows(tree, allowances))
    widest = max(6 * shape.hidden, 3 * shape.intermediate)
    seen_at_once = max(pack, verify_rows(tree, allowances))
    keys = context + seen_at_once
    scores = 0
    if shape.architecture in _CAPPED_ATTENTION:
        scores = 4 * shape.heads * seen_at_once * keys * max(4, shape.compute_itemsize)
    elif tree.run:
        scores = 3 * shape.heads * allowances.width * keys * shape.compute_itemsize
    # Two kinds of window at most; while a mask is made its distances (int64) stand beside it.
    masks = seen_at_once * keys * (2 * sessions * shape.compute_itemsize + 9)
    layer = allowances.activation_factor * rows * widest * shape.compute_itemsize
    return layer + scores + masks
