from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.candidates import LOOKUP, Job, Span, placement, smallest, streaming
from pipeline.claims import MIB, Allowances, kv_row_bytes
from pipeline.mixtures import PAIRS, Mixture, mixtures
from pipeline.planner import _ROUNDING, Plan, _fastest, _rate, _scored, plan, smallest_budget
from pipeline.predictions import LINK_BUSY, Compute, Predictor
from pipeline.residency import canonical, caps, climb, spread
from routing.errors import BudgetError, OptionError
from stages.checkpoint import TensorSpec
from stages.formats import FORMATS, head_format, substitute_bytes
from stages.pieces import slot_bytes
from stages.schedule import schedule
from stages.shapes import LayerShape, MatrixShape, ModelShape

ACCELERATOR = Compute(
    memory_gbps=1500,
    gflops=2e5,
    low_gbps={**dict.fromkeys(FORMATS, 900.0), "int8": 1200.0, "int3": 700.0, "int2": 600.0},
    layer_s=1e-4,
    draft_layer_s=1e-4,
)
FORMS = (*FORMATS, LOOKUP, None)
BARE = Allowances(workspace_bytes=0)


def model(
    *,
    layers: int = 3,
    hidden: int = 32,
    intermediate: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 64,
    source: int = 4,
    compute: int = 4,
    tied: bool = True,
    max_positions: int = 512,
) -> ModelShape:
    dim = hidden // heads
    sizes = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }

    def layer(index: int) -> LayerShape:
        return LayerShape(
            index,
            tuple(
                MatrixShape(f"layers.{index}.{name}.weight", index, r, c, r * c * source)
                for name, (r, c) in sizes.items()
            ),
        )

    return ModelShape(
        architecture="llama",
        layers=tuple(layer(index) for index in range(layers)),
        small_bytes=(2 * layers + 1) * hidden * compute,
        vocab=vocab,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        head=MatrixShape("embed.weight", layers, vocab, hidden, vocab * hidden * source),
        tied=tied,
        source_itemsize=source,
        compute_itemsize=compute,
        max_positions=max_positions,
    )


def smollm2() -> ModelShape:
    return model(
        layers=30,
        hidden=576,
        intermediate=1536,
        heads=9,
        kv_heads=3,
        vocab=49152,
        max_positions=8192,
    )


def llama_2_7b(compute: int = 2) -> ModelShape:
    return model(
        layers=32,
        hidden=4096,
        intermediate=11008,
        heads=32,
        kv_heads=32,
        vocab=32000,
        source=2,
        compute=compute,
        tied=False,
        max_positions=4096,
    )


def matrices(shape: ModelShape) -> list[MatrixShape]:
    return [m for layer in shape.layers for m in layer.matrices] + [shape.head]


def check(shape: ModelShape, made: Plan) -> None:
    """What every plan must keep to, whatever it decides."""
    placement = made.placement
    claims = {claim.name: claim.nbytes for claim in made.claims}
    assert len(claims) == len(made.claims)
    assert all(nbytes > 0 for nbytes in claims.values())
    assert made.claimed <= made.budget
    every = matrices(shape)
    resident = [m for m in every if m.name in placement.resident]
    streamed = [m for m in every if m.name not in placement.resident]
    assert len(resident) == len(placement.resident) == len(set(placement.resident))
    pages = [-(-m.elements * shape.compute_itemsize // 4096) for m in resident]
    assert made.resident_bytes == 4096 * sum(pages)
    assert made.streamed_bytes_per_sweep == sum(m.nbytes for m in streamed)
    if placement.substitute is None:
        assert made.substituted_bytes == placement.draft_rows == 0
        assert placement.tree_budget == made.width * made.depth
        assert bool(made.depth) == (made.tokens_per_round > 1)
        assert made.depth > 0 or made.step in ("plain", "resident")
        assert made.depth == 0 or made.step in ("lookup", "resident")
    else:
        assert made.step in ("substitutes", "resident")
        assert placement.draft_rows > placement.tree_budget
        low = every if placement.low_resident else streamed
        forms = {
            m.name: placement.finer if m.layer in placement.raised else placement.substitute
            for m in low
        }
        forms[shape.head.name] = head_format(placement.substitute)
        sizes = [substitute_bytes((m.rows, m.cols), forms[m.name] or "") for m in low]
        assert made.substituted_bytes == sum(sizes)
        assert {*placement.raised} <= {m.layer for m in low if m != shape.head}
        assert placement.tree_budget == made.width * made.depth > 0
    assert claims.get("resident weights", 0) == made.resident_bytes
    low_bit = claims.get("substitutes", 0) + claims.get("low-bit head", 0)
    assert low_bit == made.substituted_bytes
    rows = claims["logit rows"] // (placement.sessions * shape.vocab * shape.compute_itemsize)
    assert 1 <= placement.logit_rows <= min(rows, placement.tree_budget + 1)
    assert claims.get("ring", 0) == placement.slots * placement.slot_bytes
    if streamed:
        assert placement.slots in (2, 3, 4)
        assert placement.slot_bytes % 4096 == 0
    else:
        assert made.step == "resident"
        assert placement.slots == placement.slot_bytes == 0
    if shape.head in resident:
        assert placement.head_rows == shape.vocab
    assert 1 <= placement.head_rows <= shape.vocab
    if placement.raised:
        assert (placement.substitute, placement.finer) in PAIRS
        assert placement.raised == tuple(sorted({*placement.raised}))
    assert made.tokens_per_s > 0
    assert made.reasons or made.step != "plain"


def test_smollm2_in_200_mib() -> None:
    shape = smollm2()
    made = plan(shape, 200 * MIB, 1.0, context=1024)
    check(shape, made)
    assert made.step == "substitutes"
    assert made.placement.substitute == "int4"
    assert made.depth >= 8 and made.resident_bytes < MIB, "trees come before residency"
    assert made.placement.logit_rows > made.depth, "sampled answers are drafted for as well"
    assert made.plain_tokens_per_s is not None
    assert made.tokens_per_s > 3 * made.plain_tokens_per_s
    assert 1.5 < made.plain_tokens_per_s < 3.5
    names = [claim.name for claim in made.claims]
    assert names[:3] == ["small tensors", "embedding rows", "KV cache"]
    assert {c.name: c.nbytes for c in made.claims}["KV cache"] == 1024 * 46080


def test_llama_2_7b_in_8_gib() -> None:
    shape = llama_2_7b()
    made = plan(shape, 8 << 30, 20.0, ACCELERATOR, context=2048)
    check(shape, made)
    assert made.step == "substitutes"
    assert made.placement.substitute in FORMATS
    assert made.resident_bytes < 5e9
    assert made.claimed > (8 << 30) - 100 * MIB, "memory is used up to within a matrix"


def test_another_compute_dtype_costs_a_decode_buffer() -> None:
    made = plan(llama_2_7b(compute=4), 9 << 30, 1.0, context=512)
    check(llama_2_7b(compute=4), made)
    claims = {claim.name: claim.nbytes for claim in made.claims}
    assert claims["decode buffer"] >= max(
        sum(m.elements * 4 for m in layer.matrices if m.name not in made.placement.resident)
        for layer in llama_2_7b().layers
    )
    same = plan(llama_2_7b(), 9 << 30, 1.0, context=512)
    assert "decode buffer" not in {claim.name for claim in same.claims}


def test_what_fits_is_held() -> None:
    for shape, budget in ((smollm2(), 2 << 30), (llama_2_7b(), 24 << 30), (model(), 4 * MIB)):
        made = plan(shape, budget, 1.0, context=256, allowances=BARE)
        check(shape, made)
        assert made.step == "resident"
        assert "ring" not in {claim.name for claim in made.claims}


def test_what_is_held_is_drafted_for_all_the_same() -> None:
    """By substitutes of everything: reading the weights themselves takes as long as a sweep."""
    quick = Compute(low_gbps=dict.fromkeys(FORMATS, 15.0), draft_layer_s=4e-5)
    made = plan(smollm2(), 2 << 30, 1.0, quick, context=256)
    check(smollm2(), made)
    assert made.step == "resident"
    assert made.placement.substitute in FORMATS and made.placement.low_resident
    assert made.plain_tokens_per_s is not None and made.tokens_per_s > made.plain_tokens_per_s


def test_nearly_everything_resident_needs_only_small_slots() -> None:
    shape = llama_2_7b()
    whole = plan(shape, 24 << 30, 20.0, ACCELERATOR, context=512)
    made = plan(shape, whole.claimed - 300 * MIB, 20.0, ACCELERATOR, context=512)
    check(shape, made)
    layer = sum(m.nbytes for m in shape.layers[0].matrices)
    assert made.placement.slot_bytes < layer
    assert made.resident_bytes > 0.9 * whole.resident_bytes


FALLBACKS = ("plain", "lookup", "substitutes", "resident")


def test_with_one_slot_a_sweep_reads_and_computes_in_turn() -> None:
    """Without drafts there is nothing else: the sum of what both take by themselves."""
    shape, budget = smollm2(), 200 * MIB
    alone = Allowances(ahead_rows=0, slots=(1,))
    made = plan(shape, budget, 1.0, context=256, substitute="none", allowances=alone)
    assert made.placement.slots == 1
    assert "nothing arrives while a sweep computes" in made.assumptions
    instant = plan(shape, budget, 1e9, context=256, substitute="none", allowances=alone)
    reading = made.streamed_bytes_per_sweep / (LINK_BUSY[1] * 1e9)
    # The plans differ in what little of the model they keep.
    assert made.sweep_s - reading == pytest.approx(instant.sweep_s, rel=0.1)
    drafting = plan(shape, budget, 1.0, context=256, allowances=alone)
    assert drafting.placement.draft_rows == drafting.placement.tree_budget + 1
    overlapped = plan(shape, budget, 1.0, context=256)
    assert drafting.tokens_per_s < overlapped.tokens_per_s
    assert overlapped.placement.slots > 1


def test_what_is_fallen_back_to_as_memory_shrinks() -> None:
    """Every step is met, in the design's order, and each but the first says what did not fit."""
    shape, first = smollm2(), smallest_budget(smollm2(), context=1024)
    spares = (0, 4, 20, 40, 80, 1200)
    budgets = [first + spare * MIB for spare in spares]
    found = [plan(shape, budget, 1.0, context=1024) for budget in budgets]
    for spare, made in zip(spares, found, strict=True):
        check(shape, made)
        short = [reason for reason in made.reasons if "int4 substitutes do not fit" in reason]
        assert len(short) == (made.placement.substitute not in ("int4", "int6") and spare < 1200)
        looked_up = any("looked up in the text" in reason for reason in made.reasons)
        assert looked_up == (made.placement.substitute is None and made.depth > 0)
        assert any("what is looked up" in one for one in made.assumptions) == looked_up
    steps = [made.step for made in found]
    assert steps == sorted(steps, key=FALLBACKS.index) and set(steps) == set(FALLBACKS)
    rates = [made.tokens_per_s for made in found]
    assert rates == sorted(rates)
    with pytest.raises(BudgetError):
        plan(shape, budgets[1], 1.0, context=1024, allow_plain=False)


@pytest.mark.parametrize("budget", [170, 300, 1200])
def test_lookup_that_was_asked_for(budget: int) -> None:
    """Whatever else would be faster; where it does not fit the plan says so and is plain."""
    shape = smollm2()
    made = plan(shape, budget * MIB, 1.0, context=1024, substitute="lookup")
    check(shape, made)
    assert made.step == ("lookup" if budget < 1000 else "resident")
    assert made.placement.substitute is None
    assert (made.depth, made.width, made.placement.tree_budget) == (15, 1, 15)
    assert made.plain_tokens_per_s is not None
    assert made.tokens_per_s / made.plain_tokens_per_s == pytest.approx(1.3, abs=0.05)
    least = smallest_budget(shape, context=1024, substitute="lookup")
    less = plan(shape, least, 1.0, context=1024, substitute="lookup")
    assert less.step == "plain"
    assert any("looked up do not fit" in reason for reason in less.reasons)


def test_a_format_that_does_not_fit_leaves_lookup() -> None:
    shape = smollm2()
    budget = smallest_budget(shape, context=1024) + 8 * MIB
    made = plan(shape, budget, 1.0, context=1024, substitute="int8")
    check(shape, made)
    assert made.step == "lookup"
    assert any("int8 substitutes do not fit" in reason for reason in made.reasons)


@pytest.mark.parametrize("shape", [smollm2(), llama_2_7b()], ids=["smollm2", "llama"])
def test_fewer_bits_come_before_no_drafts(shape: ModelShape) -> None:
    """A byte below the smallest plan of a format the next one is taken, and the plan says why."""
    forms = ("int4", "int3", "int2")
    rates = []
    for form, fewer in zip(forms, (*forms[1:], None), strict=True):
        least = smallest_budget(shape, context=1024, substitute=form, allow_plain=False)
        made = plan(shape, least - 1, 1.0, context=1024)
        check(shape, made)
        assert made.placement.substitute == fewer
        assert made.step == ("lookup" if fewer is None else "substitutes")
        assert any(form in reason and "do not fit" in reason for reason in made.reasons)
        assert any("fewer bits" in reason for reason in made.reasons) == (fewer is not None)
        rates += [plan(shape, least, 1.0, context=1024).tokens_per_s, made.tokens_per_s]
    assert rates == sorted(rates, reverse=True)


def test_fewer_bits_that_would_lose_are_not_taken() -> None:
    """int2 drafts are seldom right: with a quick link a sweep for each token is faster."""
    shape = smollm2()
    least = smallest_budget(shape, context=1024, substitute="int2", allow_plain=False)
    made = plan(shape, least, 4.0, context=1024)
    assert made.step == "lookup"
    assert any("would lose" in reason and "int2" in reason for reason in made.reasons)
    asked = plan(shape, least, 4.0, context=1024, substitute="int2")
    assert asked.placement.substitute == "int2"
    assert not any("fewer bits" in reason for reason in asked.reasons)


def test_speculation_that_would_lose_is_off() -> None:
    slow = Compute(low_gbps=dict.fromkeys(FORMATS, 0.01))
    made = plan(smollm2(), 250 * MIB, 1.0, slow, context=1024)
    check(smollm2(), made)
    assert made.step == "lookup"
    assert any("would lose" in reason for reason in made.reasons)
    forced = plan(smollm2(), 250 * MIB, 1.0, slow, context=1024, substitute="int8")
    assert forced.placement.substitute == "int8"
    assert any("asked for" in reason for reason in forced.reasons)


@pytest.mark.parametrize("form", FORMATS)
def test_a_named_format_is_kept(form: str) -> None:
    made = plan(smollm2(), 400 * MIB, 1.0, context=512, substitute=form)
    check(smollm2(), made)
    assert made.placement.substitute == form


def test_none_means_plain() -> None:
    made = plan(smollm2(), 200 * MIB, 1.0, context=1024, substitute="none")
    check(smollm2(), made)
    assert made.step == "plain"
    auto = plan(smollm2(), 200 * MIB, 1.0, context=1024)
    assert made.tokens_per_s == auto.plain_tokens_per_s
    assert made.resident_bytes > auto.resident_bytes


@pytest.mark.parametrize(
    "options",
    [{}, {"allow_plain": False}, {"substitute": "none"}, {"substitute": "lookup"}],
)
@pytest.mark.parametrize("shape", [smollm2(), llama_2_7b()], ids=["smollm2", "llama"])
def test_the_smallest_budget_is_the_smallest(shape: ModelShape, options: dict[str, object]) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(shape, MIB, 1.0, context=1024, sessions=2, **options)  # type: ignore[arg-type]
    smallest = caught.value.smallest
    assert smallest == smallest_budget(shape, context=1024, sessions=2, **options)  # type: ignore[arg-type]
    check(shape, plan(shape, smallest, 1.0, context=1024, sessions=2, **options))  # type: ignore[arg-type]
    for budget in (smallest - 1, smallest - MIB):
        with pytest.raises(BudgetError) as again:
            plan(shape, budget, 1.0, context=1024, sessions=2, **options)  # type: ignore[arg-type]
        assert again.value.smallest == smallest
        assert again.value.asked == budget


def test_the_knob_turns() -> None:
    shape = smollm2()
    with pytest.raises(BudgetError) as caught:
        plan(shape, 120 * MIB, 1.0, context=2048)
    option, _, value = caught.value.knob.partition(" to ")
    assert option == "--ctx-size"
    assert 256 < int(value) < 2048
    plan(shape, 120 * MIB, 1.0, context=int(value))

    with pytest.raises(BudgetError) as caught:
        plan(shape, 200 * MIB, 1.0, context=1024, sessions=8)
    option, _, value = caught.value.knob.partition(" to ")
    assert option == "--sessions"
    plan(shape, 200 * MIB, 1.0, context=1024, sessions=int(value))

    with pytest.raises(BudgetError, match="--memory"):
        plan(shape, MIB, 1.0, context=1024)


def test_draft_steps_grow_with_rows() -> None:
    compute = Compute(low_gbps={"int4": 1.0}, memory_gbps=10.0, draft_layer_s=0.0)
    assert compute.draft_step_s(4, "int4", 10**9, 10**10, 30) == pytest.approx(2.0)
    assert compute.draft_step_s(1, "int4", 10**9, 0, 30) == pytest.approx(1.0)
    assert compute.draft_step_s(16, "int4", 10**9, 0, 30) == pytest.approx(4.0)


def test_more_sessions_share_a_sweep() -> None:
    one = plan(llama_2_7b(), 12 << 30, 10.0, ACCELERATOR, context=512)
    four = plan(llama_2_7b(), 12 << 30, 10.0, ACCELERATOR, context=512, sessions=4)
    check(llama_2_7b(), four)
    assert four.tokens_per_s > one.tokens_per_s
    claims = {claim.name: claim.nbytes for claim in four.claims}
    assert claims["KV cache"] == 4 * 512 * kv_row_bytes(llama_2_7b())


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": 0},
        {"link_gbps": 0.0},
        {"link_gbps": float("nan")},
        {"context": 0},
        {"context": 513},
        {"sessions": 0},
        {"substitute": "int5"},
        {"substitute": "plain"},
    ],
)
def test_values_out_of_range(wrong: dict[str, object]) -> None:
    values: dict[str, object] = {"budget": MIB, "link_gbps": 1.0, "context": 64, **wrong}
    with pytest.raises(OptionError):
        plan(model(), **values)  # type: ignore[arg-type]


shapes = st.builds(
    model,
    layers=st.integers(1, 5),
    hidden=st.sampled_from([32, 64, 192, 256]),
    intermediate=st.sampled_from([48, 96, 768]),
    kv_heads=st.sampled_from([1, 2, 4]),
    vocab=st.sampled_from([64, 1000, 9000]),
    source=st.sampled_from([2, 4]),
    compute=st.sampled_from([2, 4, 8]),
    tied=st.booleans(),
)
links = st.floats(0.01, 50.0)
sensitivities = st.none() | st.lists(st.floats(0.0, 9.0), min_size=5, max_size=5)
"""Of the layers of any of these shapes, and some more."""
quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def of(shape: ModelShape, costs: list[float] | None) -> list[float] | None:
    return None if costs is None else costs[: len(shape.layers)]


@quick
@given(shapes, links, st.integers(8, 300), st.integers(1, 4), st.floats(0.0, 1.5), sensitivities)
def test_claims_fit_any_budget(
    shape: ModelShape,
    link: float,
    context: int,
    sessions: int,
    share: float,
    costs: list[float] | None,
) -> None:
    asked = {"context": context, "sessions": sessions, "allowances": BARE}
    smallest = smallest_budget(shape, **asked)  # type: ignore[arg-type]
    weights = sum(m.elements for m in matrices(shape)) * shape.compute_itemsize
    budget = smallest + int(share * weights)
    check(shape, plan(shape, budget, link, sensitivity=of(shape, costs), **asked))  # type: ignore[arg-type]
    with pytest.raises(BudgetError):
        plan(shape, smallest - 1, link, **asked)  # type: ignore[arg-type]


@quick
@given(
    shapes,
    links,
    st.integers(1, 2),
    st.lists(st.floats(0.0, 1.5), min_size=2, max_size=5),
    sensitivities,
)
@example(
    # A budget that holds everything, where streaming a part was predicted to be faster.
    model(
        layers=2, hidden=32, intermediate=768, kv_heads=2, vocab=64, source=2, compute=2, tied=False
    ),
    1.0,
    1,
    [0.5, 0.953125],
    None,
)
def test_more_memory_never_predicts_slower(
    shape: ModelShape,
    link: float,
    sessions: int,
    shares: list[float],
    costs: list[float] | None,
) -> None:
    asked = {"context": 64, "sessions": sessions, "allowances": BARE}
    smallest = smallest_budget(shape, **asked)  # type: ignore[arg-type]
    asked["sensitivity"] = of(shape, costs)
    weights = sum(m.elements for m in matrices(shape)) * shape.compute_itemsize
    rates = [
        plan(shape, smallest + int(share * weights), link, **asked).tokens_per_s  # type: ignore[arg-type]
        for share in sorted(shares)
    ]
    assert rates == sorted(rates)


def singles(span: Span) -> Iterator[Span]:
    """Every candidate of a span by itself."""
    if span.single:
        yield span
    for part in span.split():
        yield from singles(part)


@quick
@given(shapes, st.data(), links, st.floats(0.0, 1.2), st.booleans())
def test_the_search_finds_what_scoring_every_candidate_would(
    shape: ModelShape, data: st.DataObject, link: float, share: float, ahead: bool
) -> None:
    allowances = Allowances(workspace_bytes=0, ahead_rows=32 if ahead else 0, slots=(3, 1, 2))
    job = Job(canonical(shape), 64, 1, allowances)
    mixed = [*mixtures(job.shape, [1.0, 4.0, 2.0, 5.0, 3.0][: len(shape.layers)])]
    form = data.draw(st.sampled_from([*FORMS, *mixed]))
    weights = sum(m.elements for m in matrices(shape)) * shape.compute_itemsize
    least = form.base if isinstance(form, Mixture) else form
    budget = smallest(job, (least,)) + int(share * weights)
    predictor = Predictor(job.shape, allowances, Compute(), link, 64, 1)
    spans = list(streaming(job, form))
    every = sorted((one for span in spans for one in singles(span)), key=lambda one: one.place)
    ladders, trees = job.ladders(form), job.trees(form)
    assert len({one.place for one in every}) == len(every)
    assert len(every) == 3 * len(trees) * sum(len(ladder.rungs) for ladder in ladders)
    fitting = [found for one in every if (found := one.ideal(budget)) is not None]
    for one in fitting:
        assert one.ladder is not None and one.rung == one.ladder.rungs[one.step]
    scored = [_scored(one, predictor) for one in fitting]
    rates = {one.place: _rate(_scored(c, predictor)) for one in every if (c := one.ideal(budget))}
    for one in every:
        # Where a pair's ideal holds, so does that of every longer span: sizes only shrink or grow.
        if one.first + 1 < len(one.ladder.rungs):
            pair = one._replace(last=one.first + 1).ideal(budget)
            ladder, rung, *others = one.place
            for place in (one.place, (ladder, rung + 1, *others)):
                if place in rates:
                    assert pair is not None
                    assert rates[place] <= _rate(_scored(pair, predictor)) * _ROUNDING
    found = _fastest(spans, budget, predictor, 0.0)
    assert found == max(scored, key=_rate, default=None)
    if found is not None:
        assert _fastest(spans, budget, predictor, _rate(found)) is None, "no faster than its rival"


@quick
@given(shapes, st.sampled_from(FORMATS), st.booleans(), st.booleans())
def test_up_a_ladder_only_resident_bytes_grow(
    shape: ModelShape, form: str, head: bool, low: bool
) -> None:
    shape = canonical(shape)
    sizes = {m.name: substitute_bytes((m.rows, m.cols), form) for m in matrices(shape)}
    for cap in caps(shape):
        ladder = climb(shape, cap, head_resident=head, substitute=sizes, low=low)
        for under, over in pairwise(ladder.rungs):
            assert over.resident_bytes > under.resident_bytes
            assert over.drafting_bytes >= under.drafting_bytes
            assert over.streamed_bytes < under.streamed_bytes
            assert all(a <= b for a, b in zip(over[2:7], under[2:7], strict=True))


@quick
@given(shapes, st.floats(0.0, 1.2), st.randoms(use_true_random=False))
def test_order_does_not_matter(shape: ModelShape, share: float, shuffled: random.Random) -> None:
    layers = [
        msgspec.structs.replace(layer, matrices=tuple(shuffled.sample(layer.matrices, 7)))
        for layer in shape.layers
    ]
    shuffled.shuffle(layers)
    other = msgspec.structs.replace(shape, layers=tuple(layers))
    smallest = smallest_budget(shape, context=64, allowances=BARE)
    weights = sum(m.elements for m in matrices(shape)) * shape.compute_itemsize
    budget = smallest + int(share * weights)
    made = plan(shape, budget, 1.0, context=64, allowances=BARE)
    assert plan(other, budget, 1.0, context=64, allowances=BARE) == made
    assert plan(shape, budget, 1.0, context=64, allowances=BARE) == made
    costs = [3.0, 1.0, 4.0, 1.0, 5.0][: len(layers)]
    made, again = (
        plan(one, budget, 1.0, context=64, allowances=BARE, sensitivity=costs)
        for one in (shape, other)
    )
    assert made == again


# --- Substitutes in two formats ---

UNEVEN = [9.0 if layer in (2, 7, 20) else 1.0 for layer in range(30)]


def test_between_two_formats_the_most_sensitive_layers_have_the_finer_one() -> None:
    made = plan(smollm2(), 220 * MIB, 1.0, context=1024, sensitivity=UNEVEN)
    check(smollm2(), made)
    placement, one = made.placement, plan(smollm2(), 220 * MIB, 1.0, context=1024)
    assert (one.placement.substitute, one.placement.finer, one.placement.raised) == (
        "int4",
        None,
        (),
    )
    assert (placement.substitute, placement.finer) == ("int4", "int6")
    assert {2, 7, 20} < {*placement.raised} and made.step == "substitutes"
    assert made.tokens_per_s > 1.05 * one.tokens_per_s
    assert made.tokens_per_round > one.tokens_per_round
    first, *_, last = made.reasons
    assert first.startswith("int4 and int6 substitutes: ")
    assert last.startswith("against ") and "int4 " in last and "mixed" not in last
    (way,) = (note for note in made.assumptions if "of the way from int4 to int6" in note)
    assert f"most sensitive {len(placement.raised)} of 30 layers" in way


def test_finer_substitutes_are_for_nothing_where_no_layer_is_sensitive() -> None:
    asked = {"budget": 220 * MIB, "link_gbps": 1.0, "context": 1024}
    assert plan(smollm2(), sensitivity=[0.0] * 30, **asked) == plan(smollm2(), **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("substitute", [*FORMATS, LOOKUP, "none"])
@pytest.mark.parametrize("budget", [180, 220, 250])
def test_what_was_asked_for_is_not_mixed(substitute: str, budget: int) -> None:
    asked = {"link_gbps": 1.0, "context": 1024, "substitute": substitute}
    made = plan(smollm2(), budget * MIB, sensitivity=UNEVEN, **asked)  # type: ignore[arg-type]
    assert made == plan(smollm2(), budget * MIB, **asked)  # type: ignore[arg-type]
    assert made.placement.finer is None and not made.placement.raised


def test_a_layer_that_stays_has_no_substitutes_to_be_finer() -> None:
    """Unless those of resident matrices have as well."""
    job = Job(canonical(model(layers=4)), 64, 1, BARE)
    mixture = [*mixtures(job.shape, [1.0, 4.0, 2.0, 3.0])][1]
    assert mixture.raised == (1, 3)
    found = set[tuple[tuple[int, ...], bool]]()
    for span in streaming(job, mixture):
        for one in singles(span):
            candidate = one.ideal(1 << 40)
            assert candidate is not None
            made = placement(candidate)
            streams = {m.layer for m in job.shape.matrices() if m.name not in made.resident}
            left = tuple(layer for layer in (1, 3) if made.low_resident or layer in streams)
            assert (made.raised, made.finer) == (left, mixture.finer)
            found.add((left, made.low_resident))
    assert found == {((1, 3), True), ((1, 3), False), ((3,), False), ((), False)}


@quick
@given(shapes, links, st.floats(0.0, 1.5), st.lists(st.floats(0.0, 9.0), min_size=5, max_size=5))
def test_a_mixture_is_never_predicted_to_be_slower(
    shape: ModelShape, link: float, share: float, costs: list[float]
) -> None:
    """Than the best plan of one format; and where it is no faster there is none."""
    asked = {"context": 64, "allowances": BARE}
    weights = sum(m.elements for m in matrices(shape)) * shape.compute_itemsize
    budget = smallest_budget(shape, **asked) + int(share * weights)  # type: ignore[arg-type]
    one = plan(shape, budget, link, **asked)  # type: ignore[arg-type]
    made = plan(shape, budget, link, sensitivity=of(shape, costs), **asked)  # type: ignore[arg-type]
    check(shape, made)
    assert made.tokens_per_s >= one.tokens_per_s
    assert made.plain_tokens_per_s == one.plain_tokens_per_s
    assert made == one or made.tokens_per_s > one.tokens_per_s


def specs(shape: ModelShape, shard: int, start: int) -> dict[str, TensorSpec]:
    """The model's tensors as a file would hold them, norms in between, `shard` layers a file."""
    dtype = {2: "BF16", 4: "F32"}[shape.source_itemsize]
    norm = shape.hidden * shape.source_itemsize
    found: dict[str, TensorSpec] = {}
    for layer in shape.layers:
        path = f"model-{layer.index // shard}.safetensors"
        offset = start + (layer.index % shard) * 3_000_001
        for place, m in enumerate(sorted(layer.matrices, key=lambda m: m.name)):
            offset += norm if place in (0, 4) else 0
            found[m.name] = TensorSpec(m.name, dtype, (m.rows, m.cols), path, offset, m.nbytes)
            offset += m.nbytes
    head = shape.head
    found[head.name] = TensorSpec(
        head.name, dtype, (head.rows, head.cols), "head.safetensors", start, head.nbytes
    )
    return found


@quick
@given(
    st.builds(
        model,
        layers=st.integers(1, 4),
        hidden=st.sampled_from([32, 192, 256]),
        intermediate=st.sampled_from([96, 768]),
        vocab=st.sampled_from([64, 1000, 9000]),
        source=st.sampled_from([2, 4]),
    ),
    st.integers(1, 3),
    st.integers(100, 9000),
    st.floats(0.0, 1.0),
)
def test_pieces_fit_their_slots(shape: ModelShape, shard: int, start: int, share: float) -> None:
    smallest = smallest_budget(shape, context=64, allowances=BARE)
    weights = sum(m.elements for m in matrices(shape)) * shape.compute_itemsize
    made = plan(shape, smallest + int(share * weights), 1.0, context=64, allowances=BARE)
    _, pieces = schedule(shape, made.placement, specs(shape, shard, start))
    assert slot_bytes(pieces) <= made.placement.slot_bytes


def test_a_cap_keeps_the_largest_matrices() -> None:
    shape = llama_2_7b()
    found = caps(shape)
    assert len(found) == 7
    nothing = {m.name: 0 for m in matrices(shape)}
    for cap in found:
        ladder = climb(shape, cap, head_resident=False, substitute=nothing)
        assert all(rung.slot_bytes <= cap for rung in ladder.rungs)
        streamed = [rung.streamed_bytes for rung in ladder.rungs]
        assert streamed == sorted(streamed, reverse=True)
        assert streamed[-1] == shape.head.nbytes


def test_planning_needs_no_torch() -> None:
    """`paceline plan --help` and plans by the hundred stay quick."""
    root = Path(__file__).parents[2]
    for name in (
        "planner",
        "candidates",
        "reasons",
        "claims",
        "residency",
        "predictions",
        "mixtures",
    ):
        text = (root / "pipeline" / f"{name}.py").read_text()
        assert "import torch" not in text


@pytest.mark.parametrize("count", [1, 2, 12, 30, 80])
def test_layers_that_stay_lie_evenly_apart(count: int) -> None:
    turns = spread(count)
    assert sorted(turns) == list(range(count))
    for kept in range(1, count + 1):
        places = [layer for layer in range(count) if turns[layer] < kept]
        rows = [after - before for before, after in pairwise([-1, *places, count])]
        assert max(rows) <= 2.7 * count / kept + 1, "no long row of layers streams on end"
        runs = "".join("x" if turns[layer] < kept else " " for layer in range(count)).split()
        assert max(map(len, runs)) <= 1 + 2.7 * kept / (count - kept + 1), "nor stays"
