"""The reference for sampling: transformers' own processors, and plain ones for what it lacks.

Written apart from stages/sampling.py and one number at a time, so that both being wrong alike is
unlikely. Only the noise is ours.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from routing.messages import Sampling
from stages.noise import gumbel


class Biases(LogitsProcessor):  # type: ignore[misc]
    """logit_bias, allowed and banned tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, bias in self.sampling.logit_bias:
            scores[:, token] += bias
        for token in range(scores.shape[1]):
            allowed = self.sampling.allowed is None or token in self.sampling.allowed
            if not allowed or token in self.sampling.banned:
                scores[:, token] = -torch.inf
        return scores


class Counted(LogitsProcessor):  # type: ignore[misc]
    """Presence and frequency penalties over what follows the prompt."""

    def __init__(self, sampling: Sampling, prompt: int) -> None:
        self.sampling, self.prompt = sampling, prompt

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            for token, count in Counter(ids[self.prompt :]).items():
                scores[row, token] -= self.sampling.presence_penalty
                scores[row, token] -= self.sampling.frequency_penalty * count
        return scores


class Noisy(LogitsProcessor):  # type: ignore[misc]
    """The noise of the position after the history: then the argmax is a sample."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        noise = gumbel(self.seed, input_ids.shape[1], 0, scores.shape[1])
        return scores + noise.to(scores.dtype)


def truncation(sampling: Sampling) -> LogitsProcessorList:
    """What shapes the distribution above temperature 0, and no noise."""
    found = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p != 1.0:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p != 1.0:
        found.append(TypicalLogitsWarper(sampling.typical_p))
    return found


def processors(sampling: Sampling, prompt: int) -> LogitsProcessorList:
    """All of a request's: the argmax of what they leave is the next token."""
    found = LogitsProcessorList([Biases(sampling)])
    if sampling.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    found.append(Counted(sampling, prompt))
    if sampling.temperature:
        found += truncation(sampling)
        found.append(Noisy(sampling.seed))
    return found


@st.composite
def samplings(draw: Any, vocab: int) -> Sampling:
    """Any options, each off about half of the time; `vocab` of 40 or more leaves some tokens."""

    def now_and_then(strategy: st.SearchStrategy[Any], off: Any) -> Any:
        return draw(st.one_of(st.just(off), strategy))

    tokens = st.integers(0, vocab - 1)
    few = st.lists(tokens, max_size=4).map(tuple)
    allowed = st.lists(tokens, min_size=6, max_size=30, unique=True).map(tuple)
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0])),
        seed=draw(st.integers(0, 2**64)),
        top_k=now_and_then(st.integers(1, vocab + 3), 0),
        top_p=now_and_then(st.floats(0.01, 0.999), 1.0),
        min_p=now_and_then(st.floats(0.001, 1.0), 0.0),
        typical_p=now_and_then(st.floats(0.01, 0.999), 1.0),
        repetition_penalty=now_and_then(st.floats(0.5, 2.0), 1.0),
        presence_penalty=now_and_then(st.floats(-2.0, 2.0), 0.0),
        frequency_penalty=now_and_then(st.floats(-2.0, 2.0), 0.0),
        logit_bias=now_and_then(
            st.lists(st.tuples(tokens, st.floats(-5.0, 5.0)), max_size=4, unique_by=lambda p: p[0]),
            (),
        ),
        banned=now_and_then(few, ()),
        allowed=now_and_then(allowed, None),
    )
