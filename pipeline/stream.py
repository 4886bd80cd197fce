"""The stream a caller holds: one request's answer as it comes.

An object rather than an async generator: a generator that is left early is closed by the garbage
collector in whatever task and scope happens to run, and one that yields inside a cancel scope
cancels the wrong caller. This object can be left, dropped, closed or cancelled at any await, and
each of these ends its request.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

import anyio

from pipeline.answers import Answer, Delta, make_answer
from routing.errors import EngineClosedError
from routing.mailboxes import EndOfMail
from routing.messages import Request, TokenLogprob
from routing.sessions import Session, SessionTable


class TokenStream:
    """Deltas of one answer, for one task at a time.

    async for delta in stream: ...      to the end, or `break`
    async with stream: ...              closed on the way out
    """

    def __init__(self, session: Session, sessions: SessionTable) -> None:
        """Made by the engine. Must be made, and used, on the engine's event loop."""
        self._session, self._sessions = session, sessions
        self._loop = asyncio.get_running_loop()
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._finished = False
        self._whole = False

    @property
    def request(self) -> Request:
        """What was asked: the prompt's token ids, the limits, how tokens are chosen."""
        return self._session.request

    @property
    def seed(self) -> int:
        """The seed in use, given or drawn."""
        return self.request.sampling.seed

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        """The next delta. Raises the request's or the engine's error if it failed."""
        if self._finished:
            raise StopAsyncIteration
        try:
            batch = await self._session.batches.receive()
        except EndOfMail:
            return self._last()
        except anyio.ClosedResourceError:  # another task has closed the stream meanwhile
            raise StopAsyncIteration from None
        except BaseException:
            # Cancelled, most likely: whoever waits for this answer has gone.
            self._drop()
            raise
        self._tokens += batch.tokens
        self._text.append(batch.text)
        self._logprobs += batch.logprobs
        return Delta(batch.text, batch.tokens, logprobs=batch.logprobs)

    def _last(self) -> Delta:
        self._finished = self._whole = True
        self._session.batches.close()
        if self._session.error is not None:
            # One EngineError goes to every caller: without this its traceback would grow.
            raise self._session.error.with_traceback(None)
        assert self._session.finish_reason is not None
        return Delta("", (), self._session.finish_reason)

    def answer(self) -> Answer:
        """The whole answer, once the last delta was taken. Raises RuntimeError before."""
        if not self._whole:
            raise RuntimeError("The answer is not whole yet: take deltas until finish_reason.")
        text, tokens = "".join(self._text), tuple(self._tokens)
        return make_answer(self._session, text, tokens, tuple(self._logprobs))

    async def collect(self) -> Answer:
        """Take all deltas that are left and return the answer."""
        async for _ in self:
            pass
        if self._session.finish_reason == "cancelled":
            raise EngineClosedError
        return self.answer()

    async def aclose(self) -> None:
        """End the request if it has not ended, and wait until it has freed what it held.

        That takes at most one sweep. Cancelling the waiting ends the request all the same. Once
        the request has ended this does nothing.
        """
        if not self._finished:
            self._drop()
        if not self._session.over.is_set():
            await self._session.over.wait()

    def _drop(self) -> None:
        self._finished = True
        self._sessions.cancel(self._session.id)
        self._session.batches.close()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._finished:
            return
        try:
            # The collector may run in any thread.
            self._loop.call_soon_threadsafe(_forget, self._session, self._sessions)
        except RuntimeError:  # the loop is closed, and with it all that could disturb us here
            _forget(self._session, self._sessions)


def _forget(session: Session, sessions: SessionTable) -> None:
    sessions.cancel(session.id)
    session.batches.close()
