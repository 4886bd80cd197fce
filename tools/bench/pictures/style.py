"""How all pictures look: sizes, colors, labels, error bars, and what is said below."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MIB = 1 << 20
WIDTH, HEIGHT = 6.4, 4.2
"""Of one set of axes, in inches."""
DPI = 120
OURS, PLAIN, THEIRS, LIMIT, FAINT = "#1f5fa8", "#8c8c8c", "#d9822b", "#b3261e", "#9db8d9"
_ARMS = {
    "paceline": OURS,
    "plain": PLAIN,
    "sequential": FAINT,
    "no_ahead": FAINT,
    "transformers": THEIRS,
    "transformers_assisted": "#7a5195",
    "llamacpp": "#4b8f5a",
}
_CAPS = {"capsize": 3.0, "ecolor": "#333333", "elinewidth": 1.0}


def new_figure(title: str, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure and its axes, row by row."""
    made = Figure(figsize=(WIDTH * columns, HEIGHT * rows), dpi=DPI, layout="constrained")
    FigureCanvasAgg(made)
    found = made.subplots(rows, columns, squeeze=False)
    axes: list[Axes] = [one for row in found for one in row]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#dddddd", linewidth=0.8)
        one.set_axisbelow(True)
    made.suptitle(title, fontsize=12, fontweight="bold")
    return made, axes


def title_of(result: Mapping[str, Any], about: str) -> str:
    """What a picture is about, of which model and in how much memory."""
    parts = [f"{result['what']}: {about}", Path(result["model"]).name]
    if result["memory"] is not None:
        parts.append(f"{result['memory'] / MIB:.0f} MiB")
    return "\n".join((parts[0], ", ".join(parts[1:])))


def add_caption(made: Figure, lines: Sequence[str]) -> None:
    """What has to be known beside a picture, below it."""
    width = int(made.get_figwidth() * 15)
    text = "\n".join(wrapped for line in lines for wrapped in textwrap.wrap(line, width))
    if text:
        made.supxlabel(text, fontsize=8, color="#444444", x=0.02, ha="left")


def described(result: Mapping[str, Any]) -> str:
    """The machine in a line."""
    machine = result["machine"]
    said = [str(machine["system"]), f"{machine['cores']} cores"]
    if machine["link_gbps"] is not None:
        said.append(f"link {machine['link_gbps']:.2f} GB/s")
    simulated = result.get("simulated_link_gbps")
    if simulated is not None:
        said.append(f"simulated: {simulated:g} GB/s")
    return ", ".join(said)


def error_of(figures: Mapping[str, Any], key: str, unit: float = 1.0) -> tuple[float, float]:
    """How far the spread of a figure reaches below and above it; 0 where none is known."""
    value = figures[key]
    low, high = figures.get("spread", {}).get(key, (value, value))
    return max(0.0, value - low) / unit, max(0.0, high - value) / unit


def bars(
    axes: Axes,
    labels: Sequence[str],
    figures: Sequence[Mapping[str, Any]],
    key: str,
    *,
    colors: Sequence[str],
    digits: int = 2,
) -> None:
    """A bar for each, with its spread and its value; those without a figure leave a gap."""
    for place, (one, color) in enumerate(zip(figures, colors, strict=True)):
        if one[key] is None:
            continue
        low, high = error_of(one, key)
        axes.bar(place, one[key], 0.6, color=color, yerr=[[low], [high]], error_kw=_CAPS, zorder=2)
        axes.annotate(
            f"{one[key]:.{digits}f}",
            (place, one[key] + high),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.set_xticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)


def line(
    axes: Axes,
    places: Sequence[float],
    figures: Sequence[Mapping[str, Any]],
    key: str,
    *,
    label: str,
    color: str,
    dashed: bool = False,
) -> None:
    """A line through the figures there are, with their spread."""
    known = [(x, one) for x, one in zip(places, figures, strict=True) if one[key] is not None]
    errors = [error_of(one, key) for _, one in known]
    axes.errorbar(
        [x for x, _ in known],
        [one[key] for _, one in known],
        yerr=list(zip(*errors, strict=True)) if errors and not dashed else None,
        label=label,
        color=color,
        linestyle="--" if dashed else "-",
        marker="o" if not dashed else "x",
        markersize=5,
        capsize=3,
    )


def arm_color(name: str) -> str:
    """The color of an arm, the same in every picture."""
    return _ARMS.get(name, LIMIT)


def arm_label(name: str) -> str:
    """The name of an arm in as many lines as it has words."""
    return name.replace("_", "\n")
