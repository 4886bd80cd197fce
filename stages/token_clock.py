"""A simulated bandwidth: how long transfers would take on a link of that speed.

Transfers follow each other on a line of virtual time. One begins when it is ready and the one
before it has ended, and ends n / bandwidth later. The line does not know how late a thread woke
up, so sleeping too long does not add up over back-to-back transfers; but a transfer whose real
work took longer than its share moves the line on, so slowness is never caught up at a higher
speed than the link's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TokenClock:
    """The line of one link. Thread-safe. Times are seconds of `clock`."""

    def __init__(
        self,
        gbps: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`gbps` is in 10^9 bytes a second."""
        if not gbps > 0:
            raise ValueError(f"link bandwidth: {gbps} GB/s given, a number above 0 expected")
        self.gbps = gbps
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, ready_at: float) -> float:
        """Books a transfer that could begin at `ready_at`; returns when it may end."""
        with self._lock:
            self._free_at = max(self._free_at, ready_at) + nbytes / (self.gbps * 1e9)
            return self._free_at

    def settle(self, deadline: float) -> None:
        """Called when the real work is done: sleeps until the deadline, or notes the delay."""
        now = self._clock()
        if now < deadline:
            self._sleep(deadline - now)
            return
        with self._lock:
            self._free_at = max(self._free_at, now)


@contextmanager
def paced(clock: TokenClock | None, nbytes: int, ready_at: float) -> Iterator[None]:
    """Makes the block, which moves nbytes, last as long as on the clock's link (None: as it is)."""
    if clock is None:
        yield
        return
    deadline = clock.reserve(nbytes, ready_at)
    yield
    clock.settle(deadline)
