"""The result of `prefill` as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tools.bench.results import Result

MIB = 1 << 20


def prefill_table(result: Result) -> Table:
    """A row a length; medians with the least and the most."""
    limited = result["memory_group"] or "no kernel limit"
    where = f"{result['memory'] / MIB:.0f} MiB ({limited}), context {result['context']}"
    title = f"prefill: {result['repeats']} prompts a length, {where}"
    table = Table(title=title, title_justify="left")
    for column in (
        "tokens",
        "to the first token, s",
        "sweeps",
        "compute, s",
        "a sweep's link, s",
        "over the longer",
        "peak memory, MiB",
    ):
        table.add_column(column, justify="right")
    for length, figures in result["lengths"].items():
        table.add_row(
            length,
            _spread(figures, "ttft_s"),
            _spread(figures, "sweeps", 0),
            _spread(figures, "compute_s"),
            _spread(figures, "link_s"),
            _spread(figures, "over_longest"),
            f"{figures['peak_memory_bytes'] / MIB:.1f}",
        )
    skipped = [f"{length} skipped: {why}" for length, why in result["skipped_lengths"].items()]
    peak = "peak memory: over the baseline, once all shorter ones were asked"
    table.caption = "\n".join((peak, *skipped, *result["notes"]))
    return table


def _spread(figures: Mapping[str, Any], key: str, digits: int = 2) -> str:
    if figures[key] is None:
        return "-"
    low, high = figures["spread"][key]
    text = f"{figures[key]:.{digits}f}"
    return text if low == high else f"{text} ({low:.{digits}f} - {high:.{digits}f})"
