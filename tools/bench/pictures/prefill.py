"""`prefill`: the time to the first token by length, over what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from tools.bench.pictures.style import (
    LIMIT,
    OURS,
    add_caption,
    described,
    line,
    new_figure,
    title_of,
)


def draw_prefill(result: Mapping[str, Any]) -> Figure:
    """Both in seconds, and both axes logarithmic: lengths differ by factors."""
    made, (axes,) = new_figure(title_of(result, "time to the first token"))
    lengths = [int(length) for length in result["lengths"]]
    figures = list(result["lengths"].values())
    bounds = [_bound(one) for one in figures]
    line(axes, lengths, figures, "ttft_s", label="time to the first token", color=OURS)
    label = "the longer of compute and one sweep's link"
    line(axes, lengths, bounds, "bound_s", label=label, color=LIMIT, dashed=True)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("seconds")
    axes.legend(fontsize=8)
    for length, one in zip(lengths, figures, strict=True):
        if one["ttft_s"] is not None and one["over_longest"] is not None:
            told = f"{one['over_longest']:.2f} x"
            place = (length, one["ttft_s"])
            axes.annotate(told, place, xytext=(5, -11), textcoords="offset points", fontsize=8)
    skipped = [f"{length} skipped: {why}" for length, why in result["skipped_lengths"].items()]
    add_caption(made, [described(result), *skipped])
    return made


def _bound(one: Mapping[str, Any]) -> dict[str, float | None]:
    parts = [one[key] for key in ("compute_s", "link_s") if one[key] is not None]
    return {"bound_s": max(parts, default=None)}
