"""Token embeddings, read by rows from their tier: the matrix is never held whole when streamed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from stages.checkpoint import Checkpoint


class Embedding:
    """Rows of the embedding matrix in `dtype`, put through `finish` (the architecture's scale).

    Keeps the `cached` rows used last. Drafter and verifier share one; safe between threads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        dtype: torch.dtype,
        finish: Callable[[torch.Tensor], torch.Tensor],
        cached: int,
    ) -> None:
        self._checkpoint, self._name, self._dtype = checkpoint, name, dtype
        self._finish = finish
        self._cached = cached
        self._rows: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, tokens: Sequence[int]) -> torch.Tensor:
        """(len(tokens), hidden). Raises LinkError when the file cannot be read."""
        with self._lock:
            missing = sorted(set(tokens) - self._rows.keys())
            found = {}
            if missing:
                fresh = self._checkpoint.read_rows(self._name, missing).to(self._dtype)
                fresh = self._finish(fresh)
                found = dict(zip(missing, fresh, strict=True))
            for token in dict.fromkeys(tokens):
                found[token] = found.get(token, self._rows.get(token))  # type: ignore[arg-type]
            out = torch.stack([found[token] for token in tokens])
            self._keep(found)
        return out

    def _keep(self, found: dict[int, torch.Tensor]) -> None:
        for token, row in found.items():
            # Own storage: a view would keep its whole batch alive.
            self._rows[token] = row if row.untyped_storage().nbytes() == row.nbytes else row.clone()
            self._rows.move_to_end(token)
        while len(self._rows) > self._cached:
            self._rows.popitem(last=False)
