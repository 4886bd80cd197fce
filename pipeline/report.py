"""What people and programs read at the end: tables of a plan, an answer, stages and the link."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table

from pipeline.answers import Answer
from pipeline.claims import MIB
from pipeline.planner import Plan
from pipeline.tracing import StageSummary
from stages.formats import head_format
from stages.shapes import ModelShape

LINK_STAGES = ("copy", "disk")
"""The stages that move weights, the last hop first."""


class LinkUse(msgspec.Struct, frozen=True):
    """How well the link was used. GB/s are 10^9 bytes a second.

    `measured_gbps` is what plain reads reached before the weights were loaded (or what was to be
    simulated), `reached_gbps` what the sweeps reached while the link was busy, `saturation` the
    second over the first. None where nothing was streamed. `direct`: reads go around the page
    cache.
    """

    measured_gbps: float | None
    reached_gbps: float | None
    saturation: float | None
    nbytes: int
    direct: bool | None


def link_use(
    stages: Mapping[str, StageSummary], measured: float | None, direct: bool | None
) -> LinkUse:
    """The use of the last hop into the device."""
    hop = next((stages[name] for name in LINK_STAGES if name in stages), None)
    reached = None if hop is None else hop.gbps
    share = reached / measured if reached and measured else None
    return LinkUse(measured, reached, share, 0 if hop is None else hop.nbytes, direct)


def plan_table(plan: Plan, shape: ModelShape) -> Table:
    """Where the model lives: layers and bytes by kind, then every claim on the budget."""
    title = f"Plan: {plan.step}, {_mib(plan.budget)} MiB budget"
    table = _table(title, ("what", "where"), ("layers", "MiB"))
    whole, part, streamed = _layers(plan, shape)
    kept = f"{whole} + {part} in part" if part else str(whole)
    swept = str(part + streamed)
    drafted = swept if plan.placement.substitute else "0"
    low = f"substitutes ({_formats(plan, shape)})"
    table.add_row("resident weights", "device", kept, _mib(plan.resident_bytes))
    table.add_row(low, "device", drafted, _mib(plan.substituted_bytes))
    nbytes = _mib(plan.streamed_bytes_per_sweep)
    table.add_row("streamed weights, each sweep", "disk", swept, nbytes)
    table.add_section()
    for claim in plan.claims:
        if claim.name not in ("resident weights", "substitutes", "low-bit head"):
            table.add_row(claim.name, "device", "", _mib(claim.nbytes))
    table.add_section()
    table.add_row("claimed of the budget", "", "", _mib(plan.claimed))
    return table


def plan_notes(plan: Plan) -> str:
    """Why the plan is what it is and what it takes for granted, a line each."""
    return "\n".join(f"- {note}" for note in (*plan.reasons, *plan.assumptions))


def _formats(plan: Plan, shape: ModelShape) -> str:
    """Those of the substitutes: "int4, int6 in 8 of 30 layers, head int6"."""
    form, raised = plan.placement.substitute, len(plan.placement.raised)
    if form is None:
        return "none"
    finer = f", {plan.placement.finer} in {raised} of {len(shape.layers)} layers" if raised else ""
    return f"{form}{finer}, head {head_format(form)}"


def _layers(plan: Plan, shape: ModelShape) -> tuple[int, int, int]:
    """Layers resident whole, in part, and not at all; the head counts as one."""
    resident = frozenset(plan.placement.resident)
    shares = [[m.name in resident for m in layer.matrices] for layer in shape.layers]
    shares.append([shape.head.name in resident])
    whole = sum(all(share) for share in shares)
    some = sum(any(share) and not all(share) for share in shares)
    return whole, some, len(shares) - whole - some


def prediction_table(plan: Plan) -> Table:
    """What the plan is expected to do."""
    return _pairs(
        "Predicted",
        ("tokens a second", f"{plan.tokens_per_s:.2f}"),
        ("without drafts in the same budget", _number(plan.plain_tokens_per_s)),
        ("tokens a round (tau + 1)", f"{plan.tokens_per_round:.2f}"),
        ("seconds a sweep", f"{plan.sweep_s:.3f}"),
        ("seconds a draft step", f"{plan.draft_step_s:.4f}"),
        ("tree (steps x width)", _tree(plan)),
    )


def _tree(plan: Plan) -> str:
    looked_up = plan.depth and plan.placement.substitute is None
    return f"{plan.depth} x {plan.width}" + (", looked up" if looked_up else "")


def answer_table(answer: Answer, plan: Plan, link: LinkUse) -> Table:
    """How fast it went, next to what was predicted."""
    usage, timings = answer.usage, answer.timings
    return _pairs(
        "Answer",
        ("tokens (prompt, answer)", f"{usage.prompt_tokens}, {usage.completion_tokens}"),
        ("finish reason", answer.finish_reason),
        ("seed", str(answer.seed)),
        ("tau (accepted drafts a round)", _number(answer.tau)),
        ("tokens a round (tau + 1)", _number(answer.tokens_per_round)),
        ("rounds", str(answer.rounds)),
        ("drafted ahead and kept", _share(answer.ahead_kept)),
        ("time to first token", f"{timings.ttft_s:.2f} s"),
        ("tokens a second after it", _number(timings.tokens_per_s)),
        ("predicted tokens a second", f"{plan.tokens_per_s:.2f}"),
        ("link GB/s while busy", _number(link.reached_gbps)),
        ("link GB/s as measured before", _number(link.measured_gbps)),
        ("saturation of the link", _share(link.saturation)),
    )


def stage_table(stages: Mapping[str, StageSummary], wall: float) -> Table:
    """Where the time went, by stage."""
    figures = ("spans", "p50 ms", "p99 ms", "busy", "GB/s")
    table = _table(f"Stages over {wall:.2f} s", ("stage",), figures)
    for name, stage in stages.items():
        table.add_row(
            name,
            str(stage.count),
            f"{stage.p50_s * 1e3:.2f}",
            f"{stage.p99_s * 1e3:.2f}",
            f"{stage.busy_share:.0%}",
            _number(stage.gbps),
        )
    return table


def print_json(told: object) -> None:
    """One JSON object on standard output, in ASCII: there is no encoding that cannot take it."""
    sys.stdout.write(json.dumps(msgspec.to_builtins(told)) + "\n")


def _table(title: str, texts: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in texts:
        table.add_column(column)
    for column in figures:
        table.add_column(column, justify="right")
    return table


def _pairs(title: str, *rows: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
