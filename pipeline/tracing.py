"""What the spans of a run say: figures per stage, and a trace for Chrome's and Perfetto's viewers.

The trace is the JSON object format of the Trace Event Format: complete events ("X") on named
threads, times in microseconds. Viewers take the events of one thread for a stack of calls, and
Perfetto drops one that overlaps another without lying inside it. A stage may well have several
pieces of work under way at once (reads in flight, sessions), so a stage has one track, and as
many lanes of the same name beside it as it takes for events to nest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pipeline.whole_file import write_whole
from routing.errors import OptionError
from routing.trace import Span

STAGES = ("route", "disk", "copy", "draft", "verify", "commit")
"""In the order in which tables and viewers show them. Others come after, by name."""


class StageSummary(msgspec.Struct, frozen=True):
    """The spans of one stage. Times are seconds.

    `busy_s` is the length of the union of the spans, so work under way at once counts once;
    `busy_share` is its part of the wall time. `gbps` is gigabytes (10^9) a second over the busy
    time, None for a stage that moves no bytes. Percentiles are by nearest rank.
    """

    count: int
    p50_s: float
    p99_s: float
    busy_s: float
    busy_share: float
    nbytes: int
    gbps: float | None


def summarize(spans: Sequence[Span], wall: float | None = None) -> dict[str, StageSummary]:
    """A summary per stage that has spans, in the order of STAGES.

    `wall` is the time, in seconds, in which the spans were made; without it, the time from the
    first start to the last end.
    """
    if not spans:
        return {}
    if wall is None:
        wall = max(span.end for span in spans) - min(span.start for span in spans)
    return {stage: _summary(mine, wall) for stage, mine in _by_stage(spans).items()}


def _by_stage(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.stage, []).append(span)
    rank = {stage: number for number, stage in enumerate(STAGES)}
    order = sorted(found, key=lambda stage: (rank.get(stage, len(rank)), stage))
    return {stage: found[stage] for stage in order}


def _summary(spans: list[Span], wall: float) -> StageSummary:
    lengths = sorted(span.end - span.start for span in spans)
    busy = busy_seconds(spans)
    nbytes = sum(span.nbytes for span in spans)
    return StageSummary(
        count=len(spans),
        p50_s=_percentile(lengths, 0.50),
        p99_s=_percentile(lengths, 0.99),
        busy_s=busy,
        busy_share=busy / wall if wall > 0 else 0.0,
        nbytes=nbytes,
        gbps=nbytes / busy / 1e9 if nbytes and busy > 0 else None,
    )


def _percentile(ordered: list[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def busy_seconds(spans: Iterable[Span]) -> float:
    """The length of the union of the spans, in seconds."""
    busy, reached = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return busy


def chrome_trace(spans: Iterable[Span]) -> dict[str, object]:
    """The spans as a JSON-able dict. Time 0 is the first start."""
    stages = _by_stage(spans)
    origin = min((span.start for mine in stages.values() for span in mine), default=0.0)
    events: list[dict[str, object]] = [_name("process_name", 0, name="paceline")]
    tracks = [(stage, lane) for stage, mine in stages.items() for lane in _lanes(mine, origin)]
    for thread, (stage, lane) in enumerate(tracks, start=1):
        events.append(_name("thread_name", thread, name=stage))
        events.append(_name("thread_sort_index", thread, sort_index=thread))
        events += [_event(span, start, end, thread) for start, end, span in lane]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, thread: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": thread, "args": args}


Timed = tuple[int, int, Span]
"""A span with its start and end in whole nanoseconds from the origin."""


def _lanes(spans: list[Span], origin: float) -> list[list[Timed]]:
    """The spans in as few lanes as first fit finds, so that in each lane any two are nested or
    apart. In nanoseconds, so that rounding cannot undo it afterwards."""
    timed = [(round((s.start - origin) * 1e9), round((s.end - origin) * 1e9), s) for s in spans]
    timed.sort(key=lambda item: (item[0], -item[1]))
    lanes: list[list[Timed]] = []
    stacks: list[list[int]] = []
    for item in timed:
        start, end, _ = item
        for lane, stack in zip(lanes, stacks, strict=True):
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or end <= stack[-1]:
                lane.append(item)
                stack.append(end)
                break
        else:
            lanes.append([item])
            stacks.append([end])
    return lanes


def _event(span: Span, start: int, end: int, thread: int) -> dict[str, object]:
    args: dict[str, object] = {
        field: value
        for field in ("session", "sweep", "layer")
        if (value := getattr(span, field)) >= 0
    }
    if span.nbytes:
        args["nbytes"] = span.nbytes
    if span.rows:
        args["rows"] = span.rows
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.stage,
        "pid": 1,
        "tid": thread,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": args,
    }


def write_chrome_trace(path: Path, spans: Iterable[Span]) -> None:
    """Write `chrome_trace(spans)` to `path`, wholly or not at all.

    Raises OptionError when the file cannot be written.
    """
    data = msgspec.json.encode(chrome_trace(spans))
    try:
        write_whole(path, data)
    except OSError as error:
        raise OptionError(
            "trace", str(path), f"a file that can be written ({error.strerror})"
        ) from error
