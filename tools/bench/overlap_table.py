"""The result of `overlap` as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tools.bench.results import Result

MIB = 1 << 20
STAGES = {
    "link": "the link's bytes, ms",
    "draft": "drafts of use, ms",
    "verify": "verifying, ms",
}


def overlap_table(result: Result) -> Table:
    """One column an arm that ran; medians with the least and the most."""
    arms: dict[str, dict[str, Any]] = result["arms"]
    ran = {name: arm for name, arm in arms.items() if arm["runs"]}
    limited = result["memory_group"] or "no kernel limit"
    asked = f"{len(result['prompts'])} prompts x {result['repeats']}, {result['max_tokens']} tokens"
    where = f"{result['memory'] / MIB:.0f} MiB ({limited})"
    table = Table(title=f"overlap: {asked}, {where}", title_justify="left")
    table.add_column("a round; median (least - most)")
    for name in ran:
        table.add_column(name, justify="right")

    def row(what: str, key: str, unit: float = 1.0, digits: int = 2) -> None:
        table.add_row(what, *(_spread(arm, key, unit, digits) for arm in ran.values()))

    row("all of it, ms", "round_s", 1e-3, 1)
    for stage, what in STAGES.items():
        table.add_row(what, *(_stage(arm, stage) for arm in ran.values()))
    row("over its longest stage", "overlap_ratio")
    row("longest stage over the next", "balance")
    table.add_section()
    row("tokens a second", "tokens_per_s")
    row("of what the longest stage allows", "of_limit")
    row("tau (accepted drafts a round)", "tau")
    row("tokens a round (tau + 1)", "tokens_per_round")
    row("rounds", "rounds", digits=0)
    row("drafted ahead, share kept", "draft_ahead_kept")
    gain = _spread(result, "draft_ahead_gain", 1.0, 2)
    told = (f"drafting ahead: {gain} times the tokens a second", *_differing(result))
    table.caption = "\n".join((*told, *failed_arms(result), *result["notes"]))
    return table


def failed_arms(result: Mapping[str, Any]) -> list[str]:
    """Which arm failed, and how."""
    return [f"{name} FAILED: {a['failed']}" for name, a in result["arms"].items() if a["failed"]]


def _differing(result: Result) -> list[str]:
    names = result["differing_prompts"]
    return [f"NOT the same tokens without it for {', '.join(names)}"] if names else []


def _stage(arm: Mapping[str, Any], stage: str) -> str:
    named = {stage: arm["stage_s"][stage], "spread": arm["stage_spread"]}
    return _spread(named, stage, 1e-3, 1)


def _spread(figures: Mapping[str, Any], key: str, unit: float, digits: int) -> str:
    if figures[key] is None:
        return "-"
    text = f"{figures[key] / unit:.{digits}f}"
    low, high = (f"{one / unit:.{digits}f}" for one in figures["spread"].get(key, (0.0, 0.0)))
    return text if low == high else f"{text} ({low} - {high})"
