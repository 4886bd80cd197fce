"""Requests put to an engine as messages, with any option, past the checks of its edge.

And what transformers' generate answers to the same, one token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline.engine import Engine
from routing.mailboxes import EndOfMail
from routing.messages import Request, Sampling, TokenLogprob
from routing.sessions import Session
from tests.processors import processors
from tests.reference import alone, reference_model


class Told(NamedTuple):
    """What came back for a request."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    session: Session


def ask(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, max_tokens: int, **options: Any
) -> Session:
    """Queue a request; `options` are further fields of it."""
    request = Request(next(engine._ids), tuple(prompt), max_tokens, sampling, **options)
    session = engine.sessions.open(request)
    engine.topology.admission.send_nowait(session.id)
    return session


async def told(session: Session) -> Told:
    """The whole answer. Raises the session's error."""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    with session.batches as batches:
        while True:
            try:
                batch = await batches.receive()
            except EndOfMail:
                break
            tokens += batch.tokens
            logprobs += batch.logprobs
    if session.error is not None:
        raise session.error
    return Told(tokens, logprobs, session)


def generated(directory: Path, prompt: Sequence[int], sampling: Sampling, n: int) -> list[int]:
    """transformers' own tokens, by its own processors and our noise."""
    with alone():
        out = reference_model(directory).generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=n,
            do_sample=False,
            logits_processor=processors(sampling, len(prompt)),
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]
