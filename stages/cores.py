"""The cores of the machine, shared out among the workers that compute at the same moment.

A two-thread matrix product beside one busy thread ran ten times slower than the same product on
one thread: a parallel region waits for its slowest thread, and that one was waiting for a core.
So the intra-op threads of all running workers together never exceed the cores. torch keeps the
OpenMP thread count per calling thread, while MKL's may be global, so a wider claim of one worker
could widen its neighbor. That stays within the cores too: a claim is at most total / busy, every
holder counts as busy, and holders x the latest width is therefore at most the total.

Wide work also shares one thread, the lane. OpenMP keeps a team of helpers for each thread that ever
opened a parallel region, and once there are more of them than cores it stops spinning and lets
helpers sleep between regions: a draft step then took 80 ms instead of 31.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Cores:
    """Counts who is busy and hands out intra-op threads, first come first served.

    Thread-safe. `busy` is for actors on the event loop (it never blocks); `claim` is for worker
    threads (it blocks until there is room).
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"cores: {total} given, at least 1 expected")
        self.total = total
        self._busy: Counter[str] = Counter()
        self._claims: Counter[str] = Counter()  # holders and those who queue for threads
        self._held = 0
        self._widths: list[int] = []
        self._queue: deque[object] = deque()
        self._room = threading.Condition()
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="wide")

    def in_lane(self, call: Callable[[], T]) -> T:
        """Run `call` on the one thread for work that is wider than one thread; blocks.

        For holders of such a claim: there is never more than one of them beside which there is
        room, or they take turns.
        """
        return self._lane.submit(call).result()

    def close(self) -> None:
        """Join the lane's thread. May be called again."""
        self._lane.shutdown(wait=True)

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Says that the actor that owns stream `name` works now, between its launches too.

        Others' next claims become narrower at once; claims already held keep their width. Nests.
        """
        with self._room:
            self._busy[name] += 1
        try:
            yield
        finally:
            with self._room:
                _subtract(self._busy, name)
                self._room.notify_all()  # the first in the queue may now be granted a wider claim

    @contextmanager
    def claim(self, name: str) -> Iterator[int]:
        """Yields the number of intra-op threads this piece of work may use, at least 1.

        Blocks the calling thread until held + n <= total. The queue is in order of arrival, so
        with more busy workers than cores nobody starves.
        """
        width = self._take(name)
        try:
            yield width
        finally:
            with self._room:
                self._held -= width
                self._widths.remove(width)
                _subtract(self._claims, name)
                self._room.notify_all()

    def width(self, name: str) -> int:
        """The number of threads a claim of `name` would be granted now, changing nothing."""
        with self._room:
            return self._width(name)

    @property
    def held(self) -> int:
        """Intra-op threads claimed at this moment."""
        return self._held

    def check(self) -> None:
        """Asserts conservation: the widths held add up and are never above the total."""
        with self._room:
            assert sum(self._widths) == self._held, (self._widths, self._held)
            assert 0 <= self._held <= self.total, (self._held, self.total)
            assert sum(self._claims.values()) == len(self._widths) + len(self._queue)
            assert all(count > 0 for count in (self._busy + self._claims).values())

    def _width(self, name: str) -> int:
        return max(1, self.total // len({name, *self._busy, *self._claims}))

    def _take(self, name: str) -> int:
        ticket = object()
        with self._room:
            self._queue.append(ticket)
            self._claims[name] += 1
            # The width is worked out anew at each wake-up: busy actors come and go meanwhile.
            self._room.wait_for(
                lambda: self._queue[0] is ticket and self._held + self._width(name) <= self.total
            )
            width = self._width(name)
            self._queue.popleft()
            self._held += width
            self._widths.append(width)
            self._room.notify_all()  # there may be room for the next in the queue as well
        return width


def _subtract(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
