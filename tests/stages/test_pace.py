from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.messages import SweepTimes
from stages.pace import FIXED_ROWS, LEAP, WAITED, Mean, Rate, StepTimes, SweepPace

SECONDS = st.floats(1e-6, 1e3)
ROWS = st.integers(1, 32)


def test_a_mean_begins_with_what_it_sees_first() -> None:
    mean = Mean(weight=0.25)
    seen = [mean.value]
    for value in (8.0, 4.0):
        mean.see(value)
        seen.append(mean.value)
    assert seen == [None, 8.0, 7.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_mean_stays_among_what_it_saw(values: list[float], weight: float) -> None:
    mean = Mean(weight)
    for value in values:
        mean.see(value)
    assert mean.value is not None
    slack = 1e-9 * max(map(abs, values))
    assert min(values) - slack <= mean.value <= max(values) + slack


def test_a_mean_forgets() -> None:
    mean = Mean()
    for value in [100.0] * 5 + [1.0] * 60:
        mean.see(value)
    assert mean.value == pytest.approx(1.0, abs=1e-3)


def test_a_step_costs_nothing_before_any_was_timed() -> None:
    """So the first trees are grown to their limits."""
    assert StepTimes().of(4) == 0.0


@given(ROWS, SECONDS)
def test_a_step_takes_what_such_steps_took(rows: int, seconds: float) -> None:
    steps = StepTimes()
    for _ in range(3):
        steps.see(rows, seconds)
    assert steps.of(rows) == pytest.approx(seconds)


@given(ROWS, ROWS, SECONDS)
def test_a_width_that_was_never_timed_is_scaled_from_another(
    timed: int, asked: int, seconds: float
) -> None:
    steps = StepTimes()
    steps.see(timed, seconds)
    assert steps.of(asked) == pytest.approx(seconds * (FIXED_ROWS + asked) / (FIXED_ROWS + timed))


@given(ROWS, SECONDS)
def test_from_one_timed_width_wider_steps_cost_more(timed: int, seconds: float) -> None:
    steps = StepTimes()
    steps.see(timed, seconds)
    costs = [steps.of(rows) for rows in range(1, 40)]
    assert costs == sorted(costs)


def test_between_timed_widths_the_cost_lies_between_theirs() -> None:
    """Or a width would never be tried, since the wider one beside it seems to cost less."""
    steps = StepTimes()
    steps.see(1, 1.0)
    steps.see(8, 1.1)
    costs = [steps.of(rows) for rows in range(1, 9)]
    assert costs == sorted(costs)


@given(SECONDS, st.floats(1.0, 1e6))
def test_a_stall_of_a_step_counts_so_many_times_its_mean_at_most(
    seconds: float, times: float
) -> None:
    steps = StepTimes()
    steps.see(2, seconds)
    steps.see(2, seconds * times)
    weight = 0.2
    expected = seconds * (1 + weight * (min(times, LEAP) - 1))
    assert steps.of(2) == pytest.approx(expected)


def test_each_width_has_a_mean_of_its_own() -> None:
    steps = StepTimes()
    steps.see(1, 1.0)
    steps.see(8, 3.0)
    assert (steps.of(1), steps.of(8)) == (1.0, 3.0)


def test_rows_hide_behind_weights_that_arrive_meanwhile_and_not_where_stages_take_turns() -> None:
    """4 rows compute for 1 s in a sweep of 5 s; 8 rows would for 2 s."""
    overlapped, in_turn = SweepPace(), SweepPace(in_turn=True)
    for pace in (overlapped, in_turn):
        for rows, computed in [(4, 1.0), (8, 2.0)] * 40:
            pace.see(SweepTimes(rows, computed, 5.0 - computed, 2 * computed))
    assert (overlapped.of(4), overlapped.of(8)) == pytest.approx((5.0, 5.0), rel=1e-3)
    assert in_turn.of(8) - in_turn.of(4) == pytest.approx(1.0)


def test_a_rate_is_nothing_until_a_round_was_seen() -> None:
    assert Rate().value == 0.0
    assert Rate(Rate()).value == 0.0


@given(SECONDS, st.integers(1, 30))
def test_a_rate_is_tokens_by_seconds(seconds: float, tokens: int) -> None:
    rate = Rate()
    for _ in range(3):
        rate.see(seconds, tokens)
    assert rate.value == pytest.approx(tokens / seconds)


def test_a_rate_begins_as_another_is_and_goes_its_own_way() -> None:
    first = Rate()
    first.see(2.0, 6)
    second = Rate(first)
    assert second.value == first.value == 3.0
    second.see(2.0, 60)
    assert first.value == 3.0
    assert second.value > 3.0


@given(SECONDS, st.floats(1.0, 1e6))
def test_a_stall_of_a_round_counts_so_many_times_its_mean_at_most(
    seconds: float, times: float
) -> None:
    rate = Rate()
    rate.see(seconds, 4)
    rate.see(seconds * times, 4)
    assert rate.value == pytest.approx(4 / (seconds * (1 + 0.2 * (min(times, LEAP) - 1))))


def test_a_round_that_took_no_time_is_no_division_by_zero() -> None:
    rate = Rate()
    rate.see(0.0, 3)
    assert rate.value > 1.0


def test_slower_sweeps_lower_the_rate() -> None:
    rate = Rate()
    rate.see(0.1, 4)
    fast = rate.value
    for _ in range(10):
        rate.see(2.0, 4)
    assert rate.value < fast


def swept(
    rows: int, computed: float, waited: float = 0.0, threads: int = 1, times: int = 1
) -> SweepPace:
    """The pace of so many sweeps, all the same."""
    pace = SweepPace()
    see(pace, rows, computed, waited, threads, times)
    return pace


def see(
    pace: SweepPace,
    rows: int,
    computed: float,
    waited: float = 0.0,
    threads: int = 1,
    times: int = 1,
) -> None:
    for _ in range(times):
        pace.see(SweepTimes(rows, computed, waited, computed * threads))


def test_before_a_sweep_was_seen_rows_cost_nothing_and_no_core_is_given_away() -> None:
    pace = SweepPace()
    assert [pace.of(rows) for rows in (1, 8, 64)] == [0.0, 0.0, 0.0]
    assert [pace.longer(cores) for cores in (0, 1, 4)] == [math.inf] * 3


@given(ROWS, SECONDS)
def test_where_weights_are_waited_for_rows_cost_nothing_until_they_compute_for_longer(
    rows: int, seconds: float
) -> None:
    """A tenth of the sweep is computed: so ten times the rows, roughly, are free."""
    pace = swept(rows, seconds / 10, 9 * seconds / 10, times=60)
    few = [pace.of(n) for n in range(1, rows + 1)]
    assert few == pytest.approx([seconds] * rows, rel=1e-4)
    many = 10 * (rows + int(FIXED_ROWS)) + 1
    assert pace.of(many) > 1.001 * seconds
    assert pace.of(2 * many) > pace.of(many)


@given(ROWS, SECONDS, st.floats(0.0, 0.99 * WAITED))
def test_where_weights_are_there_in_time_each_row_costs(
    rows: int, seconds: float, share: float
) -> None:
    pace = swept(rows, (1 - share) * seconds, share * seconds, times=3)
    costs = [pace.of(n) for n in range(1, 40)]
    assert all(less < more for less, more in pairwise(costs))
    assert pace.of(rows) == pytest.approx((1 - share) * seconds)


def test_rows_that_were_seen_to_be_free_are_and_those_beyond_the_arrival_cost() -> None:
    """Weights take 1 s to arrive, 4 rows compute in 0.5 s, 20 in 0.9 s, 40 in 1.4 s."""
    pace = SweepPace()
    for _ in range(60):
        see(pace, 4, 0.5, 0.5)
        see(pace, 20, 0.9, 0.1)
    assert [pace.of(rows) for rows in (1, 4, 12, 20)] == pytest.approx([1.0] * 4)
    assert pace.of(40) > 1.1


def test_sweeps_that_no_longer_wait_forget_when_weights_arrived() -> None:
    """They lie in the page cache by now."""
    pace = swept(4, 0.1, 0.9, times=60)
    assert pace.of(4) == pytest.approx(pace.of(8), rel=1e-4)
    before = pace.of(4)
    see(pace, 4, 0.1)
    assert 0.5 * before < pace.of(4) < before, "one sweep does not decide it"
    see(pace, 4, 0.1, times=30)
    assert pace.of(4) == pytest.approx(0.1)
    assert pace.of(8) > 1.1 * pace.of(4)


def test_sweeps_that_begin_to_wait_are_held_up_by_their_weights() -> None:
    pace = swept(4, 0.1, times=10)
    assert pace.of(8) > 1.1 * pace.of(4)
    see(pace, 4, 0.1, 0.9, times=30)
    assert pace.of(8) == pace.of(4) == pytest.approx(1.0, rel=0.01)


def test_a_sweep_that_computes_is_longer_by_what_one_core_less_takes() -> None:
    """4 s of a core's work, however many did it: of three 2 s are left on two, of two 4 s."""
    for threads in (4, 1):
        pace = swept(4, 4.0 / threads, threads=threads, times=3)
        assert pace.longer(1) == math.inf
        longer = [pace.longer(cores) for cores in (2, 3, 5)]
        assert longer == pytest.approx([2.0, 2.0 / 3.0, 0.2])


def test_a_sweep_that_waits_is_longer_only_by_what_it_then_computes_beyond() -> None:
    """Weights arrive in 2.5 s. On one core it computes for 4 s, on two for 2 s."""
    pace = swept(4, 1.0, 1.5, threads=4, times=60)
    assert pace.longer(1) == math.inf
    assert [pace.longer(cores) for cores in (2, 3, 5)] == pytest.approx([1.5, 0.0, 0.0], abs=1e-4)
