"""Tests of the trace: what it keeps, from how many threads, at what cost."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from routing.trace import Recording, Span, Trace


def counting_trace(capacity: int = 100) -> Trace:
    return Trace(clock=itertools.count(0.0).__next__, capacity=capacity)


def test_a_span_says_what_when_and_how_much() -> None:
    trace = counting_trace()
    with trace.span("disk", "read", session=1, sweep=2, layer=3, nbytes=4):
        pass
    with trace.span("draft", "level", rows=5):
        pass
    assert trace.spans() == [
        Span("disk", "read", start=0.0, end=1.0, session=1, sweep=2, layer=3, nbytes=4),
        Span("draft", "level", start=2.0, end=3.0, rows=5),
    ]


def test_failed_work_is_traced_and_fails() -> None:
    trace = counting_trace()
    with pytest.raises(ValueError, match="made"), trace.span("verify", "sweep"):
        raise ValueError("made")
    assert trace.spans() == [Span("verify", "sweep", 0.0, 1.0)]


def test_spans_nest() -> None:
    trace = counting_trace()
    with trace.span("verify", "sweep"), trace.span("verify", "layer", layer=0):
        pass
    assert [(s.name, s.start, s.end) for s in trace.spans()] == [
        ("layer", 1.0, 2.0),
        ("sweep", 0.0, 3.0),
    ]


def test_a_full_trace_drops_the_oldest_and_counts_them() -> None:
    trace = counting_trace(capacity=3)
    for number in range(5):
        trace.add(Span("copy", str(number), 0.0, 1.0))
    assert [span.name for span in trace.spans()] == ["2", "3", "4"]
    assert trace.dropped == 2


def test_what_is_handed_out_is_a_copy() -> None:
    trace = counting_trace()
    trace.spans().append(Span("copy", "stray", 0.0, 1.0))
    assert trace.spans() == []


def test_threads_lose_no_span() -> None:
    trace = Trace(capacity=1000)
    start = threading.Barrier(5)

    def work() -> None:
        start.wait()
        for number in range(500):
            with trace.span("disk", "read", layer=number):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        spans = trace.spans()
        assert len(spans) <= 1000
        assert all(span.end >= span.start for span in spans)
    for thread in threads:
        thread.join()
    assert len(trace.spans()) == 1000
    assert trace.dropped == 1000


class Bare:
    """The least that a context manager can do that times its block."""

    def __init__(self, kept: list[tuple[float, float]]) -> None:
        self._kept = kept

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._kept.append((self._start, time.perf_counter()))


def test_the_cost_does_not_show() -> None:
    """Two to three times that of the barest; under 2 microseconds on an idle machine."""
    trace, kept = Trace(), list[tuple[float, float]]()

    def cost(make: Callable[[int], Recording | Bare], count: int = 1000) -> float:
        start = time.perf_counter()
        for layer in range(count):
            with make(layer):
                pass
        return time.perf_counter() - start

    def span(layer: int) -> Recording:
        return trace.span("verify", "layer", sweep=1, layer=layer)

    # In turn, so that both meet the same machine.
    costs = [(cost(span), cost(lambda _: Bare(kept))) for _ in range(20)]
    assert min(mine for mine, _ in costs) < 6 * min(bare for _, bare in costs)
