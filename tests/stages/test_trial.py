from __future__ import annotations

import pytest

from stages.trial import MOST_REST, REST, TRIED, Trial


def ways(trial: Trial, rounds: int, with_s: float, without_s: float) -> list[bool]:
    """The ways that so many rounds go."""
    gone = []
    for _ in range(rounds):
        gone.append(trial.on)
        trial.see(trial.on, with_s if trial.on else without_s)
    return gone


@pytest.mark.parametrize("quicker", [True, False])
def test_both_are_tried_and_the_quicker_stays(quicker: bool) -> None:
    seconds = (1.0, 1.2) if quicker else (1.2, 1.0)
    gone = ways(Trial(), 2 * TRIED + REST, *seconds)
    assert gone == [True] * TRIED + [False] * TRIED + [quicker] * REST


@pytest.mark.parametrize("quicker", [True, False])
def test_the_other_is_tried_less_and_less_often(quicker: bool) -> None:
    seconds = (1.0, 1.2) if quicker else (1.2, 1.0)
    gone = ways(Trial(), 2000, *seconds)
    other = [way is not quicker for way in gone]
    rests, length = [], 0
    for one in other[2 * TRIED :]:
        if one and length:
            rests.append(length)
        length = 0 if one else length + 1
    assert rests[:4] == [REST, 2 * REST, 4 * REST, 8 * REST]
    assert set(rests[3:]) == {MOST_REST}
    assert sum(other[-MOST_REST - TRIED :]) == TRIED


def test_it_notices_when_the_other_becomes_quicker() -> None:
    trial = Trial()
    ways(trial, 500, 1.0, 2.0)
    gone = ways(trial, 4 * (MOST_REST + TRIED), 3.0, 2.0)
    assert not any(gone[-TRIED - REST :][:REST])


def test_the_first_round_of_a_way_does_not_count() -> None:
    """It is the other way that made it slow or quick."""
    trial = Trial()
    for on in [True] * TRIED:
        trial.see(on, 1.0)
    for index in range(TRIED):
        trial.see(False, 100.0 if index == 0 else 0.9)
    assert trial.on is False


def test_one_stall_decides_nothing() -> None:
    trial = Trial()
    for seconds in (1.0, 1.0, 1.0, 1000.0, 1.0):
        trial.see(True, seconds)
    for _ in range(TRIED):
        trial.see(False, 3.5)
    assert trial.on is True


def test_rounds_that_went_without_it_all_the_same_are_no_trial() -> None:
    trial = Trial()
    for _ in range(100):
        assert trial.on
        trial.see(False, 1.0)
    assert ways(trial, TRIED, 2.0, 1.0) == [True] * TRIED
    assert trial.on is False, "how long rounds take without it is known by now"
