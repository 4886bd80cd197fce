"""What the tables say of a plan, an answer, its stages and the link."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console, RenderableType

from pipeline.answers import Answer, Timings, Usage
from pipeline.claims import Claim
from pipeline.planner import Plan
from pipeline.report import (
    MIB,
    LinkUse,
    answer_table,
    link_use,
    plan_notes,
    plan_table,
    prediction_table,
    print_json,
    stage_table,
)
from pipeline.tracing import StageSummary
from stages.placement import Placement
from stages.shapes import LayerShape, MatrixShape, ModelShape


def matrix(name: str, layer: int) -> MatrixShape:
    return MatrixShape(name, layer, 64, 64, 64 * 64 * 4)


def made_shape() -> ModelShape:
    layers = tuple(
        LayerShape(index, (matrix(f"{index}.a", index), matrix(f"{index}.b", index)))
        for index in range(4)
    )
    return ModelShape(
        architecture="llama",
        layers=layers,
        small_bytes=0,
        vocab=64,
        hidden=64,
        intermediate=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        head=matrix("head", 4),
        tied=False,
        source_itemsize=4,
        compute_itemsize=4,
        max_positions=512,
    )


def made_plan(resident: Sequence[str] = ("0.a", "0.b", "1.a"), form: str | None = "int4") -> Plan:
    placement = Placement(
        resident=tuple(resident),
        substitute=form,
        slots=2,
        slot_bytes=4096,
        head_rows=64,
        context=64,
        sessions=1,
        tree_budget=32,
        prefill_rows=16,
    )
    claims = (
        Claim("KV cache", 3 * MIB),
        Claim("substitutes", MIB),
        Claim("low-bit head", MIB),
        Claim("resident weights", 5 * MIB),
    )
    return Plan(
        placement=placement,
        claims=claims,
        step="substitutes",
        reasons=("int4 is fastest",),
        assumptions=("half of the context is in use",),
        budget=20 * MIB,
        resident_bytes=5 * MIB,
        substituted_bytes=2 * MIB,
        streamed_bytes_per_sweep=7 * MIB,
        width=4,
        depth=8,
        embedding_rows=64,
        sweep_s=0.5,
        draft_step_s=0.01,
        tokens_per_round=5.0,
        tokens_per_s=8.25,
        plain_tokens_per_s=None,
    )


def made_answer(tau: float | None = 2.5) -> Answer:
    return Answer(
        text="made",
        token_ids=(1, 2, 3),
        finish_reason="length",
        usage=Usage(11, 3),
        tau=tau,
        tokens_per_round=None if tau is None else tau + 1,
        rounds=2,
        drafted=9,
        ahead_kept=0.5,
        timings=Timings(ttft_s=0.25, total_s=1.25, tokens_per_s=2.0 if tau else None),
        seed=77,
    )


def summary(gbps: float | None = None, nbytes: int = 0) -> StageSummary:
    return StageSummary(10, 0.0015, 0.012, 0.5, 0.25, nbytes, gbps)


def rows(table: RenderableType) -> dict[str, list[str]]:
    """The cells of each row behind its first, as they are printed."""
    written = io.StringIO()
    Console(file=written, width=120).print(table)
    cells = [
        [cell.strip() for cell in line.strip("┃│ \n").replace("┃", "│").split("│")]
        for line in written.getvalue().splitlines()
        if "│" in line or "┃" in line
    ]
    return {first: rest for first, *rest in cells}


def test_a_plan_by_layers_and_bytes() -> None:
    """One layer is resident, one in part; two layers and the head are streamed."""
    found = rows(plan_table(made_plan(), made_shape()))
    assert found["resident weights"] == ["device", "1 + 1 in part", "5.0"]
    assert found["substitutes (int4, head int6)"] == ["device", "4", "2.0"]
    assert found["streamed weights, each sweep"] == ["disk", "4", "7.0"]
    assert found["KV cache"] == ["device", "", "3.0"]
    assert found["claimed of the budget"] == ["", "", "10.0"]
    assert "low-bit head" not in found, "counted with the substitutes"


def test_a_plan_in_two_formats() -> None:
    made = made_plan()
    placement = msgspec.structs.replace(made.placement, finer="int6", raised=(1, 3))
    found = rows(plan_table(msgspec.structs.replace(made, placement=placement), made_shape()))
    assert found["substitutes (int4, int6 in 2 of 4 layers, head int6)"] == ["device", "4", "2.0"]
    assert not any("None" in name for name in found)


def test_a_plan_without_substitutes() -> None:
    found = rows(plan_table(made_plan(["0.a", "0.b"], form=None), made_shape()))
    assert found["resident weights"][1] == "1"
    assert found["substitutes (none)"][1] == "0"
    assert found["streamed weights, each sweep"][1] == "4"


def test_a_plan_says_why() -> None:
    assert plan_notes(made_plan()) == "- int4 is fastest\n- half of the context is in use"


def test_predictions() -> None:
    found = rows(prediction_table(made_plan()))
    assert found["tokens a second"] == ["8.25"]
    assert found["without drafts in the same budget"] == ["-"]
    assert found["tree (steps x width)"] == ["8 x 4"]
    found = rows(prediction_table(made_plan(form=None)))
    assert found["tree (steps x width)"] == ["8 x 4, looked up"]


def test_an_answer() -> None:
    link = LinkUse(2.0, 1.5, 0.75, 7 * MIB, True)
    found = rows(answer_table(made_answer(), made_plan(), link))
    assert found["tokens (prompt, answer)"] == ["11, 3"]
    assert found["tau (accepted drafts a round)"] == ["2.50"]
    assert found["tokens a round (tau + 1)"] == ["3.50"]
    assert found["tokens a second after it"] == ["2.00"]
    assert found["predicted tokens a second"] == ["8.25"]
    assert found["link GB/s while busy"] == ["1.50"]
    assert found["saturation of the link"] == ["75%"]
    assert found["seed"] == ["77"]


def test_an_answer_without_rounds_or_link() -> None:
    found = rows(answer_table(made_answer(None), made_plan(), LinkUse(None, None, None, 0, None)))
    for name in ("tau (accepted drafts a round)", "tokens a second after it"):
        assert found[name] == ["-"]
    assert found["saturation of the link"] == ["-"]


def test_stages() -> None:
    found = rows(stage_table({"disk": summary(1.5, MIB), "verify": summary()}, 2.0))
    assert found["stage"] == ["spans", "p50 ms", "p99 ms", "busy", "GB/s"]
    assert found["disk"] == ["10", "1.50", "12.00", "25%", "1.50"]
    assert found["verify"][-1] == "-"


def test_the_link_is_the_last_hop() -> None:
    stages = {"disk": summary(1.0, MIB), "copy": summary(3.0, 2 * MIB)}
    assert link_use(stages, 4.0, True) == LinkUse(4.0, 3.0, 0.75, 2 * MIB, True)
    assert link_use({"disk": stages["disk"]}, 4.0, None).reached_gbps == 1.0
    assert link_use({}, 4.0, None) == LinkUse(4.0, None, None, 0, None)
    assert link_use(stages, None, None).saturation is None


def test_json_is_one_line_of_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    answer = msgspec.structs.replace(made_answer(), text="漢\n\udcff")
    print_json({"answer": answer, "plan": made_plan()})
    out = capsys.readouterr().out
    assert out.isascii() and out.endswith("\n") and out.count("\n") == 1
    told = json.loads(out)
    assert told["answer"]["text"] == "漢\n\udcff"
    assert told["plan"]["placement"]["resident"] == ["0.a", "0.b", "1.a"]
