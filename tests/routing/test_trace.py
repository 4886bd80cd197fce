"""Tests of the trace: what it keeps, from how many threads, at what cost."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from routing.trace import Span, Trace


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


def test_the_cost_does_not_show() -> None:
    """Under 2 microseconds on an idle machine; the bound here is one that a busy one keeps."""
    trace = Trace()

    def cost(count: int = 1000) -> float:
        start = time.perf_counter()
        for layer in range(count):
            with trace.span("verify", "layer", sweep=1, layer=layer):
                pass
        return (time.perf_counter() - start) / count

    assert min(cost() for _ in range(10)) < 10e-6
