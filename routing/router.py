"""The router: from the admission queue to a place and a route.

It is the only actor that waits for a free place, so it is where the system pushes back. While it
waits, requests pile up in the session table, which refuses those beyond its bound at once.

The table is the queue; the admission mailbox is its bell. Each id in it makes the router look for
whoever is queued, oldest first. So whoever opens a session may send the id without waiting and
need not care if the mailbox is full (of the ids of requests that were cancelled, it may be): then
it holds an id that will make the router look.
"""

from __future__ import annotations

from typing import Protocol

from routing.actor import Actor
from routing.mailboxes import Receiver, Sender
from routing.messages import Request, Route, Routed, ToDrafter
from routing.sessions import Session, SessionTable
from routing.trace import Trace


class Policy(Protocol):
    """Chooses how a request is answered."""

    def route(self, request: Request) -> Route:
        """The route for one request. Runs on the event loop; an error fails that request."""


class FixedPolicy:
    """Gives every prompt the same route."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def route(self, request: Request) -> Route:
        return self._route


class Router(Actor):
    """Admits queued sessions in order, each with a route, and tells the drafter."""

    name = "router"

    def __init__(
        self,
        admission: Receiver[int],
        drafter: Sender[ToDrafter],
        sessions: SessionTable,
        policy: Policy,
        trace: Trace,
    ) -> None:
        """Owns `admission` and `drafter` from now on; the drafter's mailbox must have as many
        places as the table."""
        self._admission = admission
        self._drafter = drafter
        self._sessions = sessions
        self._policy = policy
        self._trace = trace

    async def run(self) -> None:
        """Route until admission is closed and all who were queued are dealt with."""
        with self._admission, self._drafter:
            async for _ in self._admission:
                while (session := self._sessions.oldest_queued()) is not None:
                    route = self._choose(session)
                    if route is not None:
                        await self._admit(session, route)

    def _choose(self, session: Session) -> Route | None:
        """The route of a session, or None if the policy failed and the session was ended."""
        try:
            with self._trace.span("route", "route", session=session.id):
                return self._policy.route(session.request)
        except Exception as error:
            self._sessions.end(session.id, "error", error)
            return None

    async def _admit(self, session: Session, route: Route) -> None:
        session.route = route
        place = await self._sessions.admit(session, self._drafter)
        if place is None:  # Cancelled while the router waited on its behalf.
            return
        # No await between taking the place and sending: a cancellation there would leave a live
        # session without a message in the loop, and nobody to end it. There is always room,
        # for a live session has at most one message in the loop.
        self._drafter.send_nowait(Routed(session.id, place, route))
