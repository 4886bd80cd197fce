"""What a caller gets back."""

from __future__ import annotations

import msgspec

from routing.messages import TokenLogprob
from routing.sessions import FinishReason, Session


class Delta(msgspec.Struct, frozen=True):
    """A step of an answer under way. The last one carries the finish_reason and no tokens.

    `text` is whole characters only and nothing that may yet become a stop string, so it may lag
    behind `token_ids`. `logprobs` has one entry a token where the request asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """Seconds since the request was made; tokens a second after the first token.

    `tokens_per_s` is None for answers of fewer than two tokens.
    """

    ttft_s: float
    total_s: float
    tokens_per_s: float | None


class Answer(msgspec.Struct, frozen=True):
    """A whole answer.

    A stop string does not show in `text`, though its tokens are among `token_ids`, as is a stop
    token. `logprobs` has one entry a token; None when the request did not ask for them.
    `tau` is the mean number of accepted draft tokens a round, the bonus token not counted, and
    `tokens_per_round` is tau + 1; both are None when there was no round. `seed` reproduces
    it. `ahead_kept` is the share of the rounds drafted ahead of a verdict in which that came true,
    None when there was none.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    tau: float | None
    tokens_per_round: float | None
    rounds: int
    drafted: int
    ahead_kept: float | None
    timings: Timings
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None = None


def make_answer(
    session: Session,
    text: str,
    tokens: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...] = (),
) -> Answer:
    """Sum up an ended session, which delivered all of this."""
    assert session.finish_reason is not None and session.ended is not None
    first = session.ended if session.first_token is None else session.first_token
    after = session.ended - first
    tau = session.accepted / session.rounds if session.rounds else None
    return Answer(
        text=text,
        token_ids=tokens,
        finish_reason=session.finish_reason,
        usage=Usage(len(session.request.prompt), len(tokens)),
        tau=tau,
        tokens_per_round=None if tau is None else tau + 1,
        rounds=session.rounds,
        drafted=session.drafted,
        ahead_kept=session.kept_ahead / session.drafted_ahead if session.drafted_ahead else None,
        timings=Timings(
            ttft_s=first - session.submitted,
            total_s=session.ended - session.submitted,
            tokens_per_s=(len(tokens) - 1) / after if len(tokens) > 1 and after > 0 else None,
        ),
        seed=session.request.sampling.seed,
        logprobs=None if session.request.logprobs is None else logprobs,
    )
