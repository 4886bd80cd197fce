from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stages.sharpening import FLOOR, LEAST, MOST, START, STEEPEST, STEP, Sharpening

SCORES = st.lists(st.floats(-4, 4), min_size=2, max_size=8)
CHILDREN = 8
FORM = "int3"
BEGIN = START[FORM]


def spread(scores: Sequence[float], temperature: float) -> list[float]:
    """log_softmax(scores / temperature)."""
    most = max(scores)
    whole = math.log(sum(math.exp((score - most) / temperature) for score in scores))
    return [(score - most) / temperature - whole for score in scores]


def entropy_of(log_probs: Sequence[float]) -> float:
    return -sum(math.exp(value) * value for value in log_probs)


def slope(likelihood: Callable[[float], float]) -> float:
    """Of a function of the temperature, by log(1/t), at BEGIN: numerically."""
    near = 1e-4
    more, less = BEGIN * math.exp(-near), BEGIN * math.exp(near)
    return (likelihood(more) - likelihood(less)) / (2 * near)


def moved(sharpening: Sharpening) -> float:
    return math.log(sharpening.temperature / BEGIN)


def step(gradient: float) -> float:
    """How log t moves along a gradient by log(1/t)."""
    gradient = max(-STEEPEST, min(STEEPEST, gradient))
    return -STEP * gradient / math.sqrt(FLOOR + gradient * gradient)


@given(SCORES, st.data())
def test_a_hit_moves_along_the_slope_of_its_log_likelihood(
    scores: list[float], data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, len(scores) - 1))
    values = spread(scores, BEGIN)
    sharpening = Sharpening(FORM)
    sharpening.hit(values[chosen], entropy_of(values))
    expected = step(slope(lambda t: spread(scores, t)[chosen]))
    assert moved(sharpening) == pytest.approx(expected, abs=1e-6)


@given(SCORES, st.data())
def test_a_miss_moves_along_the_slope_of_the_chance_to_miss(
    scores: list[float], data: st.DataObject
) -> None:
    children = data.draw(st.integers(0, len(scores) - 1))
    values = spread(scores, BEGIN)
    assume(sum(map(math.exp, values[children:])) > 2e-3)
    sharpening = Sharpening(FORM)
    sharpening.miss(values[:children], entropy_of(values))

    def missed(temperature: float) -> float:
        return math.log(sum(map(math.exp, spread(scores, temperature)[children:])))

    assert moved(sharpening) == pytest.approx(step(slope(missed)), abs=1e-5)


def test_a_child_without_a_chance_is_no_part_of_a_miss() -> None:
    """As where top-k or top-p rules a guessed token out."""
    values = spread([2.0, 1.0, 0.0], BEGIN)
    with_it, without = Sharpening(FORM), Sharpening(FORM)
    with_it.miss([*values[:2], -math.inf], entropy_of(values))
    without.miss(values[:2], entropy_of(values))
    assert with_it.temperature == pytest.approx(without.temperature)
    assert without.temperature > BEGIN  # a miss says that the draft was too sure


@given(
    st.lists(
        st.tuples(st.lists(st.floats(-30, 0), max_size=4), st.floats(0, 12), st.booleans()),
        max_size=300,
    )
)
def test_it_stays_in_bounds(choices: list[tuple[list[float], float, bool]]) -> None:
    sharpening = Sharpening(FORM)
    for log_probs, entropy, hit in choices:
        if hit and log_probs:
            sharpening.hit(log_probs[0], entropy)
        else:
            sharpening.miss(log_probs, entropy)
        assert LEAST - 1e-9 <= sharpening.temperature <= MOST + 1e-9


def test_a_long_run_of_one_kind_ends_at_a_bound() -> None:
    sure, unsure = Sharpening(FORM), Sharpening(FORM)
    for _ in range(500):
        sure.hit(-0.1, 2.0)
        unsure.hit(-8.0, 2.0)
    assert sure.temperature == pytest.approx(LEAST)
    assert unsure.temperature == pytest.approx(MOST)


@pytest.mark.parametrize("true", [0.4, 0.6, 0.9])
def test_it_moves_to_the_temperature_that_the_target_chooses_at(true: float) -> None:
    draws, sharpening = random.Random(3), Sharpening(FORM)
    seen = []
    for _ in range(4000):
        scores = sorted((draws.gauss(0, 1) for _ in range(20)), reverse=True)
        chances = [math.exp(value) for value in spread(scores, true)]
        (chosen,) = draws.choices(range(len(scores)), chances)
        values = spread(scores, sharpening.temperature)
        if chosen < CHILDREN:
            sharpening.hit(values[chosen], entropy_of(values))
        else:
            sharpening.miss(values[:CHILDREN], entropy_of(values))
        seen.append(sharpening.temperature)
    settled = seen[2000:]
    assert sum(settled) / len(settled) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("true", [0.3, 0.7, 0.95, 0.999])
def test_a_likeliest_child_is_worth_what_it_was_seen_to_be(true: float) -> None:
    """Given 0.7 each time, chosen in a share `true` of them."""
    draws, sharpening = random.Random(5), Sharpening(FORM)
    for _ in range(2000):
        sharpening.likeliest(math.log(0.7), draws.random() < true)
    assert math.exp(sharpening.bend(math.log(0.7))) == pytest.approx(true, abs=0.06)


@given(st.lists(st.tuples(st.floats(-30, 0), st.booleans()), max_size=200), st.floats(-30, 0))
def test_what_it_is_worth_is_a_log_probability_that_rises_with_what_is_said(
    choices: list[tuple[float, bool]], log_prob: float
) -> None:
    sharpening = Sharpening(FORM)
    for said, chosen in choices:
        sharpening.likeliest(said, chosen)
    bent = sharpening.bend(log_prob)
    assert -math.inf < bent < 0.0
    assert sharpening.bend(min(0.0, log_prob + 0.5)) >= bent


def test_before_anything_was_seen_it_is_worth_what_is_said() -> None:
    for prob in (0.01, 0.5, 0.99):
        assert Sharpening(FORM).bend(math.log(prob)) == pytest.approx(math.log(prob))
