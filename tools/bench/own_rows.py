"""A drafter's own keys and values of a text, in a KV store beside the target's.

What the engine does not do: its drafter reads the target's committed rows. A draft model of the
usual kind has none of these, so it runs every token through its own layers and keeps what comes of
that, as this does with the substitutes of a TreeDrafter. A row looks at those before it alone:
computed once over a whole text, the first rows are what they would be after any part of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from stages.kv import DraftScratch, KVStore
from tools.bench.target_rows import TargetRows
from tools.bench.tree_drafter import TreeDrafter

CHUNK = 64
"""Tokens that pass the layers in one call, so that scratch and workspace stay small."""


class OwnRows:
    """One place in a store of its own. `close` it before its drafter."""

    def __init__(
        self, target: TargetRows, drafter: TreeDrafter, capacity: int, chunk: int = CHUNK
    ) -> None:
        """`capacity`: the longest text. Raises DeviceMemoryError."""
        device, shape, dtype = target.device, target.shape, target.opened.dtype
        self._embedding, self._layers = target.embedding, len(shape.layers)
        with ExitStack() as undo:
            self.kv = KVStore(device, shape, places=1, capacity=capacity, dtype=dtype)
            undo.callback(self.kv.close)
            self._scratch = DraftScratch(device, shape, rows=chunk, dtype=dtype)
            undo.callback(self._scratch.close)
            self._stack = drafter.stack(self.kv, self._scratch)
            self.model = drafter.reading(self.kv)
            self._undo = undo.pop_all()

    def compute(self, text: Sequence[int]) -> float:
        """Hold the rows of `text` and no others; the seconds that took."""
        began = time.perf_counter()
        self.kv.reset(0)
        with torch.no_grad():
            for start in range(0, len(text), self._scratch.rows):
                self._append(text[start : start + self._scratch.rows], start)
        return time.perf_counter() - began

    def _append(self, tokens: Sequence[int], start: int) -> None:
        rows = len(tokens)
        seen = torch.ones(rows, rows, dtype=torch.bool).tril()
        positions = torch.arange(start, start + rows)
        self._stack.run(self._embedding.rows(tokens), 0, start, seen, positions)
        for layer in range(self._layers):
            self.kv.write(0, layer, 0, *self._scratch.view(layer, rows))
        self.kv.commit(0, range(rows))

    def close(self) -> None:
        """Give everything back."""
        self._undo.close()
