"""`overlap`: the stages of a round, each by itself, beside the round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.bench.overlap_table import failed_arms
from tools.bench.pictures.style import (
    FAINT,
    LIMIT,
    OURS,
    PLAIN,
    THEIRS,
    add_caption,
    bars,
    described,
    new_figure,
    title_of,
)

_STAGES = {"link": PLAIN, "draft": FAINT, "verify": THEIRS}


def draw_overlap(result: Mapping[str, Any]) -> Figure:
    """Axes of the same height for each arm that ran."""
    ran = {name: arm for name, arm in result["arms"].items() if arm["runs"]}
    title = title_of(result, "a round and its stages, each by itself")
    made, axes = new_figure(title, 1, len(ran))
    for one, (name, arm) in zip(axes, ran.items(), strict=True):
        _draw_round(one, name, arm)
    most = max(one.get_ylim()[1] for one in axes)
    for one in axes:
        one.set_ylim(0, most)
    told = (
        "link: its bytes at plain reads' bandwidth; draft: what was of use; verify: without waits"
    )
    gain = result["draft_ahead_gain"]
    if gain is not None:
        low, high = result["spread"]["draft_ahead_gain"]
        told += f"; drafting ahead: {gain:.2f} x the tokens a second ({low:.2f} - {high:.2f})"
    add_caption(made, [described(result), told, *failed_arms(result)])
    return made


def _draw_round(axes: Axes, name: str, arm: Mapping[str, Any]) -> None:
    figures = [_ms(arm["stage_s"][stage], arm["stage_spread"].get(stage)) for stage in _STAGES]
    figures.append(_ms(arm["round_s"], arm["spread"].get("round_s")))
    colors = [*_STAGES.values(), OURS]
    bars(axes, [*_STAGES, "round"], figures, "ms", colors=colors, digits=1)
    axes.set_ylabel("milliseconds a round")
    title = name
    ratio = arm["overlap_ratio"]
    if ratio is not None:
        axes.axhline(max(arm["stage_s"].values()) * 1e3, color=LIMIT, linestyle="--", zorder=3)
        title += f": {ratio:.2f} x its longest stage"
    axes.set_title(title, fontsize=9)


def _ms(seconds: float | None, spread: list[float] | None) -> dict[str, Any]:
    if seconds is None:
        return {"ms": None}
    told = {} if spread is None else {"ms": [one * 1e3 for one in spread]}
    return {"ms": seconds * 1e3, "spread": told}
