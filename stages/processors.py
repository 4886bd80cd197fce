"""Steps from logits to scores, each with transformers' interface and its own where it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from routing.messages import Sampling

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(1, history) ids and (1, vocab) scores, left as they are -> (1, vocab) scores."""


class Biases:
    """logit_bias, allowed and banned tokens, as one row that is added to every other."""

    def __init__(self, sampling: Sampling, vocab: int) -> None:
        self._sampling, self._vocab = sampling, vocab
        self._row: torch.Tensor | None = None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._row is None or self._row.dtype != scores.dtype:
            self._row = self._made(scores.dtype)
        return scores + self._row

    def _made(self, dtype: torch.dtype) -> torch.Tensor:
        """(vocab,): -inf for tokens that may not come."""
        sampling = self._sampling
        row = torch.zeros(self._vocab, dtype=dtype)
        for token, value in sampling.logit_bias:
            row[token] += value
        if sampling.allowed is not None:
            refused = torch.ones(self._vocab, dtype=torch.bool)
            refused[list(sampling.allowed)] = False
            row[refused] = -torch.inf
        row[list(sampling.banned)] = -torch.inf
        return row


class Penalties:
    """Presence and frequency penalties (OpenAI's) for the tokens behind the prompt.

    A token that came n times loses presence + n × frequency.
    """

    def __init__(self, sampling: Sampling, prompt: int) -> None:
        self._sampling, self._prompt = sampling, prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens, counts = torch.unique(ids[0, self._prompt :], return_counts=True)
        changed = scores[0, tokens] - self._sampling.presence_penalty
        changed = changed - (self._sampling.frequency_penalty * counts.double()).to(scores.dtype)
        return scores.index_copy(1, tokens, changed[None])


class Shortlist:
    """`processors` on the `size` likeliest tokens alone; the others are out."""

    def __init__(self, processors: Sequence[Processor], size: int) -> None:
        self._processors, self._size = processors, size

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        values, tokens = torch.topk(scores, self._size)
        kept = through(self._processors, ids, values)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, kept)


def through(
    processors: Sequence[Processor], ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Scores (1, vocab) after all of `processors`, in order."""
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def adjusters(sampling: Sampling, prompt: int, vocab: int) -> list[Processor]:
    """What applies at any temperature."""
    found: list[Processor] = []
    if sampling.logit_bias or sampling.banned or sampling.allowed is not None:
        found.append(Biases(sampling, vocab))
    if sampling.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        found.append(Penalties(sampling, prompt))
    return found


def warpers(sampling: Sampling) -> list[Processor]:
    """What applies above temperature 0, in transformers' order: the temperature, truncation."""
    if sampling.temperature == 0.0:
        return []
    found: list[Processor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k > 0:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        found.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1.0:
        found.append(TypicalLogitsWarper(sampling.typical_p))
    return found
