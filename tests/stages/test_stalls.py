"""A neighbour that takes a core makes steps narrow for a while, and nothing else does."""

from __future__ import annotations

from stages.stalls import MOST_NARROW, NARROW_STEPS, STALL, Stalls


def narrow_steps(stalls: Stalls) -> int:
    """How many steps are narrow from here on."""
    count = 0
    while stalls.narrow:
        count += 1
        stalls.see(4, 0.300)  # however slow one thread is, it is not the joins
    return count


def test_steady_steps_stay_wide_and_so_do_those_that_grow_slowly() -> None:
    stalls = Stalls()
    for number in range(400):
        stalls.see(4, 0.005 * 1.01**number)
        stalls.see(1, 0.0001)  # other rows have a time of their own
        assert not stalls.narrow


def test_the_first_step_after_a_sweep_is_no_stall() -> None:
    stalls = Stalls()
    for number in range(100):
        stalls.see(4, 0.020 if number % 10 == 0 else 0.005)
        assert not stalls.narrow


def test_a_stall_makes_the_next_steps_narrow_and_then_wide_ones_are_tried_again() -> None:
    stalls = Stalls()
    for _ in range(5):
        stalls.see(4, 0.005)
    stalls.see(4, 0.200)
    assert narrow_steps(stalls) == NARROW_STEPS
    stalls.see(4, 0.005)
    assert not stalls.narrow
    stalls.see(4, 0.200)
    assert stalls.narrow, "the stall did not become what is usual"


def test_stalls_one_upon_the_other_are_tried_less_and_less_often() -> None:
    stalls = Stalls()
    stalls.see(4, 0.005)
    found = []
    for _ in range(8):
        stalls.see(4, 0.200)
        found.append(narrow_steps(stalls))
    assert found == [min(NARROW_STEPS << count, MOST_NARROW) for count in range(8)]
    for _ in range(NARROW_STEPS + 1):
        stalls.see(4, 0.005)
    stalls.see(4, 0.200)
    assert narrow_steps(stalls) == NARROW_STEPS, "the neighbour was gone"


def test_a_step_that_was_slow_from_the_first_is_usual_only_until_a_quick_one() -> None:
    stalls = Stalls()
    stalls.see(4, 0.100)
    assert not stalls.narrow
    stalls.see(4, 0.005)
    stalls.see(4, 0.101)
    assert stalls.narrow and STALL * 0.005 < 0.101
