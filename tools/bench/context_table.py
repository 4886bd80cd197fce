"""The result of `context` as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tools.bench.results import Result

MIB = 1 << 20


def context_table(result: Result) -> Table:
    """A row an arm of each length, and the one over the other below."""
    about = f"context: {result['repeats']} prompts a length, {result['max_tokens']} tokens of"
    where = f"{result['substitute']}, a sweep {result['sweep_s'] * 1e3:.0f} ms"
    table = Table(title=f"{about} answer, {where}", title_justify="left")
    for column in ("tokens", "keys and values"):
        table.add_column(column, justify="right" if column == "tokens" else "left")
    for column in (
        "tau",
        "tokens a round",
        "tokens a second",
        "a draft step, ms",
        "KV, MiB",
        "rounds",
        "own rows, s",
    ):
        table.add_column(column, justify="right")
    for length, arms in result["lengths"].items():
        for name, arm in arms.items():
            table.add_row(length, name, *_cells(name, arm))
        over = result["shared_over_own"][length]
        ratios = (_number(over[key], 2) for key in ("tokens_per_round", "tokens_per_s"))
        table.add_row("", "shared / own", "", *ratios, "", _number(over["kv_bytes"], 2), "", "")
        table.add_section()
    skipped = [f"{length} skipped: {why}" for length, why in result["skipped_lengths"].items()]
    table.caption = "\n".join((*skipped, *result["notes"]))
    return table


def _cells(name: str, arm: dict[str, Any]) -> list[str]:
    step_s, rows_s = arm["draft_step_s"], arm["rows_s"] if name == "own" else None
    return [
        _number(arm["tau"], 2),
        _number(arm["tokens_per_round"], 2),
        _number(arm["tokens_per_s"], 2),
        _number(None if step_s is None else step_s * 1e3, 1),
        _number(arm["kv_bytes"] / MIB, 1),
        str(arm["rounds"]),
        _number(rows_s, 1),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
