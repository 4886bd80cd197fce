"""Attention over rows that live in our stores: the function every decoder layer is given.

transformers lets a layer's attention be replaced by a registered function and passes unknown
keyword arguments of the layer on to it. So a layer is called with `riders=`, an object that knows
whose rows are in the pack, writes their keys and values where they belong and attends there; the
layers' own caches are never used, which also makes us independent of what a layer calls its cache
argument (`cache` in transformers 5.24, `past_key_values` in 5.17).

Linear layers see the packed rows of all riders; attention is per rider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stages.kv import DraftScratch, KVStore

IMPLEMENTATION = "paceline"


class Riders(Protocol):
    """Whoever's rows are in the pack of one layer call."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """q (heads, rows, head_dim), k and v (kv_heads, rows, head_dim) -> shaped like q."""
        ...


class How(msgspec.Struct, frozen=True):
    """What a layer asks of its attention: score scale, sliding window (positions), soft-cap."""

    scale: float
    window: int | None
    softcap: float | None


def register() -> None:
    """Make the function known to transformers under IMPLEMENTATION. May be called again."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    riders: Riders,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    how = How(scaling, sliding_window, softcap)
    layer = module.layer_idx
    out = riders.attend(int(layer), query[0], key[0], value[0], how)  # type: ignore[arg-type]
    return out.transpose(0, 1).unsqueeze(0), None


class TreeMask:
    """Who sees whom in a tree: committed rows are seen by all, nodes by their descendants.

    committed: rows before the tree; positions: (nodes,) of all nodes up to the last asked for;
    ancestors: (rows, nodes) bool, the rows asked for being the last ones. Committed row i stands
    at position i.
    """

    def __init__(self, committed: int, positions: torch.Tensor, ancestors: torch.Tensor) -> None:
        rows, nodes = ancestors.shape
        self._visible = torch.cat((torch.ones(rows, committed, dtype=torch.bool), ancestors), dim=1)
        keys = torch.cat((torch.arange(committed), positions))
        self._distance = positions[nodes - rows :, None] - keys[None, :]
        self._made: dict[int | None, torch.Tensor] = {}

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """(rows, committed + nodes): 0 where a row may look, -inf elsewhere.

        `window` is the number of positions a row may look at, itself included. The same few
        masks serve every layer, so they are kept.
        """
        made = self._made.get(window)
        if made is None:
            visible = self._visible
            if window is not None:
                visible = visible & (self._distance < window)
            made = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
            self._made[window] = made
        return made


class PromptMask:
    """Masks for chunks of consecutive rows: all of them windows into one triangle a window.

    rows: the longest chunk; keys: the longest run of keys. Takes rows x (keys + rows) numbers a
    kind of window, however many chunks the prompt has.
    """

    def __init__(self, rows: int, keys: int) -> None:
        self._rows, self._keys = rows, keys
        self._made: dict[int | None, torch.Tensor] = {}

    def chunk(self, rows: int, before: int) -> ChunkMask:
        """The mask of `rows` rows that have `before` rows before them."""
        return ChunkMask(self, rows, before)

    def bias(self, rows: int, before: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """(rows, before + rows), a view; see TreeMask.bias."""
        assert before <= self._keys and rows <= self._rows, (rows, before)
        made = self._made.get(window)
        if made is None:
            # Column `self._keys` stands for the chunk's first row.
            offset = torch.arange(self._rows)[:, None] - (
                torch.arange(self._keys + self._rows)[None, :] - self._keys
            )
            hidden = offset < 0
            if window is not None:
                hidden |= offset >= window
            made = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._made[window] = made
        return made[:rows, self._keys - before : self._keys + rows]


class ChunkMask(msgspec.Struct, frozen=True):
    """One chunk's part of a PromptMask."""

    whole: PromptMask
    rows: int
    before: int

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """See PromptMask.bias."""
        return self.whole.bias(self.rows, self.before, window, dtype)


class Span(msgspec.Struct, frozen=True):
    """One rider's rows: rows [start, stop) of a pack, scratch rows from `row` of `place` on."""

    place: int
    start: int
    stop: int
    row: int
    mask: TreeMask | ChunkMask


class SweepRiders:
    """The riders of one verification pack: each writes target KV into its own scratch rows.

    Rows of the pack that no span covers are padding: they get zeros.
    """

    def __init__(self, kv: KVStore, spans: Sequence[Span]) -> None:
        self._kv = kv
        self._spans = spans

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """See Riders."""
        out = torch.zeros_like(q)
        for span in self._spans:
            rows = slice(span.start, span.stop)
            self._kv.write(span.place, layer, span.row, k[:, rows], v[:, rows])
            count = span.stop - span.start
            keys, values = self._kv.view(span.place, layer, span.row + count)
            mask = span.mask.bias(how.window, q.dtype)
            out[:, rows] = _attend(q[:, rows], keys, values, mask, how)
        return out


class TextRiders:
    """One text by itself, all of it in the pack; nobody keeps its keys and values."""

    def __init__(self, mask: ChunkMask) -> None:
        self._mask = mask

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """See Riders."""
        return _attend(q, k, v, self._mask.bias(how.window, q.dtype), how)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, how: How
) -> torch.Tensor:
    if how.softcap is None:
        return functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=how.scale, enable_gqa=True
        )[0]
    scores = _scores(q, k, how) + mask
    exact = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=exact).to(q.dtype)
    return _mix(weights, v, q)


def _scores(q: torch.Tensor, k: torch.Tensor, how: How) -> torch.Tensor:
    """Scaled, capped scores (kv_heads, group, rows, keys)."""
    kv_heads, keys, dim = k.shape
    heads, rows, _ = q.shape
    grouped = q.reshape(kv_heads, heads // kv_heads * rows, dim)
    scores = torch.bmm(grouped, k.transpose(1, 2)).mul_(how.scale)
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    return scores.view(kv_heads, heads // kv_heads, rows, keys)


def _mix(weights: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    kv_heads, group, rows, keys = weights.shape
    mixed = torch.bmm(weights.reshape(kv_heads, group * rows, keys), v)
    return mixed.view(q.shape[0], rows, -1)


class DraftRiders:
    """One session's tree nodes in the drafter: committed rows are read, own scratch is written.

    The two runs of keys are attended together without being copied together: only the scores,
    which are small, are joined.
    """

    def __init__(
        self,
        kv: KVStore,
        scratch: DraftScratch,
        place: int,
        row: int,
        committed: int,
        mask: TreeMask,
    ) -> None:
        """`row`: the first scratch row to write; `committed`: rows of the store to look at, which
        may be fewer than there are by now."""
        self._kv, self._scratch, self._place, self._row = kv, scratch, place, row
        self._committed, self._mask = committed, mask

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """See Riders."""
        self._scratch.write(layer, self._row, k, v)
        own_k, own_v = self._scratch.view(layer, self._row + q.shape[1])
        old_k, old_v = self._kv.first(self._place, layer, self._committed)
        mask = self._mask.bias(how.window, q.dtype)
        scores = torch.cat((_scores(q, old_k, how), _scores(q, own_k, how)), dim=-1).add_(mask)
        weights = torch.softmax(scores, dim=-1)
        committed = self._committed
        return _mix(weights[..., :committed], old_v, q).add_(
            _mix(weights[..., committed:], own_v, q)
        )
