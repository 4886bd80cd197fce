"""`context`: tau, tokens a second and bytes of keys and values by length, shared and own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from tools.bench.pictures.style import (
    MIB,
    OURS,
    THEIRS,
    add_caption,
    described,
    line,
    new_figure,
    title_of,
)

_LOOKS = {
    "shared": ("the target's keys and values", OURS),
    "own": ("keys and values of the drafter's own", THEIRS),
}
_AXES = {
    "tau": "tau, accepted drafts a round",
    "tokens_per_s": "tokens a second",
    "kv_mib": "committed keys and values, MiB",
}


def draw_context(result: Mapping[str, Any]) -> Figure:
    """Three axes side by side over the same lengths."""
    about = "drafts over shared keys and values, and over own"
    made, axes = new_figure(title_of(result, about), 1, len(_AXES))
    places = [int(length) for length in result["lengths"]]
    for one, (key, label) in zip(axes, _AXES.items(), strict=True):
        for name, (told, color) in _LOOKS.items():
            figures = [
                {**arms[name], "kv_mib": arms[name]["kv_bytes"] / MIB}
                for arms in result["lengths"].values()
            ]
            line(one, places, figures, key, label=told, color=color)
        one.set_xscale("log", base=2)
        one.set_xticks(places, [f"{length:,}" for length in places], minor=False)
        one.set_xlabel("tokens of the prompt")
        one.set_ylabel(label)
        one.margins(x=0.1, y=0.2)
        one.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    about = f"{result['substitute']}, a sweep {result['sweep_s'] * 1e3:.0f} ms"
    skipped = [f"{length} skipped: {why}" for length, why in result["skipped_lengths"].items()]
    add_caption(made, [f"{described(result)}, {about}", *skipped])
    return made
