"""`decode` and `resident`: tokens a second by arm, and what a round of ours is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.bench.pictures.style import (
    FAINT,
    LIMIT,
    OURS,
    PLAIN,
    THEIRS,
    add_caption,
    arm_color,
    arm_label,
    bars,
    described,
    new_figure,
    title_of,
)

_ARM = "paceline"


class Round(NamedTuple):
    """One round's stages, in seconds; `limit_s`: its bytes at the link's own bandwidth."""

    draft_s: float
    link_s: float
    rest_s: float
    commit_s: float
    limit_s: float | None


def round_of(arm: Mapping[str, Any]) -> Round | None:
    """What a round of an arm is made of; None where it had none.

    `link_s` is as much of the sweep as the link's limit accounts for, `rest_s` what is beyond it.
    """
    if arm["sweep_s"] is None:
        return None
    limit, sweep = None, arm["sweep_s"]
    if arm["bytes_per_sweep"] and arm["raw_gbps"]:
        limit = arm["bytes_per_sweep"] / arm["raw_gbps"] / 1e9
    bound = min(sweep, limit or 0.0)
    return Round(arm["draft_s"] or 0.0, bound, sweep - bound, arm["commit_s"] or 0.0, limit)


def draw_decode(result: Mapping[str, Any]) -> Figure:
    """Arms on the left, the round on the right."""
    made, (arms, stages) = new_figure(title_of(result, "tokens a second of one session"), 1, 2)
    _draw_arms(arms, result)
    _draw_round(stages, round_of(result["arms"][_ARM]))
    add_caption(made, _caption(result))
    return made


def draw_resident(result: Mapping[str, Any]) -> Figure:
    """Arms alone: nothing is streamed."""
    made, (arms,) = new_figure(title_of(result, "tokens a second where everything fits"))
    _draw_arms(arms, result)
    add_caption(made, _caption(result))
    return made


def _draw_arms(axes: Axes, result: Mapping[str, Any]) -> None:
    ran = {name: arm for name, arm in result["arms"].items() if arm["tokens_per_s"] is not None}
    bars(
        axes,
        [arm_label(name) for name in ran],
        list(ran.values()),
        "tokens_per_s",
        colors=[arm_color(name) for name in ran],
    )
    axes.set_ylabel("tokens a second")
    axes.set_title("median; lines from the least to the most", fontsize=9)


def _draw_round(axes: Axes, one: Round | None) -> None:
    axes.set_title("one round of ours", fontsize=9)
    if one is None:
        axes.text(0.5, 0.5, "no rounds", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    low = 0.0  # the link's part first, so that what stands above the limit is what it costs us
    for name, seconds, color in (
        ("sweep: the link's part", one.link_s, OURS),
        ("sweep: beyond it", one.rest_s, THEIRS),
        ("draft", one.draft_s, FAINT),
        ("commit", one.commit_s, PLAIN),
    ):
        told = f"{name}, {seconds * 1e3:.1f} ms"
        axes.bar(0, seconds * 1e3, 0.5, bottom=low * 1e3, color=color, label=told, zorder=2)
        low += seconds
    if one.limit_s is not None:
        told = f"the link's limit, {one.limit_s * 1e3:.1f} ms"
        axes.axhline(one.limit_s * 1e3, color=LIMIT, linestyle="--", label=told, zorder=3)
    axes.set_xticks([0], ["sweep, draft, commit"], fontsize=9)
    axes.set_xlim(-0.4, 1.4)
    axes.set_ylim(0, 1.12e3 * max(low, one.limit_s or 0.0))
    axes.set_ylabel("milliseconds a round")
    axes.legend(loc="upper right", fontsize=8, reverse=True)


def _caption(result: Mapping[str, Any]) -> list[str]:
    absent = [
        f"{name} has no bar: {arm['skipped'] or arm['failed'] or 'no tokens after the first'}"
        for name, arm in result["arms"].items()
        if arm["tokens_per_s"] is None
    ]
    return [described(result), *absent]
