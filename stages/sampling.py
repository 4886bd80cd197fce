"""Which token comes next: the same answer for drafter and verifier, whoever asks.

A token is the argmax of its scores: logits that went through a request's options and, above
temperature 0, got the noise of their position (noise.py). A row is scored alone, whatever it
rides with, so its scores are the same bits in any company. Ties go to the lowest token id.

The options are transformers' own processors where it has them, in the order in which its
`generate` applies them; like there, 16-bit logits are processed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from routing.messages import Sampling
from stages.noise import Noise
from stages.processors import Processor, Shortlist, adjusters, through, warpers

__all__ = ["SHORTLIST", "Noise", "Scorer", "best", "processing_dtype"]


def processing_dtype(dtype: torch.dtype) -> torch.dtype:
    """What logits of `dtype` are processed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def best(scores: torch.Tensor) -> int | None:
    """The token of a row of scores (vocab,), the lowest of equals; None if it is no number.

    torch documents of max along a dimension that the first of equals is returned.
    """
    value, token = scores.max(dim=0)
    return int(token) if bool(torch.isfinite(value)) else None


SHORTLIST = 256
"""How many tokens a drafter may truncate among: sorting a whole row takes milliseconds."""


class Scorer:
    """Scores of one request's tokens. Belongs to one thread; `noise` may be shared."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: int,
        noise: Noise,
        vocab: int,
        *,
        shortlist: int | None = None,
    ) -> None:
        """`prompt`: how many tokens of a history are the prompt's.

        `shortlist`: truncate among that many of the likeliest tokens only. Quick, and right but
        for flat rows: for drafts, never for what decides.
        """
        self._sampling, self._noise, self._vocab = sampling, noise, vocab
        adjusting, warping = adjusters(sampling, prompt, vocab), warpers(sampling)
        self._simple = not adjusting and len(warping) <= 1
        if shortlist is not None and shortlist < vocab and len(warping) > 1:
            warping = [Shortlist(warping, shortlist)]
        self._processors: list[Processor] = [*adjusting, *warping]

    def scores(
        self,
        logits: torch.Tensor,
        histories: Sequence[Sequence[int]],
        positions: Sequence[int],
    ) -> torch.Tensor:
        """Scores (rows, vocab) in `processing_dtype`: row i's next token is their argmax.

        logits: (rows, vocab) in any float dtype, left as they are (and returned as they are where
        nothing applies). histories[i]: every token that row i continues, prompt included; not
        read unless sampling.looks_back. positions[i]: where the next token will stand.
        """
        assert logits.shape == (len(positions), self._vocab), (logits.shape, len(positions))
        logits = logits.to(processing_dtype(logits.dtype))
        if self._simple:
            return self._noisy(logits, positions)
        scored = [
            self._row(
                logits[index : index + 1],
                histories[index] if self._sampling.looks_back else (),
                position,
            )
            for index, position in enumerate(positions)
        ]
        return scored[0] if len(scored) == 1 else torch.cat(scored)

    def _noisy(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """The short way where there is nothing but a temperature: elementwise, so rows may mix."""
        sampling = self._sampling
        if sampling.temperature == 0.0:
            return logits
        scored = logits / sampling.temperature
        for index, position in enumerate(positions):
            scored[index] += self._noise.row(sampling.seed, position, self._vocab)
        return scored

    def _row(self, logits: torch.Tensor, history: Sequence[int], position: int) -> torch.Tensor:
        """(1, vocab) -> (1, vocab)."""
        ids = torch.tensor([history], dtype=torch.int64)
        scores = through(self._processors, ids, logits)
        if self._sampling.temperature == 0.0:
            return scores
        return scores + self._noise.row(self._sampling.seed, position, self._vocab)
