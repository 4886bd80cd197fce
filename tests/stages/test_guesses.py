from __future__ import annotations

import math

from stages.guesses import Guesses


def test_what_comes_true_is_trusted_more_and_what_does_not_less() -> None:
    true, false = Guesses(), Guesses()
    before = true.log_prob(4)
    assert before == false.log_prob(4)
    true.see(4, (1, 2, 3), (1, 2, 3, 4))
    false.see(4, (1, 2, 3), (2, 2, 3))
    assert false.log_prob(4) < before < true.log_prob(4)
    assert true.log_prob(5) == Guesses().log_prob(5)
    for _ in range(100):
        true.see(4, (1,), (1,))
        false.see(4, (1,), (2,))
    assert math.exp(true.log_prob(4)) <= 0.98 + 1e-9
    assert math.exp(false.log_prob(4)) >= 1e-3 - 1e-9


def test_a_guess_that_broke_off_is_judged_up_to_there() -> None:
    short, long = Guesses(), Guesses()
    short.see(3, (1, 2), (1, 9))
    long.see(3, (1, 2, 3, 4), (1, 9, 3, 4))
    assert short.log_prob(3) == long.log_prob(3)


def test_longer_agreement_is_trusted_more() -> None:
    chances = [Guesses().log_prob(agree) for agree in range(1, 9)]
    assert chances == sorted(chances)
    assert len(set(chances)) == len(chances)
