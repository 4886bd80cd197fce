"""Tests of what is made of spans: figures per stage, and the viewer's trace."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tracing import busy_seconds, chrome_trace, summarize, write_chrome_trace
from routing.errors import OptionError
from routing.trace import Span

RUN = [
    Span("verify", "layer", 10.0, 14.0, sweep=0, layer=0),
    Span("disk", "fill", 10.0, 12.0, layer=1, nbytes=3_000_000_000),
    Span("disk", "fill", 11.0, 13.0, layer=2, nbytes=3_000_000_000),
    Span("verify", "layer", 16.0, 20.0, sweep=0, layer=1),
    Span("draft", "level", 15.0, 16.0, session=3, rows=2),
]


def test_a_summary_counts_work_under_way_at_once_only_once() -> None:
    stages = summarize(RUN)
    assert list(stages) == ["disk", "draft", "verify"]
    disk = stages["disk"]
    assert (disk.count, disk.p50_s, disk.p99_s) == (2, 2.0, 2.0)
    assert (disk.busy_s, disk.busy_share, disk.nbytes, disk.gbps) == (3.0, 0.3, 6_000_000_000, 2.0)
    assert (stages["verify"].busy_share, stages["verify"].gbps) == (0.8, None)


def test_the_wall_time_may_be_given() -> None:
    assert summarize(RUN, wall=20.0)["verify"].busy_share == 0.4


def test_no_spans_and_no_time_are_no_error() -> None:
    assert summarize([]) == {}
    still = summarize([Span("commit", "commit", 1.0, 1.0, nbytes=5)])["commit"]
    assert (still.busy_share, still.gbps) == (0.0, None)


def test_percentiles_are_by_nearest_rank() -> None:
    spans = [Span("draft", "level", 0.0, float(length)) for length in range(1, 201)]
    draft = summarize(spans)["draft"]
    assert (draft.p50_s, draft.p99_s) == (100.0, 198.0)


def test_unknown_stages_come_last_by_name() -> None:
    spans = [Span(stage, "", 0.0, 1.0) for stage in ("zeta", "alpha", "commit", "route")]
    assert list(summarize(spans)) == ["route", "commit", "alpha", "zeta"]


MOMENTS = st.tuples(st.integers(0, 40), st.integers(0, 12))
SPANS = st.lists(
    st.builds(
        lambda stage, moment: Span(stage, "x", float(moment[0]), float(sum(moment))),
        st.sampled_from(["disk", "verify"]),
        MOMENTS,
    ),
    max_size=30,
)


@settings(deadline=None)
@given(SPANS)
def test_the_union_is_what_a_clock_would_count(spans: list[Span]) -> None:
    seconds = {second for s in spans for second in range(int(s.start), int(s.end))}
    assert busy_seconds(spans) == len(seconds)


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def track_names(trace: dict[str, Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}


def test_each_stage_has_one_track_in_order() -> None:
    spans = [span for span in RUN if span.layer != 2]
    names = track_names(chrome_trace(spans))
    assert [names[thread] for thread in sorted(names)] == ["disk", "draft", "verify"]


def test_events_carry_times_in_microseconds_and_what_is_known() -> None:
    trace = chrome_trace(RUN)
    assert json.loads(json.dumps(trace)) == trace
    draft = next(event for event in events(trace, "X") if event["cat"] == "draft")
    assert (draft["name"], draft["ts"], draft["dur"]) == ("level", 5e6, 1e6)
    assert draft["args"] == {"session": 3, "rows": 2}
    first = next(event for event in events(trace, "X") if event["cat"] == "disk")
    assert first["args"] == {"layer": 1, "nbytes": 3_000_000_000}


def test_an_empty_trace_is_a_trace() -> None:
    assert events(chrome_trace([]), "X") == []


@settings(deadline=None)
@given(SPANS)
def test_no_event_is_lost_and_those_of_one_track_nest(spans: list[Span]) -> None:
    trace = chrome_trace(spans)
    shown, names = events(trace, "X"), track_names(trace)
    assert len(shown) == len(spans)
    assert all(names[event["tid"]] == event["cat"] for event in shown)
    for thread in names:
        mine = [(e["ts"], e["ts"] + e["dur"]) for e in shown if e["tid"] == thread]
        for index, (start, end) in enumerate(mine):
            for other_start, other_end in mine[index + 1 :]:
                apart = other_start >= end or other_end <= start
                assert apart or (start <= other_start and other_end <= end)


def test_the_file_is_written_wholly(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    write_chrome_trace(path, RUN)
    assert json.loads(path.read_text()) == chrome_trace(RUN)
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OptionError, match="Permission denied"):
        write_chrome_trace(path, RUN)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_path_that_cannot_be_written_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        write_chrome_trace(tmp_path / "missing" / "trace.json", RUN)
    (tmp_path / "traces").mkdir()
    with pytest.raises(OptionError, match="directory"):
        write_chrome_trace(tmp_path / "traces", RUN)
    assert os.listdir(tmp_path) == ["traces"]
