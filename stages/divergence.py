"""How far two rows of scores over a vocabulary lie apart, taken in a piece at a time."""

from __future__ import annotations

import torch


class Divergence:
    """KL(p || q) of softmaxes, row by row, as the vocabulary comes by: float64, never held whole.

    With L and M the logarithms of both sums of exponentials, it is the mean under p of what p's
    logits have over q's, less L - M.
    """

    def __init__(self, rows: int) -> None:
        self._own = torch.full((rows,), float("-inf"), dtype=torch.float64)
        self._other = self._own.clone()
        self._excess = torch.zeros(rows, dtype=torch.float64)

    def see(self, own: torch.Tensor, other: torch.Tensor) -> None:
        """Logits (rows, some) of p and of q, of the same tokens."""
        own, other = own.double(), other.double()
        total = torch.logaddexp(self._own, own.logsumexp(dim=1))
        excess = ((own - total[:, None]).exp() * (own - other)).sum(dim=1)
        self._excess = self._excess * (self._own - total).exp() + excess
        self._own = total
        self._other = torch.logaddexp(self._other, other.logsumexp(dim=1))

    def mean(self) -> float:
        """Over all rows, in nats; NaN where some logits were not numbers."""
        return float((self._excess - self._own + self._other).mean())
