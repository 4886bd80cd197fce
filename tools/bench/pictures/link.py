"""`link`: plain aligned reads against what sweeps reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from tools.bench.pictures.style import (
    OURS,
    PLAIN,
    add_caption,
    bars,
    described,
    error_of,
    new_figure,
    title_of,
)


def draw_link(result: Mapping[str, Any]) -> Figure:
    """Two bars, and the one over the other in words."""
    made, (axes,) = new_figure(title_of(result, "bandwidth, the link alone and in sweeps"))
    (arm,) = result["arms"].values()
    raw = {"gbps": arm["raw_gbps"], "spread": _renamed(arm, "raw_gbps")}
    reached = {"gbps": arm["sweep_gbps"], "spread": _renamed(arm, "sweep_gbps")}
    bars(
        axes,
        ["plain aligned reads", "sweeps of plain streaming"],
        [raw, reached],
        "gbps",
        colors=[PLAIN, OURS],
    )
    axes.set_ylabel("GB/s")
    told = []
    if arm["saturation"] is not None:
        low, high = error_of(arm, "saturation")
        value = arm["saturation"]
        told.append(f"saturation {value:.2f} ({value - low:.2f} - {value + high:.2f})")
    bits = result["bits_per_weight_streamed"]
    if bits is not None:
        told.append(f"{bits:.2f} bits a weight streamed")
    axes.set_title("; ".join(told), fontsize=9)
    add_caption(made, [described(result), *result["notes"]])
    return made


def _renamed(arm: Mapping[str, Any], key: str) -> dict[str, Any]:
    spread = arm["spread"].get(key)
    return {} if spread is None else {"gbps": spread}
