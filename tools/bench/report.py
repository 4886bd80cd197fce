"""Results of `decode`, `resident` and `link` as tables for people. Results are as in the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tools.bench.results import Result

MIB = 1 << 20


def decode_table(result: Result) -> Table:
    """One column an arm that ran, what was skipped below."""
    arms: dict[str, dict[str, Any]] = result["arms"]
    ran = {name: arm for name, arm in arms.items() if arm["runs"]}
    table = _table(
        f"{result['what']}: {len(result['prompts'])} prompts x {result['repeats']}", result
    )
    table.add_column("median (least - most)")
    for name in ran:
        table.add_column(name, justify="right")

    def row(what: str, key: str, unit: float = 1.0, digits: int = 2) -> None:
        if any(arm.get(key) is not None for arm in ran.values()):
            table.add_row(what, *(_spread(arm, key, unit, digits) for arm in ran.values()))

    row("tokens a second", "tokens_per_s")
    row("predicted by the plan", "predicted_tokens_per_s")
    row("measured over predicted", "measured_over_predicted")
    table.add_row("ours, times as fast as it", *(_times(result, name) for name in ran))
    row("time to first token, s", "ttft_s")
    row("peak memory over baseline, MiB", "peak_memory_bytes", MIB, 1)
    row("baseline, MiB", "baseline_memory_bytes", MIB, 1)
    row("page cache included, MiB", "group_peak_bytes", MIB, 1)
    row("kernel limit on that, MiB", "memory_limit_bytes", MIB, 1)
    row("energy a token, J", "energy_j_per_token")
    table.add_section()
    row("tau (accepted drafts a round)", "tau")
    row("tokens a round (tau + 1)", "tokens_per_round")
    row("rounds", "rounds", digits=0)
    row("draft a round, ms", "draft_s", 1e-3, 1)
    row("one draft step, ms", "draft_step_s", 1e-3, 1)
    row("sweep a round, ms", "sweep_s", 1e-3, 1)
    row("commit a round, ms", "commit_s", 1e-3, 1)
    row("streamed a sweep, MiB", "bytes_per_sweep", MIB, 1)
    row("link alone, GB/s", "raw_gbps")
    row("link in use, of that", "saturation")
    row("of what the link allows (roofline)", "roofline")
    told = (_lossless(result), *_draft_step(result), *_absent(arms), *result["notes"])
    table.caption = "\n".join(told)
    return table


def link_table(result: Result) -> Table:
    """The link's figures."""
    (arm,) = result["arms"].values()
    table = _table("link", result)
    table.add_column("median (least - most)")
    table.add_column(justify="right")
    table.add_row("plain aligned reads, GB/s", _spread(arm, "raw_gbps", 1.0, 3))
    table.add_row("sweeps, GB/s", _spread(arm, "sweep_gbps", 1.0, 3))
    table.add_row("saturation", _spread(arm, "saturation", 1.0, 2))
    table.add_row("bits a weight streamed", _number(result["bits_per_weight_streamed"], 2))
    table.add_row("streamed a sweep, MiB", _spread(arm, "bytes_per_sweep", MIB, 1))
    table.caption = "\n".join(result["notes"])
    return table


def _table(title: str, result: Result) -> Table:
    limited = result["memory_group"] or "no kernel limit"
    where = f"{result['memory'] / MIB:.0f} MiB ({limited})"
    return Table(title=f"{title}, {result['max_tokens']} tokens, {where}", title_justify="left")


def _spread(arm: Mapping[str, Any], key: str, unit: float, digits: int) -> str:
    value, spread = arm.get(key), arm["spread"].get(key)
    if value is None:
        return "-"
    text = _number(value / unit, digits)
    if spread is None or spread[0] == spread[1]:
        return text
    return f"{text} ({_number(spread[0] / unit, digits)} - {_number(spread[1] / unit, digits)})"


def _times(result: Result, name: str) -> str:
    value, spread = result["speedup_over"].get(name), result["speedup_spread"].get(name)
    if value is None:
        return "-"
    return f"{value:.2f} ({spread[0]:.2f} - {spread[1]:.2f})"


def _lossless(result: Result) -> str:
    if result["lossless"] is None:
        return "lossless: not compared"
    whose = f"{result['reference']}'s"
    if result["lossless"]:
        return f"lossless: paceline's tokens are {whose}, for every prompt"
    return f"NOT lossless: other tokens than {whose} for {', '.join(result['differing_prompts'])}"


def _draft_step(result: Result) -> list[str]:
    step: Mapping[str, Any] | None = result["draft_step"]
    if step is None:
        return []
    kernels, floor = step["over_kernels"], step["over_byte_floor"]
    over = f"{kernels:.2f} x its products alone, {floor:.1f} x reading their bytes"
    return [f"draft step of {step['rows']} rows: {step['step_s'] * 1e3:.1f} ms, {over}"]


def _absent(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    told = [f"{name} skipped: {arm['skipped']}" for name, arm in arms.items() if arm["skipped"]]
    return told + [f"{name} FAILED: {arm['failed']}" for name, arm in arms.items() if arm["failed"]]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
