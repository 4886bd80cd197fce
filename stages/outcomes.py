"""What a sweep decides for a rider: how far its tree is accepted, and with which tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from routing.messages import TokenLogprob
from stages.logprobs import token_logprob
from stages.packs import Rider
from stages.sampling import Scorer, best
from stages.tree import accept


class Outcome(msgspec.Struct, frozen=True):
    """`path`: the accepted rows, from the first on. `tokens`: those of the path below the root and
    then the bonus token. `logprobs`: one a token where the request asked for them."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Choice(NamedTuple):
    """A row's next token (None: its scores are no numbers)."""

    token: int | None
    logprob: TokenLogprob | None = None


Choose = Callable[[int, tuple[int, ...]], Choice]
"""(asked row, tokens below the root down to it) -> the target's choice after it."""


def largest(tokens: Sequence[int | None]) -> Choose:
    """Of a rider for whom the largest logit decides: `tokens` has it for each asked row."""
    return lambda row, below: Choice(tokens[row])


class WholeRows:
    """The choices of a rider that needs whole rows: scored when they are asked for.

    logits: (asked rows, vocab), raw. positions: where the token after each of them will stand.
    """

    def __init__(
        self, rider: Rider, logits: torch.Tensor, scorer: Scorer, positions: Sequence[int]
    ) -> None:
        self._rider, self._logits = rider, logits
        self._scorer, self._positions = scorer, positions

    def choose(self, row: int, below: tuple[int, ...]) -> Choice:
        """See Choose."""
        logits = self._logits[row : row + 1]
        history = (*self._rider.history, *below)
        token = best(self._scorer.scores(logits, [history], [self._positions[row]])[0])
        wanted = self._rider.logprobs
        if token is None or wanted is None:
            return Choice(token)
        return Choice(token, token_logprob(logits[0], token, wanted))


class _NoNumbers(Exception):
    """Ends a walk down a tree."""


def outcome(rider: Rider, choose: Choose) -> Outcome | None:
    """Of one rider, by its target's choices; None where a score on the way is no number."""
    logprobs: list[TokenLogprob] = []

    def token(row: int, below: tuple[int, ...]) -> int:
        choice = choose(row, below)
        if choice.token is None:
            raise _NoNumbers
        if choice.logprob is not None:
            logprobs.append(choice.logprob)
        return choice.token

    try:
        if rider.parents is None:
            rows = tuple(range(len(rider.tokens)))
            return Outcome(rows, (token(0, ()),), tuple(logprobs))
        path, tokens = accept(rider.tokens, rider.parents, token)
        return Outcome(path, tokens, tuple(logprobs))
    except _NoNumbers:
        return None
