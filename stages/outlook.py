"""What the drafter expects after each node that it ran."""

from __future__ import annotations

import msgspec
import torch

from stages.compiled import COMPILED, compiled_part


class Outlook(msgspec.Struct, frozen=True):
    """For each of some nodes: the likeliest tokens, and how sure the model is.

    likeliest: by node (log-probability, token) falling, none that cannot come; entropy: by node.
    Log-probabilities are scores (nodes, vocab) times `factor`, less `sums` (by node).
    """

    likeliest: list[list[tuple[float, int]]]
    entropy: list[float]
    scores: torch.Tensor
    sums: list[float]
    factor: float

    def log_prob(self, index: int, token: int) -> float:
        """Log-probability of any token after node `index`; scores must be as they were."""
        value = float(self.scores[index, token]) * self.factor - self.sums[index]
        return 0.0 if value > 0.0 else value  # rounding must not make it more than certain


def of_log_probs(log_probs: torch.Tensor, count: int) -> Outlook:
    """log_probs: (nodes, vocab) float32; the likeliest `count`."""
    values, tokens = torch.topk(log_probs, min(count, log_probs.shape[1]), dim=1)
    entropy = torch.special.entr(log_probs.exp()).sum(dim=1)
    zeros = [0.0] * len(log_probs)
    return Outlook(_pairs(values, tokens), entropy.tolist(), log_probs, zeros, 1.0)


def of_scores(scores: torch.Tensor, temperature: float, count: int) -> Outlook:
    """scores: (nodes, vocab), whose softmax at `temperature` is meant."""
    nodes, vocab = scores.shape
    if COMPILED is None or scores.dtype is not torch.float32 or not scores.is_contiguous():
        return of_log_probs(torch.log_softmax(scores / temperature, dim=-1), count)
    count = min(count, vocab)
    values, tokens = torch.empty(nodes, count), torch.empty(nodes, count, dtype=torch.int64)
    sums = torch.empty(nodes, 2, dtype=torch.float64)
    addresses = (t.data_ptr() for t in (values, tokens, sums))
    compiled_part.outlook(scores.data_ptr(), nodes, vocab, 1 / temperature, count, *addresses)
    found = sums.tolist()
    logs, entropy = [pair[0] for pair in found], [pair[1] for pair in found]
    return Outlook(_pairs(values, tokens), entropy, scores, logs, 1 / temperature)


def _pairs(values: torch.Tensor, tokens: torch.Tensor) -> list[list[tuple[float, int]]]:
    finite = torch.isfinite(values).tolist()
    return [
        [(value, token) for value, token, ok in zip(*row, strict=True) if ok]
        for row in zip(values.tolist(), tokens.tolist(), finite, strict=True)
    ]
