"""The results of `budgets` and `links` as tables for people. Results are as in the JSON.

Both are as narrow as a terminal of 80 columns; the JSON has more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tools.bench.results import Result

MIB = 1 << 20


def budgets_table(result: Result) -> Table:
    """A row a budget; medians with the least and the most."""
    table = _table(
        f"budgets: {_asked(result)}",
        ("MiB", "plan", "tokens/s", "of the\nforecast", "tau", "plain,\ntokens/s", "over\nplain"),
    )
    for nbytes, one in result["budgets"].items():
        table.add_row(
            f"{int(nbytes) / MIB:.0f}",
            chosen(one),
            _spread(one, "tokens_per_s"),
            _forecast(one),
            _number(one["tau"]),
            _spread(one, "plain_tokens_per_s"),
            _spread(one, "speedup_over_plain"),
        )
    skipped = [
        f"{int(nbytes) / MIB:.0f} MiB skipped: {why}"
        for nbytes, why in result["skipped_budgets"].items()
    ]
    named = settings_of(result)
    told = (*_lossless(named), *failures(named), *skipped, *result["notes"])
    table.caption = "\n".join(told)
    return table


def links_table(result: Result) -> Table:
    """A row a link; medians with the least and the most."""
    table = _table(
        f"links: {_asked(result)}, {result['memory'] / MIB:.0f} MiB",
        (
            "GB/s",
            "plan",
            "tokens/s",
            "tokens\na round",
            "plain,\ntokens/s",
            "over\nplain",
            "plain's\nGB/s",
        ),
    )
    for gbps, one in result["links"].items():
        table.add_row(
            gbps,
            chosen(one),
            _spread(one, "tokens_per_s"),
            _number(one["tokens_per_round"]),
            _spread(one, "plain_tokens_per_s"),
            _spread(one, "speedup_over_plain"),
            _number(one["plain_sweep_gbps"]),
        )
    named = settings_of(result)
    table.caption = "\n".join((*_lossless(named), *failures(named), *result["notes"]))
    return table


def chosen(figures: Mapping[str, Any]) -> str:
    """What the plan chose: its step and, where there are substitutes, their format."""
    step, form = figures["step"], figures["substitute"]
    if step is None:
        return "-"
    return f"{step}\n{form}" if form else str(step)


def settings_of(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The figures of each setting, by its name with its unit."""
    if result["what"] == "links":
        return {f"{gbps} GB/s": one for gbps, one in result["links"].items()}
    return {f"{int(nbytes) / MIB:.0f} MiB": one for nbytes, one in result["budgets"].items()}


def failures(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which arm failed where."""
    return [
        f"{key}: {name} FAILED: {why}"
        for key, one in settings.items()
        for name, why in one["failed"].items()
    ]


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == "plan" else "right")
    return table


def _asked(result: Result) -> str:
    prompts = f"{len(result['prompts'])} prompts x {result['repeats']}"
    limited = result["memory_group"] or "no kernel limit"
    return f"{prompts}, {result['max_tokens']} tokens ({limited})"


def _lossless(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    differ = {key: one["differing_prompts"] for key, one in found.items() if not one["lossless"]}
    if not differ:
        return ["lossless: paceline's tokens are plain's, for every prompt"]
    return [
        f"NOT lossless at {key}: other tokens than plain's for {', '.join(names)}"
        if names
        else f"lossless: not compared at {key}"
        for key, names in differ.items()
    ]


def _forecast(figures: Mapping[str, Any]) -> str:
    predicted = _number(figures["predicted_tokens_per_s"])
    return f"{_number(figures['measured_over_predicted'])}\nof {predicted}"


def _spread(figures: Mapping[str, Any], key: str) -> str:
    text = _number(figures[key])
    low, high = figures["spread"].get(key, (None, None))
    if low == high:
        return text
    return f"{text}\n({_number(low)}-{_number(high)})"


def _number(value: float | None) -> str:
    """As many digits as say something, since there are many columns."""
    if value is None:
        return "-"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
