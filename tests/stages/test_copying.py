"""Sessions that are drafted for from their own text, without a clock and without a model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.copying import Copying, RoundTimes
from stages.growth import Limits
from stages.speculation import PROBE_ROUNDS
from stages.tree import accept

LIMITS = Limits(15, 15, 0)
PHRASE = [*range(20, 50)]
TOKENS = st.integers(0, 4)


def flat(rows: int) -> float:
    return 1.0


class Driven:
    """A session whose target says `answer`, whatever is drafted; rounds take `seconds`(rows)."""

    def __init__(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        seconds: Callable[[int], float] = flat,
        times: RoundTimes | None = None,
    ) -> None:
        self.text, self.answer = [*prompt, answer[0]], [*prompt, *answer]
        self.copying = Copying(RoundTimes() if times is None else times)
        self.seconds, self.now = seconds, 0.0
        self.sent: list[int] = []

    def round(self, limits: Limits = LIMITS) -> int:
        """How many tokens came."""
        text = self.text
        tokens, parents = self.copying.draft(text, len(text) - 1, limits, self.now)
        assert tokens[0] == text[-1] and parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
        assert len(tokens) - 1 <= limits.nodes
        start = len(text)
        _, came = accept(tokens, parents, lambda _, below: self.answer[start + len(below)])
        text += came
        self.sent.append(len(tokens) - 1)
        self.now += self.seconds(len(tokens))
        return len(came)

    def rounds(self, limits: Limits = LIMITS) -> list[int]:
        """Rounds up to where the answer may end in the middle of a tree."""
        came = []
        while len(self.text) + limits.depth + 1 < len(self.answer):
            came.append(self.round(limits))
        return came


def test_what_a_text_repeats_comes_at_once() -> None:
    made = Driven([*PHRASE, 1, *PHRASE[:3]], [*PHRASE[3:], *PHRASE])
    assert made.round() > 8, "further down a guess is too unlikely, as far as is known"
    made = Driven([*PHRASE, 1, *PHRASE[:3]], [*PHRASE[3:], *PHRASE * 6])
    assert set(made.rounds()[-5:]) == {16}


def test_a_text_that_goes_round_in_circles_fills_the_tree() -> None:
    made = Driven([7, 1, 2, 3, 1, 2, 3], [1, 2, 3] * 30)
    came = made.rounds()
    assert came[0] > 6 and set(came[5:]) == {16}


@pytest.mark.parametrize("size", [1, 100])
def test_a_text_that_repeats_nothing_is_sent_alone(size: int) -> None:
    made = Driven([*range(1000, 1000 + size)], [*range(200)])
    made.rounds()
    assert sum(made.sent) == 0


def test_several_continuations_of_a_token_are_sent() -> None:
    prompt = [9, 1, 9, 2, 9, 3, 9, 4, 8]
    for token in (2, 3, 4):
        assert Driven(prompt, [9, token, *range(50, 70)]).round() == 2
    assert Driven(prompt, [9, 1, *range(50, 70)]).round() == 1, "no more than three"


def noise(seed: int, vocab: int, size: int) -> list[int]:
    tokens = random.Random(seed)
    return [tokens.randrange(vocab) for _ in range(size)]


@pytest.mark.parametrize("seed", range(3))
def test_text_that_never_goes_on_as_before_is_hardly_guessed_from(seed: int) -> None:
    """Each token was met before, and what followed it says nothing."""
    made = Driven(noise(seed, 100, 100), noise(seed + 9, 100, 600))
    made.rounds()
    carrying = [number for number, nodes in enumerate(made.sent) if nodes]
    assert carrying, "it was tried"
    later = [number for number in carrying if number >= 100]
    assert len(later) < 0.1 * (len(made.sent) - 100)


def test_it_is_tried_again_once_the_text_repeats() -> None:
    made = Driven(noise(1, 100, 100), [*noise(2, 100, 300), *PHRASE * 6])
    came = made.rounds()
    assert max(came[:200]) < 4 and max(came[-8:]) == 16


@pytest.mark.parametrize("extra", [0.0, 0.03, 0.3])
def test_it_is_never_slower_than_plain_by_more_than_its_probes(extra: float) -> None:
    """Rows beyond the padding cost `extra` of a sweep each; and most guesses are wrong."""

    def seconds(rows: int) -> float:
        return 1.0 + extra * max(0, rows - 4)

    made = Driven(noise(3, 12, 100), noise(4, 12, 900), seconds)
    came = made.rounds()
    most = 1.0 + (seconds(16) - 1.0) / PROBE_ROUNDS
    assert made.now <= most * sum(came)


def test_rows_that_cost_too_much_are_sent_in_probes_alone() -> None:
    made = Driven(PHRASE, PHRASE * 90, lambda rows: 1.0 if rows <= 4 else 100.0)
    made.rounds()
    wide = [number for number, nodes in enumerate(made.sent) if nodes > 3][2:]
    assert len(wide) > 10
    apart = {after - before for before, after in itertools.pairwise(wide)}
    assert apart == {PROBE_ROUNDS}


def test_one_stall_does_not_keep_trees_narrow_for_good() -> None:
    times = RoundTimes()
    for _ in range(3):
        times.see(4, 1.0)
    times.see(16, 100.0)
    made = Driven(PHRASE, PHRASE * 90, times=times)
    made.rounds()
    assert made.sent[0] == 3 and min(made.sent[-20:]) > 3


def test_sessions_share_what_they_know_of_rows() -> None:
    times = RoundTimes()
    first = Driven(PHRASE, PHRASE * 9, lambda rows: 1.0 if rows <= 4 else 100.0, times)
    first.rounds()
    second = Driven([*PHRASE, 1, *PHRASE[:3]], [*PHRASE[3:], *PHRASE], times=times)
    second.round()
    assert second.sent == [3]


def test_a_number_of_rows_that_was_never_tried_costs_no_more() -> None:
    times = RoundTimes()
    assert times.of(16) == 0.0
    times.see(4, 2.0)
    assert times.of(16) == pytest.approx(2.0)
    times.see(16, 3.0)
    assert times.of(10) == pytest.approx(2.5)
    assert times.of(3) == 0.0, "and fewer than ever are tried at once"


def test_after_forgetting_the_time_between_is_no_round() -> None:
    times = RoundTimes()
    made = Driven(PHRASE, PHRASE * 9, times=times)
    made.round()
    made.copying.forget()
    made.now += 1000.0
    made.round()
    assert times.of(16) == 0.0
    made.round()
    assert times.of(16) == pytest.approx(1.0)


@given(
    st.lists(TOKENS, min_size=1, max_size=30),
    st.lists(TOKENS, min_size=40, max_size=80),
    st.integers(0, 15),
    st.integers(0, 15),
)
def test_any_text_any_limits(prompt: list[int], answer: list[int], depth: int, nodes: int) -> None:
    """Trees are whole and within their limits (see `round`), and every round brings a token."""
    limits = Limits(depth, nodes if depth else 0, 0)
    came = Driven(prompt, answer).rounds(limits)
    assert all(1 <= tokens <= min(depth, nodes) + 1 for tokens in came)
