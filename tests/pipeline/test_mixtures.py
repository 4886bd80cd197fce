"""Which layers have finer substitutes, what those take, and what they are held to be worth."""

from __future__ import annotations

import itertools
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.candidates import Job, streaming
from pipeline.claims import Allowances
from pipeline.mixtures import (
    PAIRS,
    Mixture,
    base_of,
    low_bit,
    mixtures,
    rate_of,
    way_gone,
    yield_of,
)
from pipeline.predictions import YIELD, Compute, Predictor
from pipeline.residency import canonical
from stages.formats import BITS, FORMATS, head_format, substitute_bytes
from stages.shapes import ModelShape
from tests.pipeline.test_planner import model

SHAPE = canonical(model(layers=8, hidden=128, intermediate=192))
EVEN = [1.0] * 8
RATES = Compute().low_gbps


def raised(shape: ModelShape, sensitivity: list[float], base: str) -> list[tuple[int, ...]]:
    return [one.raised for one in mixtures(shape, sensitivity) if one.base == base]


@pytest.mark.parametrize("base", [base for base, _ in PAIRS])
def test_the_most_sensitive_layers_are_raised_first(base: str) -> None:
    found = raised(SHAPE, [1.0, 2.0, 9.0, 3.0, 8.0, 4.0, 7.0, 5.0], base)
    assert found == [(2, 4), (2, 4, 6, 7), (2, 3, 4, 5, 6, 7)]


def test_of_layers_that_are_alike_the_first_are_raised() -> None:
    assert raised(SHAPE, EVEN, "int4") == [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]


def test_what_counts_is_what_a_layer_saves_for_its_bytes() -> None:
    """A layer twice as large has to be more than twice as sensitive."""
    large = model(layers=8, hidden=128, intermediate=1024).layers[3]
    layers = tuple(large if layer.index == 3 else layer for layer in SHAPE.layers)
    shape = msgspec.structs.replace(SHAPE, layers=layers)
    for cost, first in ((1.5, False), (9.0, True)):
        least, *_ = raised(shape, [cost if layer == 3 else 1.0 for layer in range(8)], "int4")
        assert (3 in least) == first


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_some_layers_are_raised_and_some_are_not(layers: int) -> None:
    shape = canonical(model(layers=layers))
    found = list(mixtures(shape, [1.0] * layers))
    assert len({(one.base, one.raised) for one in found}) == len(found)
    assert all(0 < len(one.raised) < one.layers == layers for one in found)
    assert bool(found) == (layers > 1)


def test_where_nothing_hurts_nothing_is_raised() -> None:
    assert not list(mixtures(SHAPE, [0.0] * 8))


def test_every_pair_is_of_formats_next_to_each_other() -> None:
    for base, finer in PAIRS:
        assert BITS[base] < BITS[finer]
        assert YIELD[base] < YIELD[finer]
    assert [finer for _, finer in PAIRS[:-1]] == [base for base, _ in PAIRS[1:]]


def test_its_bytes_are_those_of_its_formats() -> None:
    mixture = Mixture("int3", "int4", (1, 5), 8, 0.5, 0.5)
    found = low_bit(SHAPE, mixture)
    for m in SHAPE.matrices():
        assert found[m.name] == substitute_bytes(
            (m.rows, m.cols), "int4" if m.layer in (1, 5) else "int3"
        )
    head = SHAPE.head
    assert found[head.name] == substitute_bytes((head.rows, head.cols), head_format("int3"))
    assert found.keys() == {m.name for m in (*SHAPE.matrices(), head)}


def test_a_single_format_is_itself() -> None:
    for form in FORMATS:
        assert base_of(form) == form
        assert yield_of(form, YIELD) == YIELD[form]
        assert rate_of(form, RATES) == RATES[form]
        sizes = low_bit(SHAPE, form)
        assert all(
            sizes[m.name] == substitute_bytes((m.rows, m.cols), form) for m in SHAPE.matrices()
        )


def test_a_mixture_lies_between_its_formats() -> None:
    """In bytes, in what its trees yield, and in how fast it is multiplied by; the more is raised,
    the nearer to the finer one."""
    rates = {"int2": 2.0, "int3": 3.0, "int4": 5.0, "int6": 6.0, "int8": 9.0}
    costs = [5.0, 1.0, 1.0, 3.0, 2.0, 1.0, 1.0, 4.0]
    for pair, group in itertools.groupby(mixtures(SHAPE, costs), lambda m: (m.base, m.finer)):
        base, finer = pair
        found: list[str | Mixture] = [base, *group, finer]
        assert all(base_of(one) == base for one in found[:-1])
        for figures in (
            [yield_of(one, YIELD) for one in found],
            [rate_of(one, rates) for one in found],
            [sum(low_bit(SHAPE, one).values()) for one in found],
        ):
            assert all(low < high for low, high in pairwise(figures)), figures


def test_its_products_take_as_long_as_those_of_both() -> None:
    mixture = Mixture("int4", "int6", (0,), 2, 0.5, finer_bytes=0.25)
    assert rate_of(mixture, {"int4": 4.0, "int6": 8.0}) == pytest.approx(
        1.0 / (0.75 / 4.0 + 0.25 / 8.0)
    )
    sizes = low_bit(SHAPE, next(mixtures(SHAPE, EVEN)))
    share = sum(sizes[m.name] for m in SHAPE.matrices() if m.layer in (0, 1)) / sum(sizes.values())
    assert next(mixtures(SHAPE, EVEN)).finer_bytes == pytest.approx(share)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(1, 4))
def test_the_way_from_one_format_to_another(one: float, other: float, bits: int) -> None:
    low, high = sorted((one, other))
    assert way_gone(0.0, bits) == 0.0
    assert way_gone(1.0, bits) == pytest.approx(1.0)
    assert 0.0 <= way_gone(low, bits) <= way_gone(high, bits) <= 1.0 + 1e-12
    assert way_gone(low, bits) <= low + 1e-12, "the last of what hurts is what counts most"


def test_what_is_left_of_a_cost() -> None:
    """Half of it with two bits more is a sixteenth: 17/32 are left."""
    assert 16.0 ** -way_gone(0.5, 2) == pytest.approx(17 / 32)


def test_unit_and_scale_of_the_costs_do_not_matter() -> None:
    costs = [5.0, 1.0, 0.0, 3.0, 2.0, 1.0, 1.0, 4.0]
    for few in (1e-6, 0.25, 1e6):
        for one, other in zip(
            mixtures(SHAPE, costs), mixtures(SHAPE, [few * cost for cost in costs]), strict=True
        ):
            assert one.raised == other.raised
            assert one.way == pytest.approx(other.way)


def test_it_is_predicted_to_be_between_its_formats() -> None:
    """With nothing resident, all else being equal."""
    allowances = Allowances()
    job = Job(SHAPE, 128, 1, allowances)
    predictor = Predictor(SHAPE, allowances, Compute(), 0.05, 128, 1)
    (mixture,) = [m for m in mixtures(SHAPE, EVEN) if m.base == "int4" and len(m.raised) == 4]
    rates = []
    for form in ("int4", mixture, "int6"):
        span = next(iter(streaming(job, form)))
        rates.append(predictor.predict(span.ladder.rungs[0], form, span.trees[2], 2, 64))
    assert rates[0].tokens_per_s < rates[1].tokens_per_s < rates[2].tokens_per_s
    assert rates[0].tokens_per_round < rates[1].tokens_per_round < rates[2].tokens_per_round


def test_it_is_named() -> None:
    assert str(Mixture("int4", "int6", (0, 1), 8, 0.5, 0.5)) == "int4 and int6"
