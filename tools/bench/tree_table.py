"""The result of `tree` as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tools.bench.results import Result

_RATIOS = {
    "ours_over_chain": "ours / chain",
    "ours_over_subspec": "ours / subspec",
    "sampled_over_greedy": "ours / ours at 0",
    "noise_gain": "ours / without noise",
}


def tree_table(result: Result) -> Table:
    """A row an arm, its budgets side by side: tokens a round, nodes sent, tokens a second."""
    budgets = list(result["budgets"])
    title = f"tree: {len(result['prompts'])} prompts, {result['max_tokens']} tokens"
    where = f"{result['memory'] / (1 << 20):.0f} MiB, at most {result['nodes']} nodes sent"
    table = Table(title=f"{title}, {where}", title_justify="left")
    for column in ("format", "temperature", "rule"):
        table.add_column(column)
    for budget in budgets:
        table.add_column(f"{budget} of a sweep", justify="right")
    for form, heats in result["arms"].items():
        for heat, of in heats.items():
            for rule in of[budgets[0]]:
                cells = (_cell(of[budget][rule]) for budget in budgets)
                table.add_row(form, heat, rule, *cells)
            for key, told in _RATIOS.items():
                ratios = result["summary"][form][key].get(heat)
                if ratios is not None:
                    cells = (_number(ratios[budget], 2) for budget in budgets)
                    table.add_row("", "", f"  {told}", *cells)
            table.add_section()
    table.caption = "\n".join(
        ("tokens a round (nodes sent, tokens a second)", *_times(result), *result["notes"])
    )
    return table


def _cell(arm: dict[str, Any]) -> str:
    tokens, nodes = _number(arm["tokens_per_round"], 2), _number(arm["nodes"], 0)
    return f"{tokens} ({nodes}, {_number(arm['tokens_per_s'], 1)})"


def _times(result: Result) -> list[str]:
    said = []
    for form, sweep in result["sweeps"].items():
        steps = ", ".join(
            f"{rows}: {seconds * 1e3:.1f}" for rows, seconds in result["draft_step_s"][form].items()
        )
        said.append(f"{form}: a sweep {sweep['sweep_s'][0] * 1e3:.0f} ms; steps by rows {steps}")
    return said


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
