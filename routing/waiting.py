"""A line of tasks that wait, first come first served, for something to become possible.

Why not wait for the thing itself: a task that is handed an item while it sleeps, and is cancelled
before it wakes, takes the item with it (asyncio's own `Task.cancel` does that to anyio's memory
streams). Here a task is only told that it may try; the trying happens after it has woken, with no
await between the success and the return. So a cancelled task has taken nothing, and the tasks
behind it are called in its stead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import Event, WouldBlock
from anyio.lowlevel import checkpoint

R = TypeVar("R")


class _Ticket:
    """One waiting task. It keeps its place in the line until it leaves for good."""

    __slots__ = ("called",)

    def __init__(self) -> None:
        self.called = Event()


class WaitingLine:
    """Waiting tasks of one event loop. Not for use from other threads."""

    def __init__(self) -> None:
        self._tickets: list[_Ticket] = []

    def __len__(self) -> int:
        return len(self._tickets)

    async def take(self, attempt: Callable[[], R]) -> R:
        """Call `attempt` until it does not raise WouldBlock, and return its result.

        All or nothing: when this raises a cancellation, no attempt has succeeded. Whatever else
        `attempt` raises comes out of here. Whoever makes an attempt possible must call
        `call_next` (one can go on) or `call_all` (all should look again).
        """
        await checkpoint()
        if not self._tickets:
            try:
                return attempt()
            except WouldBlock:
                pass
        ticket = _Ticket()
        self._tickets.append(ticket)
        try:
            while True:
                await ticket.called.wait()
                ticket.called = Event()
                try:
                    return attempt()
                except WouldBlock:
                    continue
        finally:
            self._tickets.remove(ticket)
            # There may be enough for another one, or this task may have been called and then
            # cancelled. A call in vain costs one attempt.
            self.call_next()

    def call_next(self) -> None:
        """Let the first task try. It calls the next one when it leaves the line."""
        if self._tickets:
            self._tickets[0].called.set()

    def call_all(self) -> None:
        """Let every task try, in the order in which they came."""
        for ticket in self._tickets:
            ticket.called.set()
