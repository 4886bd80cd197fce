"""Sessions: the life of each request, and the places that bound how many live at once.

    open -> queued -> (admit) -> live -> (end) -> ended
              |                                     ^
              +--------- cancel, fail_all ----------+

A queued session holds nothing, so cancelling ends it at once. A live one has work in the loop
that must not be torn from under it: cancelling marks it, and whichever actor holds its message
next carries it to its end. An ended session is forgotten; whoever holds the object can still
read it.

How the loop learns that it is over: each live session holds its own clone of the drafter's
sender, taken by `admit` and closed by `end`, and the router holds one more until admission is
closed. So the drafter's mailbox ends exactly when admission is closed and no session lives, and
from there closing runs round.

Every method but `admit` is synchronous, so that no cancellation can fall into the middle of it.
None may be called from another thread.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from anyio import BrokenResourceError, Event, WouldBlock

from routing.errors import BusyError, EngineClosedError
from routing.mailboxes import Mailbox, Receiver, Sender
from routing.messages import Batch, DraftOrder, Refill, Request, Route
from routing.waiting import WaitingLine

State = Literal["queued", "live", "ended"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(eq=False, slots=True)
class Session:
    """One request on its way. Times are seconds of the table's clock.

    The table changes `state`, `place`, `cancelled`, `orders`, `finish_reason`, `error`,
    `submitted`, `ended` and `over`; actors write the route and the counters of rounds.
    """

    request: Request
    outbox: Sender[Batch]
    """Batches of tokens for the caller; has room for all there can be. Closed by the end."""
    batches: Receiver[Batch]
    """The caller's end of it, which the caller closes."""
    clock: Callable[[], float]
    submitted: float
    state: State = "queued"
    place: int | None = None
    route: Route | None = None
    cancelled: bool = False
    orders: Sender[DraftOrder | Refill] | None = None
    """Held while live. The way back to the drafter, and what keeps its mailbox open."""
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_ahead: int = 0
    """Rounds for which something was drafted while the tree before was being verified."""
    kept_ahead: int = 0
    """Those of them in which it came true."""
    answer: list[int] = field(default_factory=list)
    """The tokens delivered so far. Grows before the next order goes to the drafter."""
    first_token: float | None = None
    ended: float | None = None
    over: Event = field(default_factory=Event)
    """Set by the end, when nothing is held for the session any more."""

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def generated(self) -> int:
        """How many tokens were delivered."""
        return len(self.answer)

    def deliver(self, batch: Batch) -> bool:
        """Hand a batch (at least one token) to the caller; never waits.

        False, and the session is marked as cancelled, when the caller has closed its end: then
        nothing was delivered and further work is in vain.
        """
        assert batch.tokens, f"session {self.id}: an empty batch"
        assert self.generated + len(batch.tokens) <= self.request.max_tokens, f"session {self.id}"
        try:
            self.outbox.send_nowait(batch)
        except BrokenResourceError:
            self.cancelled = True
            return False
        self.answer += batch.tokens
        if self.first_token is None:
            self.first_token = self.clock()
        return True


class SessionTable:
    """All sessions that are queued or live, and the places they share."""

    def __init__(
        self, places: int, queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """At most `places` (at least 1) sessions live and `queue` more wait for a place."""
        assert places >= 1, f"at least one session must be able to live, not {places}"
        assert queue >= 0, f"{queue} requests cannot wait"
        self.places = places
        self.queue = queue
        self._clock = clock
        self._sessions: dict[int, Session] = {}
        self._free = list(range(places))
        self._line = WaitingLine()
        self._opened = 0
        self._ended = 0
        self._closed = False
        self._failure: BaseException | None = None

    @property
    def live(self) -> int:
        """How many sessions hold a place."""
        return sum(session.state == "live" for session in self._sessions.values())

    @property
    def waiting(self) -> int:
        """How many sessions are queued."""
        return len(self._sessions) - self.live

    @property
    def free(self) -> int:
        """How many places nobody holds."""
        return len(self._free)

    @property
    def empty(self) -> bool:
        """Whether no session is queued or live."""
        return not self._sessions

    def get(self, session_id: int) -> Session:
        """A queued or live session. KeyError when it has ended or never was."""
        return self._sessions[session_id]

    def oldest_queued(self) -> Session | None:
        """The queued session that was opened first; it stays queued until it is admitted."""
        return next((s for s in self._sessions.values() if s.state == "queued"), None)

    def open(self, request: Request) -> Session:
        """Queue a new session. The request's id must not have been used before.

        Room is counted over places and queue together, so whether a request is refused does not
        depend on how fast the router is. Raises BusyError when `queue` requests wait beyond
        those that free places stand ready for, EngineClosedError after `close`, and after
        `fail_all` the error given there.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # Or it would grow with each raise.
        if self._closed:
            raise EngineClosedError
        waiting = self.waiting - self.free
        if waiting >= self.queue:
            raise BusyError(waiting, self.queue)
        assert request.id not in self._sessions, f"session id {request.id} is in use"
        mailbox = Mailbox[Batch](f"session {request.id}", request.max_tokens + 2)
        outbox, batches = mailbox.sender(), mailbox.receiver()
        mailbox.seal()
        session = Session(request, outbox, batches, self._clock, submitted=self._clock())
        self._sessions[request.id] = session
        self._opened += 1
        return session

    async def admit(self, session: Session, orders: Sender[DraftOrder | Refill]) -> int | None:
        """Make a queued session live: wait for a free place, take it, and clone `orders`.

        Returns the place, or None when the session ended while it waited. All or nothing: if
        this raises, a cancellation included, the session is queued as before (or has ended) and
        no place was taken. Nothing is awaited after the place is taken, so the caller that goes
        on without awaiting has the place for certain.
        """
        return await self._line.take(lambda: self._admit_now(session, orders))

    def _admit_now(self, session: Session, orders: Sender[DraftOrder | Refill]) -> int | None:
        if session.state == "ended":
            return None
        assert session.state == "queued", f"session {session.id} was admitted twice"
        if not self._free:
            raise WouldBlock
        session.orders = orders.clone()  # First, because it raises when `orders` is closed.
        session.place = heapq.heappop(self._free)
        session.state = "live"
        return session.place

    def cancel(self, session_id: int) -> None:
        """End a queued session; mark a live one. Does nothing if it has ended."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.cancelled = True
        if session.state == "queued":
            self.end(session_id, "cancelled")

    def end(
        self,
        session_id: int,
        finish_reason: FinishReason,
        error: BaseException | None = None,
    ) -> None:
        """End a session: free its place, close its outbox and its orders, and forget it.

        Does nothing if it has ended before; the first reason stays. The caller of the session
        reads what is in the outbox and then finds `finish_reason` and `error`.

        A live session is ended only by the actor that holds its message, after it has freed
        what the place owns in the stores: the next session may take the place in the same turn.
        """
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self._ended += 1
        session.state = "ended"
        session.finish_reason = finish_reason
        session.error = error
        session.ended = self._clock()
        if session.place is not None:
            heapq.heappush(self._free, session.place)
            session.place = None
        session.outbox.close()
        session.over.set()
        if session.orders is not None:
            session.orders.close()
            session.orders = None
        # All, not the next one: whoever waits to admit this very session must look as well.
        self._line.call_all()

    def cancel_all(self) -> None:
        """Cancel every session."""
        for session_id in tuple(self._sessions):
            self.cancel(session_id)

    def close(self) -> None:
        """Open no further sessions. Those queued and live go on."""
        self._closed = True

    def fail_all(self, error: BaseException) -> None:
        """Close, and end every session with `error`. The first error given stays."""
        self._closed = True
        if self._failure is None:
            self._failure = error
        for session_id in tuple(self._sessions):
            self.end(session_id, "error", self._failure)

    def check(self) -> None:
        """Assert conservation: of places, of ids, and of the clones that live sessions hold."""
        held = [s.place for s in self._sessions.values() if s.place is not None]
        assert sorted(held + self._free) == list(range(self.places)), (held, self._free)
        assert self._opened == len(self._sessions) + self._ended, "sessions lost or made up"
        for session_id, session in self._sessions.items():
            assert session.id == session_id, "a session stands under another's id"
            assert session.state in ("queued", "live"), f"session {session_id} was not forgotten"
            live = session.state == "live"
            assert live == (session.place is not None), f"session {session_id}: place"
            assert live == (session.orders is not None), f"session {session_id}: orders"
