"""Bounded, named mailboxes between actors, over anyio's memory streams.

Closing is how work ends: a producer closes its sending end, and when all of them have, the
receiving end runs dry and raises EndOfMail. There are no sentinels. Each producer owns one
clone, and every end has to be closed by its owner (an end that is not shows as ResourceWarning).

anyio's streams keep the items and count the ends; waiting is done in lines of our own, because
an item handed to a sleeping anyio receiver is lost when asyncio cancels that task before it
wakes. See waiting.py.

    mailbox = Mailbox[Tree]("verifier", places=4)
    trees, inbox = mailbox.sender(), mailbox.receiver()
    mailbox.seal()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Generic, Self, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from routing.waiting import WaitingLine

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)
T_out = TypeVar("T_out", covariant=True)

EndOfMail = anyio.EndOfStream
"""Raised by receiving when every sender is closed and nothing waits any more."""


class _Counter:
    """What all ends of one mailbox share: who waits, and how much went through."""

    __slots__ = ("name", "received", "receivers", "senders", "sent")

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent = 0
        self.received = 0
        self.senders = WaitingLine()
        self.receivers = WaitingLine()

    def look_again(self) -> None:
        """An end was closed: whoever waits may have to stop waiting."""
        self.receivers.call_all()
        self.senders.call_all()


class _End(ABC):
    """Either end: a `with` closes it."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Sender(_End, Generic[T_in]):
    """A sending end. Its owner closes it; others take a clone."""

    __slots__ = ("_counter", "_stream")

    def __init__(self, stream: MemoryObjectSendStream[T_in], counter: _Counter) -> None:
        self._stream = stream
        self._counter = counter

    async def send(self, item: T_in) -> None:
        """Put `item` into the mailbox, waiting for a place if there is none.

        All or nothing: if this raises, a cancellation included, the item was not sent.
        Raises anyio.ClosedResourceError when this end is closed and anyio.BrokenResourceError
        when nobody can receive any more.
        """
        await self._counter.senders.take(lambda: self.send_nowait(item))

    def send_nowait(self, item: T_in) -> None:
        """As `send`, but raise anyio.WouldBlock instead of waiting."""
        self._stream.send_nowait(item)
        self._counter.sent += 1
        self._counter.receivers.call_next()

    def clone(self) -> Sender[T_in]:
        """Another sending end of the same mailbox, to be closed on its own."""
        return Sender(self._stream.clone(), self._counter)

    def close(self) -> None:
        """Close this end. Closing twice does nothing; a send that waits here raises."""
        self._stream.close()
        self._counter.look_again()

    def __repr__(self) -> str:
        return f"<Sender to {self._counter.name!r}>"


class Receiver(_End, Generic[T_out]):
    """A receiving end. `async for` runs until EndOfMail."""

    __slots__ = ("_counter", "_stream")

    def __init__(self, stream: MemoryObjectReceiveStream[T_out], counter: _Counter) -> None:
        self._stream = stream
        self._counter = counter

    async def receive(self) -> T_out:
        """Take the oldest item, waiting for one if there is none.

        All or nothing: if this raises, a cancellation included, nothing was taken.
        Raises EndOfMail when all senders are closed and the mailbox is empty, and
        anyio.ClosedResourceError when this end is closed.
        """
        return await self._counter.receivers.take(self.receive_nowait)

    def receive_nowait(self) -> T_out:
        """As `receive`, but raise anyio.WouldBlock instead of waiting."""
        item = self._stream.receive_nowait()
        self._counter.received += 1
        self._counter.senders.call_next()
        return item

    def close(self) -> None:
        """Close this end. Once the last is closed, sending raises; what waits stays unread."""
        self._stream.close()
        self._counter.look_again()

    def __aiter__(self) -> Receiver[T_out]:
        return self

    async def __anext__(self) -> T_out:
        try:
            return await self.receive()
        except EndOfMail:
            raise StopAsyncIteration from None

    def __repr__(self) -> str:
        return f"<Receiver of {self._counter.name!r}>"


class Mailbox(Generic[T]):
    """A bounded queue with a name. Hand out its ends, then seal it."""

    def __init__(self, name: str, places: int) -> None:
        """A mailbox that holds at most `places` (at least 1) items."""
        assert places >= 1, f"mailbox {name!r} needs at least one place, not {places}"
        self.name = name
        self.places = places
        self._counter = _Counter(name)
        self._send, self._receive = anyio.create_memory_object_stream[T](places)

    def sender(self) -> Sender[T]:
        """A new sending end. Raises anyio.ClosedResourceError once the mailbox is sealed."""
        return Sender(self._send.clone(), self._counter)

    def receiver(self) -> Receiver[T]:
        """A new receiving end. Raises anyio.ClosedResourceError once the mailbox is sealed."""
        return Receiver(self._receive.clone(), self._counter)

    def seal(self) -> None:
        """Hand out no further ends, so that closing those handed out ends the mailbox."""
        self._send.close()
        self._receive.close()
        self._counter.look_again()

    @property
    def waiting(self) -> int:
        """How many items wait to be received."""
        return self._send.statistics().current_buffer_used

    @property
    def sent(self) -> int:
        return self._counter.sent

    @property
    def received(self) -> int:
        return self._counter.received

    @property
    def open_senders(self) -> int:
        """Sending ends not closed yet, the mailbox's own included until it is sealed."""
        return self._send.statistics().open_send_streams

    @property
    def open_receivers(self) -> int:
        """Receiving ends not closed yet, the mailbox's own included until it is sealed."""
        return self._send.statistics().open_receive_streams

    def check(self) -> None:
        """Assert conservation: what was sent was received or waits, in a place of its own."""
        held = self.sent - self.received
        assert held == self.waiting, f"{self!r}: {held} items missing or made up"
        assert self.waiting <= self.places, f"{self!r} overflows"

    def __repr__(self) -> str:
        return (
            f"<Mailbox {self.name!r}: {self.sent} sent, {self.received} received, "
            f"{self.waiting} of {self.places} places taken>"
        )
