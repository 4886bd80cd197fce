"""How fast plans are predicted to be: what makes them faster or slower, and by no more than it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.candidates import LOOKUP
from pipeline.claims import Allowances, TreeSize
from pipeline.ladder import Rung
from pipeline.predictions import Compute, Prediction, Predictor
from pipeline.residency import canonical, caps, climb
from stages.formats import FORMATS, head_format, substitute_bytes
from tests.pipeline.test_planner import smollm2

COMPUTE = Compute(draft_s=1e-3)
FORMS = (*FORMATS, LOOKUP, None)
SHAPE = canonical(smollm2())
QUICK = settings(max_examples=40)


def rungs(form: str | None, low: bool) -> tuple[Rung, ...]:
    """With nothing resident, and so on, matrix by matrix."""
    sizes = dict.fromkeys((m.name for m in (*SHAPE.matrices(), SHAPE.head)), 0)
    if form in FORMATS:
        assert form is not None
        for m in SHAPE.matrices():
            sizes[m.name] = substitute_bytes((m.rows, m.cols), form)
        head = SHAPE.head
        sizes[head.name] = substitute_bytes((head.rows, head.cols), head_format(form))
    ladder = climb(SHAPE, caps(SHAPE)[0], head_resident=False, substitute=sizes, low=low)
    return ladder.rungs


RUNGS = {(form, low): rungs(form, low) for form in FORMATS for low in (False, True)}
RUNGS |= {(form, low): rungs(None, False) for form in (LOOKUP, None) for low in (False, True)}


def tree_of(form: str | None, depth: int = 8) -> TreeSize:
    if form is None:
        return TreeSize()
    return TreeSize(15, 1) if form == LOOKUP else TreeSize(depth, 4, True)


def predicted(
    form: str | None,
    *,
    rung: int = 0,
    low: bool = True,
    link_gbps: float = 1.0,
    compute: Compute = COMPUTE,
    sessions: int = 1,
    depth: int = 8,
    logit_rows: int = 64,
    context: int = 1024,
    **allowed: Any,
) -> Prediction:
    """Of the plan that keeps the first `rung` matrices."""
    made = Predictor(SHAPE, Allowances(**allowed), compute, link_gbps, context, sessions)
    kept = RUNGS[form, low][rung]
    return made.predict(kept, form, tree_of(form, depth), 3, logit_rows)


FORM = st.sampled_from(FORMS)
RUNG = st.integers(0, len(RUNGS[None, False]) - 1)
LINK = st.floats(0.01, 50.0)
SESSIONS = st.integers(1, 4)
SLOWER = st.floats(1.0, 20.0)


@QUICK
@given(FORM, RUNG, st.booleans(), LINK, SESSIONS, SLOWER)
def test_a_slower_link_never_predicts_more(
    form: str | None, rung: int, low: bool, link: float, sessions: int, slower: float
) -> None:
    kind: dict[str, Any] = {"rung": rung, "low": low, "sessions": sessions}
    fast = predicted(form, link_gbps=link * slower, **kind).tokens_per_s
    assert 0 < predicted(form, link_gbps=link, **kind).tokens_per_s <= fast * (1 + 1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_predictions_fall_as_the_link_does_where_weights_are_waited_for(form: str | None) -> None:
    found = [predicted(form, link_gbps=link).tokens_per_s for link in (0.5, 0.1, 0.02, 0.004)]
    assert found == sorted({*found}, reverse=True)
    assert found[-1] == pytest.approx(found[-2] / 5, rel=0.1), "by then nothing else counts"


@pytest.mark.parametrize("form", [*FORMATS, LOOKUP])
def test_more_rows_of_logits_predict_more_up_to_those_of_a_tree(form: str) -> None:
    nodes = tree_of(form).nodes
    found = [
        predicted(form, logit_rows=rows, link_gbps=0.1).tokens_per_s for rows in range(1, nodes + 9)
    ]
    assert found == sorted(found)
    assert found[0] < found[nodes // 2] < found[nodes], "a share of requests has smaller trees"
    assert {*found[nodes:]} == {found[nodes]}
    assert 0.7 * found[nodes] < found[0], "other requests do not need them"


def test_without_drafts_rows_of_logits_are_nothing() -> None:
    assert predicted(None, logit_rows=1) == predicted(None, logit_rows=64)


@pytest.mark.parametrize("form", FORMATS)
def test_with_substitutes_of_what_is_resident_a_step_reads_no_full_weights(form: str) -> None:
    for rung, (with_both, alone) in enumerate(
        zip(RUNGS[form, True], RUNGS[form, False], strict=True)
    ):
        assert with_both.drafting_bytes == 0
        assert alone.drafting_bytes == alone.resident_bytes
        assert with_both.substitute_bytes == RUNGS[form, True][0].substitute_bytes
        if rung:
            assert alone.substitute_bytes < with_both.substitute_bytes
    last = len(RUNGS[form, True]) - 1
    steps = [predicted(form, rung=rung).draft_step_s for rung in (0, last // 2, last)]
    assert steps == [steps[0]] * 3, "a step costs the same, whatever is resident"
    full = RUNGS[form, False][last]
    alone_s = predicted(form, rung=last, low=False).draft_step_s
    low_s = (RUNGS[form, True][0].substitute_bytes - full.substitute_bytes) / COMPUTE.low_gbps[form]
    full_s = full.drafting_bytes / COMPUTE.memory_gbps
    assert alone_s - steps[0] == pytest.approx((full_s - low_s) / 1e9)


RATES = ("memory_gbps", "gflops", "low_gbps", "layer_s", "draft_layer_s", "draft_s")


def faster(compute: Compute, what: str, times: float) -> Compute:
    value = getattr(compute, what)
    if what == "low_gbps":
        return msgspec.structs.replace(compute, low_gbps={f: v * times for f, v in value.items()})
    better = value / times if what.endswith("_s") else value * times
    return msgspec.structs.replace(compute, **{what: better})


@QUICK
@given(FORM, RUNG, st.booleans(), LINK, SESSIONS, st.sampled_from(RATES), SLOWER, st.booleans())
def test_faster_compute_never_predicts_less(
    form: str | None,
    rung: int,
    low: bool,
    link: float,
    sessions: int,
    what: str,
    times: float,
    ahead: bool,
) -> None:
    kind: dict[str, Any] = {"rung": rung, "low": low, "link_gbps": link, "sessions": sessions}
    kind["ahead_rows"] = 32 if ahead else 0
    quick = predicted(form, compute=faster(COMPUTE, what, times), **kind).tokens_per_s
    assert quick >= predicted(form, **kind).tokens_per_s * (1 - 1e-9)


@pytest.mark.parametrize("what", RATES)
def test_faster_compute_predicts_more_where_nothing_is_waited_for(what: str) -> None:
    kind: dict[str, Any] = {"link_gbps": 1000.0, "rung": len(RUNGS["int4", True]) - 1}
    slow, quick = (faster(COMPUTE, what, times) for times in (0.25, 4.0))
    fast = predicted("int4", compute=quick, **kind).tokens_per_s
    assert fast > predicted("int4", compute=slow, **kind).tokens_per_s


@QUICK
@given(st.sampled_from(FORMATS), RUNG, LINK, SESSIONS, SLOWER)
def test_a_larger_tree_may_only_help(
    form: str, rung: int, link: float, sessions: int, slower: float
) -> None:
    """A plan's tree is the most that is sent: less is where less pays best."""
    compute = faster(COMPUTE, "gflops", 1 / slower)
    found = [
        predicted(form, rung=rung, link_gbps=link, sessions=sessions, compute=compute, depth=depth)
        for depth in (4, 8, 12, 16)
    ]
    rates = [one.tokens_per_s for one in found]
    assert all(less <= more * (1 + 1e-9) for less, more in pairwise(rates))


def test_where_sweeps_compute_trees_are_small_and_where_they_wait_large() -> None:
    waiting = predicted("int4", link_gbps=0.02, depth=16)
    computing = predicted("int4", link_gbps=50.0, depth=16, compute=faster(COMPUTE, "gflops", 0.1))
    assert computing.tokens_per_round < waiting.tokens_per_round


def test_drafting_ahead_helps_where_drafting_takes_longer_than_the_ring_fills() -> None:
    """On a slow link the ring fills meanwhile, and where sweeps compute they need the core."""

    def gain(link_gbps: float, gflops: float = 1.0) -> float:
        compute = faster(COMPUTE, "gflops", gflops)
        kind: dict[str, Any] = {"link_gbps": link_gbps, "compute": compute}
        without, ahead = (predicted("int4", ahead_rows=rows, **kind) for rows in (0, 32))
        return ahead.tokens_per_s / without.tokens_per_s

    assert gain(0.05) == gain(50.0, 0.02) == 1.0
    assert 1.1 < gain(2.0) < 2.0
