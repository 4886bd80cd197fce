"""From a result to the bytes of its picture."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from tools.bench.pictures.arms import draw_decode, draw_resident
from tools.bench.pictures.context import draw_context
from tools.bench.pictures.duels import draw_budgets, draw_links
from tools.bench.pictures.link import draw_link
from tools.bench.pictures.overlap import draw_overlap
from tools.bench.pictures.prefill import draw_prefill
from tools.bench.pictures.tree import draw_tree

PICTURES: dict[str, Callable[[Mapping[str, Any]], Figure]] = {
    "link": draw_link,
    "decode": draw_decode,
    "overlap": draw_overlap,
    "budgets": draw_budgets,
    "links": draw_links,
    "prefill": draw_prefill,
    "resident": draw_resident,
    "tree": draw_tree,
    "context": draw_context,
}


def draw(result: Mapping[str, Any]) -> Figure:
    """The picture of a result as it stands in its JSON file, whose `what` is one of PICTURES."""
    return PICTURES[result["what"]](result)


def png(figure: Figure) -> bytes:
    """A figure as a PNG file. The same figure gives the same bytes."""
    held = io.BytesIO()
    figure.savefig(held, format="png", metadata={"Software": None})
    return held.getvalue()
