"""`budgets` and `links`: ours and plain streaming, measured and predicted, along one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.bench.duels_table import chosen, failures, settings_of
from tools.bench.pictures.style import (
    LIMIT,
    MIB,
    OURS,
    PLAIN,
    add_caption,
    described,
    line,
    new_figure,
    title_of,
)


def draw_budgets(result: Mapping[str, Any]) -> Figure:
    """Tokens a second above, tau below, against the budget."""
    made, (speed, tau) = new_figure(title_of(result, "against the memory budget"), 2)
    places = [int(nbytes) / MIB for nbytes in result["budgets"]]
    figures = list(result["budgets"].values())
    _draw_speeds(speed, places, figures)
    speed.set_ylim(bottom=0)
    line(tau, places, figures, "tau", label="tau", color=OURS)
    tau.set_ylabel("tau, accepted drafts a round")
    tau.set_ylim(bottom=0)
    for axes in (speed, tau):
        axes.margins(x=0.1)
        axes.set_xlabel("memory budget, MiB")
        axes.set_xticks(places, [f"{place:.0f}" for place in places], rotation=30)
    skipped = [
        f"{int(nbytes) / MIB:.0f} MiB skipped: {why}"
        for nbytes, why in result["skipped_budgets"].items()
    ]
    add_caption(made, [described(result), *failures(settings_of(result)), *skipped])
    return made


def draw_links(result: Mapping[str, Any]) -> Figure:
    """Tokens a second above, ours over plain below, against the link's bandwidth."""
    made, (speed, gain) = new_figure(title_of(result, "where speculation pays"), 2)
    places = [float(gbps) for gbps in result["links"]]
    figures = list(result["links"].values())
    _draw_speeds(speed, places, figures)
    speed.set_yscale("log")
    label = "ours over plain"
    line(gain, places, figures, "speedup_over_plain", label=label, color=OURS)
    gain.axhline(1.0, color=LIMIT, linestyle="--", label="no gain")
    gain.set_ylabel("times as fast as plain")
    gain.set_ylim(bottom=0)
    gain.legend(fontsize=8)
    for axes in (speed, gain):
        axes.set_xscale("log")
        axes.margins(x=0.1)
        axes.set_xticks(places, list(result["links"]))
        axes.set_xticks([], minor=True)
        axes.set_xlabel("simulated link, GB/s")
    failed = failures(settings_of(result))
    add_caption(made, [described(result), *failed, *result["notes"]])
    return made


def _draw_speeds(axes: Axes, places: Sequence[float], figures: Sequence[Mapping[str, Any]]) -> None:
    """Four lines, and the plan's choice at each point of ours."""
    line(axes, places, figures, "tokens_per_s", label="ours, measured", color=OURS)
    line(
        axes,
        places,
        figures,
        "predicted_tokens_per_s",
        label="ours, predicted",
        color=OURS,
        dashed=True,
    )
    line(axes, places, figures, "plain_tokens_per_s", label="plain, measured", color=PLAIN)
    line(
        axes,
        places,
        figures,
        "plain_predicted_tokens_per_s",
        label="plain, predicted",
        color=PLAIN,
        dashed=True,
    )
    for place, one in zip(places, figures, strict=True):
        if one["tokens_per_s"] is not None:
            axes.annotate(
                chosen(one),
                (place, one["tokens_per_s"]),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=OURS,
            )
    axes.margins(y=0.2)
    axes.set_ylabel("tokens a second")
    axes.legend(fontsize=8)
