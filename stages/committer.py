"""The committer: what the verifier accepted becomes committed rows, delivered tokens and text.

It owns the KV store's commits and resets and the text of each answer, and it ends sessions: at a
stop token, at a stop string, at the token limit, at the end of the context, when cancelled, or
when a stage reported a failure.
"""

from __future__ import annotations

import math

from routing.actor import Actor
from routing.errors import PacelineError
from routing.mailboxes import Receiver
from routing.messages import (
    Batch,
    DraftOrder,
    Failed,
    Refill,
    SweepTimes,
    ToCommitter,
    Verdict,
)
from routing.sessions import FinishReason, Session, SessionTable
from routing.trace import Trace
from stages.kv import KVStore
from stages.streams import Stream
from stages.text import AnswerText
from stages.tokenizer import Tokenizer


class Committer(Actor):
    """Takes verdicts, gives tokens to sessions and the next order to the drafter."""

    name = "committer"

    def __init__(
        self,
        inbox: Receiver[ToCommitter],
        sessions: SessionTable,
        kv: KVStore,
        stream: Stream,
        tokenizer: Tokenizer | None,
        context: int,
        switch_at: int | None,
        trace: Trace,
    ) -> None:
        self._inbox, self._sessions, self._kv = inbox, sessions, kv
        self._stream, self._tokenizer = stream, tokenizer
        self._context, self._trace = context, trace
        self._switch_at = math.inf if switch_at is None else switch_at
        self._refilled: set[int] = set()
        self._texts: dict[int, AnswerText] = {}

    async def run(self) -> None:
        """See Actor. Sessions that still live when it dies are ended by the engine."""
        with self._inbox:
            async for message in self._inbox:
                session = self._sessions.get(message.session)
                if session.cancelled:
                    # Before a failure: a sweep that all have left is cut short, so that its
                    # scores are no numbers.
                    await self._end(session, message.place, "cancelled")
                elif isinstance(message, Failed):
                    error = PacelineError(f"The {message.stage} failed: {message.problem}.")
                    await self._end(session, message.place, "error", error)
                else:
                    await self._commit(session, message)

    async def _commit(self, session: Session, verdict: Verdict) -> None:
        text = self._text(session)
        try:
            tokens, reason = self._cut(session, text, verdict.tokens)
            shown = text.take() if reason is None else text.flush()
        except Exception as error:  # a tokenizer's decoder raises what it likes
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            failure = PacelineError(f"The answer's tokens could not be made text ({said}).")
            failure.__cause__ = error
            await self._end(session, verdict.place, "error", failure)
            return
        if reason is not None and text.stopped:
            reason = "stop"
        if not verdict.prompt:
            session.rounds += 1
            session.drafted += verdict.drafted
            session.accepted += min(len(verdict.path) - 1, len(tokens))
        if reason is None:
            with self._trace.span("commit", "commit", session.id):
                await self._stream.run(self._kv.commit, verdict.place, verdict.path)
        logprobs = verdict.logprobs[: len(tokens)]
        delivered = session.deliver(Batch(tokens, shown, logprobs))
        if reason is not None:
            await self._end(session, verdict.place, reason)
        elif not delivered or session.cancelled:
            await self._end(session, verdict.place, "cancelled")
        else:
            await self._order(session, verdict.place, tokens[-1], verdict.sweep)

    def _text(self, session: Session) -> AnswerText:
        if session.id not in self._texts:
            decoder = None if self._tokenizer is None else self._tokenizer.decoder()
            self._texts[session.id] = AnswerText(decoder, session.request.stop)
        return self._texts[session.id]

    def _cut(
        self, session: Session, text: AnswerText, tokens: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """The tokens up to where the answer ends, met one by one as sequential decoding would.

        They go into `text`, but for a stop token, which has none.
        """
        request = session.request
        for count, token in enumerate(tokens, start=1):
            generated = session.generated + count
            if token in request.stop_ids or text.add(token):
                return tokens[:count], "stop"
            full = len(request.prompt) + generated >= self._context
            if generated >= request.max_tokens or full:
                return tokens[:count], "length"
        return tokens, None

    async def _order(
        self, session: Session, place: int, token: int, sweep: SweepTimes | None
    ) -> None:
        assert session.orders is not None
        position = self._kv.committed(place)
        expected = len(session.request.prompt) + session.generated - 1
        assert position == expected, (position, session.id)
        prompt = session.request.prompt
        crossing = len(prompt) <= self._switch_at <= position
        if crossing and session.id not in self._refilled:
            # Rows computed with the short context's frequencies are of no use beyond it.
            self._refilled.add(session.id)
            await self._stream.run(self._kv.reset, place)
            session.orders.send_nowait(Refill(session.id, place, (*prompt, *session.answer)))
        else:
            session.orders.send_nowait(DraftOrder(session.id, place, token, position, sweep))

    async def _end(
        self,
        session: Session,
        place: int,
        reason: FinishReason,
        error: BaseException | None = None,
    ) -> None:
        self._refilled.discard(session.id)
        self._texts.pop(session.id, None)
        await self._stream.run(self._kv.reset, place)
        self._sessions.end(session.id, reason, error)
