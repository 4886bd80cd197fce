"""Log-probabilities of a row: the target's own, before any sampling option."""

from __future__ import annotations

import torch

from routing.messages import TokenLogprob
from stages.sampling import processing_dtype


def token_logprob(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """Of `token` and of the `count` likeliest (fewer in a smaller vocabulary), best first.

    logits: (vocab,) in any float dtype; computed in float32 at least. Of equals the lowest ids
    are named, in order.
    """
    found = torch.log_softmax(logits.to(processing_dtype(logits.dtype)), dim=0)
    return TokenLogprob(token, float(found[token]), _likeliest(found, min(count, len(found))))


def _likeliest(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    # topk says nothing about ties, so it only tells how likely the last one named is.
    least = torch.topk(logprobs, count).values[-1]
    tokens = (logprobs >= least).nonzero()[:, 0]
    values, order = torch.sort(logprobs[tokens], descending=True, stable=True)
    named = zip(tokens[order].tolist(), values.tolist(), strict=True)
    return tuple(named)[:count]
