"""The prefetcher: keeps the link busy, round and round through the pieces of a sweep.

It has two halves. One starts a fill for every slot that becomes free, whatever else is under way,
so that reads queue up behind each other. The other waits for the fills in order and announces
them. Neither knows of sweeps but for the trace: after the last piece comes the first again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import anyio

from routing.actor import Actor
from routing.mailboxes import Mailbox, Receiver, Sender
from routing.messages import PieceReady, SlotFree
from routing.trace import Span, Trace
from stages.link import Filled, Link
from stages.pieces import Piece
from stages.ring import Ring
from stages.streams import Event, settle


class _Flight(NamedTuple):
    """A fill that was asked for and not announced yet."""

    sweep: int
    piece: Piece
    slot: int
    event: Event[Filled]


class Prefetcher(Actor):
    """Fills free slots in cyclic piece order until `freed` ends.

    Owns `ready` and `freed`; their mailboxes hold as many places as the ring has slots, so a send
    never waits. However it ends (EndOfMail, cancellation, a failed read, which it raises as
    LinkError), it returns only when no read is under way, and leaves no slot filling.
    """

    name = "prefetcher"

    def __init__(
        self,
        pieces: Sequence[Piece],
        ring: Ring,
        link: Link,
        ready: Sender[PieceReady],
        freed: Receiver[SlotFree],
        trace: Trace,
    ) -> None:
        if not pieces:
            raise ValueError("no pieces given: a prefetcher needs at least one to stream")
        self._pieces = tuple(pieces)
        self._ring = ring
        self._link = link
        self._ready = ready
        self._freed = freed
        self._trace = trace
        self._flights: deque[_Flight] = deque()
        self._started = 0
        self._wanted = True

    async def run(self) -> None:
        """Fills and announces until EndOfMail. Raises LinkError when a read fails."""
        flights = Mailbox[_Flight]("fills under way", self._ring.slots)
        with flights.sender() as launched, flights.receiver() as landing:
            flights.seal()
            try:
                async with anyio.create_task_group() as halves:
                    halves.start_soon(self._announce, landing)
                    await self._fill(launched)
            except BaseExceptionGroup as group:
                raise _first(group) from None
            finally:
                await self._wind_up()

    async def _fill(self, launched: Sender[_Flight]) -> None:
        self._start_fills(launched)
        async for _ in self._freed:
            self._start_fills(launched)
        self._wanted = False
        launched.close()

    def _start_fills(self, launched: Sender[_Flight]) -> None:
        while (slot := self._ring.take_free()) is not None:
            sweep, index = divmod(self._started, len(self._pieces))
            piece = self._pieces[index]
            try:
                event = self._link.fill(piece, self._ring.buffer(slot))
            except BaseException:
                self._ring.abandon(slot)
                raise
            self._started += 1
            flight = _Flight(sweep, piece, slot, event)
            self._flights.append(flight)
            launched.send_nowait(flight)

    async def _announce(self, landing: Receiver[_Flight]) -> None:
        async for flight in landing:
            await flight.event.ended()
            if not self._wanted:
                return  # what is still in flight is waited for at the end
            self._record(flight, await flight.event)
            self._ring.mark_ready(flight.slot, flight.piece.index)
            self._flights.popleft()
            try:
                self._ready.send_nowait(PieceReady(flight.piece.index, flight.slot))
            except anyio.BrokenResourceError:
                return  # nobody takes pieces any more; `freed` is about to end

    def _record(self, flight: _Flight, filled: Filled) -> None:
        piece = flight.piece
        name = f"{piece.kind} {piece.layer if piece.kind == 'layer' else piece.start_row}"
        for hop in filled.transfers:
            self._trace.add(
                Span(
                    hop.stage,
                    name,
                    hop.start,
                    hop.end,
                    sweep=flight.sweep,
                    layer=piece.layer,
                    nbytes=hop.nbytes,
                )
            )

    async def _wind_up(self) -> None:
        """Waits for the reads under way: no thread may write to a slot after this."""
        try:
            await settle([flight.event for flight in self._flights])
        finally:
            for flight in self._flights:
                self._ring.abandon(flight.slot)
            self._flights.clear()
            self._ready.close()
            self._freed.close()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first, without the wrapping: whoever runs an actor expects one error."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
