"""What the spans of one answer say of its prompt and its rounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from pipeline.tracing import busy_seconds
from routing.trace import Span


class Rounds(msgspec.Struct, frozen=True):
    """Means over the rounds of one answer, in seconds; the prompt's own sweep is left out.

    A sweep takes from its first step's start to its last step's end, waits for weights included.
    `draft_s` is what was drafted between two sweeps, 0 where nothing was; `draft_step_s` is the
    median of one step of a tree. `useful_draft_s` adds what was drafted ahead of verdicts, as much
    of it as was kept: of the time of the steps ahead of one, the share of their nodes that outlived
    it. `compute_s` are the sweeps without the waits for weights. `commit_s` counts the rounds that
    committed something: the last one of an answer does not. `sweep_gbps` is what came over the link
    from the first of the sweeps to the end of the last, by the time that took. None: there was none
    of it.
    """

    count: int
    sweep_s: float
    draft_s: float
    useful_draft_s: float
    compute_s: float
    commit_s: float | None
    draft_step_s: float | None
    sweep_gbps: float | None


class PromptSweeps(msgspec.Struct, frozen=True):
    """The sweeps that took in one prompt. `compute_s` leaves out the waits for weights."""

    count: int
    compute_s: float


class _Time(NamedTuple):
    start: float
    end: float


def see_rounds(spans: Sequence[Span], began: float, ended: float, count: int) -> Rounds | None:
    """The `count` rounds of the one request that was answered between `began` and `ended`.

    The spans may be those of a whole run, on the same clock. None if there was no round.
    """
    # The prompt's sweeps, however many, come before those of the rounds.
    sweeps = _sweeps(span for span in spans if began <= span.start <= ended)[-count:]
    if not count or not sweeps:
        return None
    after = _Time(sweeps[0].start, sweeps[-1].end)
    # The first tree of an answer is drafted after the prompt's sweep, before its own.
    # What is drafted ahead while a sweep is under way costs a round no time.
    drafted = [s for s in spans if s.stage == "draft" and began <= s.start <= after.end]
    drafts = [s for s in drafted if s.name not in ("ahead", "keep")]
    verified = [s for s in spans if s.stage == "verify" and after.start <= s.start <= after.end]
    commits = [s for s in spans if s.stage == "commit" and after.start <= s.start <= ended]
    return Rounds(
        count=len(sweeps),
        sweep_s=fmean(time.end - time.start for time in sweeps),
        draft_s=busy_seconds(drafts) / len(sweeps),
        useful_draft_s=(busy_seconds(drafts) + _kept_ahead(drafted)) / len(sweeps),
        compute_s=busy_seconds(verified) / len(sweeps),
        commit_s=fmean(s.end - s.start for s in commits) if commits else None,
        draft_step_s=median(s.end - s.start for s in drafts) if drafts else None,
        sweep_gbps=_reached(spans, after),
    )


def see_prompt(spans: Iterable[Span], began: float, first: float) -> PromptSweeps | None:
    """The sweeps before the first token of the one request that was made at `began`.

    `first` is when that token came, or a moment before. None if no such sweep is in the trace.
    """
    verify = [span for span in spans if span.stage == "verify"]
    counts = {span.sweep for span in verify if began <= span.start <= first}
    if not counts:
        return None
    # The verifier waits for weights between its spans. The last ones may begin after `first`.
    return PromptSweeps(len(counts), busy_seconds(s for s in verify if s.sweep in counts))


def bytes_per_sweep(spans: Iterable[Span]) -> int | None:
    """Bytes that crossed the link for one sweep, None when nothing did.

    The most of any sweep in the trace: one that is under way, or whose first spans are gone, has
    fewer.
    """
    found: dict[int, int] = {}
    for span in _transfers(spans):
        found[span.sweep] = found.get(span.sweep, 0) + span.nbytes
    return max(found.values(), default=None)


def _kept_ahead(drafted: Iterable[Span]) -> float:
    """Seconds of the steps that were made ahead of verdicts, for what was kept of them."""
    kept, seconds, rows = 0.0, 0.0, 0
    for span in sorted(drafted, key=lambda span: span.start):
        if span.name == "ahead":
            seconds, rows = seconds + span.end - span.start, rows + span.rows
            continue
        if span.name == "keep" and rows:
            kept += seconds * span.rows / rows
        # The next tree is begun: what is left of the one before was drafted in vain.
        seconds, rows = 0.0, 0
    return kept


def _transfers(spans: Iterable[Span]) -> list[Span]:
    """Those of the last hop into the device: the copies of an accelerator, else the reads."""
    spans = list(spans)
    copies = [span for span in spans if span.stage == "copy"]
    return copies or [span for span in spans if span.stage == "disk"]


def _sweeps(spans: Iterable[Span]) -> list[_Time]:
    found: dict[int, _Time] = {}
    for span in spans:
        if span.stage == "verify":
            time = found.get(span.sweep, _Time(span.start, span.end))
            found[span.sweep] = _Time(min(time.start, span.start), max(time.end, span.end))
    return sorted(found.values())


def _reached(spans: Iterable[Span], window: _Time) -> float | None:
    """GB/s in the window; a transfer that lies in it in part counts in part."""
    nbytes = 0.0
    for span in _transfers(spans):
        inside = min(span.end, window.end) - max(span.start, window.start)
        if inside > 0:
            nbytes += span.nbytes * inside / (span.end - span.start)
    return nbytes / (window.end - window.start) / 1e9 if nbytes else None
