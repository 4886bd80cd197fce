"""Spans of work, from every stage and thread, at a cost that does not show.

A trace is written by worker threads and the event loop at once, and read while they write. It
keeps the newest `capacity` spans and counts those it dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import msgspec


class Span(msgspec.Struct, frozen=True, gc=False):
    """One piece of work. Times are seconds of the trace's clock.

    `stage` is one of disk, copy, draft, verify, commit, route. A session, sweep or layer of -1
    means that the work belongs to none in particular. `nbytes` is what crossed a link; `rows` are
    the nodes that a draft step ran, or those run ahead that a verdict kept.
    """

    stage: str
    name: str
    start: float
    end: float
    session: int = -1
    sweep: int = -1
    layer: int = -1
    nbytes: int = 0
    rows: int = 0


class Recording:
    """A span under way; leaving the `with` block adds it, whether the work failed or not."""

    __slots__ = ("_about", "_start", "_trace", "_what")

    def __init__(
        self, trace: Trace, what: tuple[str, str], about: tuple[int, int, int, int, int]
    ) -> None:
        self._trace = trace
        self._what = what
        self._about = about

    def __enter__(self) -> None:
        self._start = self._trace.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = self._trace.clock()
        self._trace.add(Span(*self._what, self._start, end, *self._about))


class Trace:
    """The newest spans. Every method may be called from any thread."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, capacity: int = 100_000
    ) -> None:
        """`clock` is monotonic, in seconds; `capacity` (at least 1) is the number of spans kept."""
        assert capacity >= 1, f"a trace keeps at least one span, not {capacity}"
        self.clock = clock
        self.capacity = capacity
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._added = 0
        # Reentrant: a finalizer run by the garbage collector may trace while this thread adds.
        self._lock = threading.RLock()

    def span(
        self,
        stage: str,
        name: str,
        session: int = -1,
        sweep: int = -1,
        layer: int = -1,
        nbytes: int = 0,
        rows: int = 0,
    ) -> Recording:
        """A context manager that times its block."""
        return Recording(self, (stage, name), (session, sweep, layer, nbytes, rows))

    def add(self, span: Span) -> None:
        """Keep `span`, dropping the oldest when the trace is full."""
        with self._lock:
            self._spans.append(span)
            self._added += 1

    def spans(self) -> list[Span]:
        """A copy of what is kept, in the order in which the work ended."""
        with self._lock:
            return list(self._spans)

    @property
    def dropped(self) -> int:
        """How many spans were dropped for want of room."""
        with self._lock:
            return self._added - len(self._spans)
