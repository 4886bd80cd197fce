"""The head as the last layer of a sweep: what each asked row says of the vocabulary.

The vocabulary comes in pieces, in any number and order of rows. For riders that take the largest
logit a running maximum is all that is kept, so the logits of a whole vocabulary never exist at
once; whoever samples or asks for log-probabilities needs whole rows, which are copied together
(LogitRows). All rows go through one product, so what a row says does not depend on who rides.
Ties go to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch.nn import functional

from stages.device import Device
from stages.skeleton import Skeleton

BLOCK_ROWS = 8192
"""Vocabulary rows scored at once: bounds the logits of a head that is resident whole."""


class LogitRows:
    """Room for whole rows of logits on a device: `each` a session, (rows, vocab) in all.

    One sweep's at a time. Raises DeviceMemoryError when the device has less.
    """

    def __init__(
        self, device: Device, *, sessions: int, each: int, vocab: int, dtype: torch.dtype
    ) -> None:
        self.each = each
        self.rows = sessions * each
        self._buffer = device.allocate(self.rows * vocab * dtype.itemsize, "logit rows")
        self._block = self._buffer.tensor(dtype, (self.rows, vocab), 0)

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop), not copied: good until the next sweep writes them."""
        assert 0 <= start <= stop <= self.rows, f"logit rows {start} to {stop} of {self.rows}"
        return self._block[start:stop]

    def close(self) -> None:
        """Give the memory back."""
        self._block = torch.empty(0)
        self._buffer.free()


class Whole(msgspec.Struct, frozen=True):
    """Hidden rows [start, stop), whose logits go into `logits`, (stop - start, vocab)."""

    start: int
    stop: int
    logits: torch.Tensor


class HeadScan:
    """The running choice of `hidden`'s rows, (rows, hidden), already through the final norm."""

    def __init__(
        self, skeleton: Skeleton, hidden: torch.Tensor, whole: Sequence[Whole] = ()
    ) -> None:
        self._skeleton, self._hidden, self._whole = skeleton, hidden, whole
        rows = hidden.shape[0]
        self._best = torch.full((rows,), float("-inf"), dtype=hidden.dtype)
        self._token = torch.zeros(rows, dtype=torch.int64)

    def see(self, start: int, weight: torch.Tensor) -> None:
        """Take in vocabulary rows [start, start + len(weight)); call with rising `start`."""
        for begin in range(0, weight.shape[0], BLOCK_ROWS):
            self._see(start + begin, weight[begin : begin + BLOCK_ROWS])

    def _see(self, start: int, weight: torch.Tensor) -> None:
        logits = functional.linear(self._hidden, weight)
        logits = self._skeleton.architecture.finish(logits)
        for rows in self._whole:
            rows.logits[:, start : start + weight.shape[0]] = logits[rows.start : rows.stop]
        value, token = logits.max(dim=1)
        # Strictly better only: an equal score at a higher token id must not win.
        # A NaN wins and stays, so that broken weights are seen and not sampled from.
        better = (value > self._best) | value.isnan()
        self._token = torch.where(better, token + start, self._token)
        self._best = torch.where(better, value, self._best)

    def chosen(self) -> list[int | None]:
        """The token of each row's largest logit; None where the logits are not numbers."""
        sound = torch.isfinite(self._best).tolist()
        return [t if ok else None for t, ok in zip(self._token.tolist(), sound, strict=True)]
