"""How far text that was looked up (lookup.py) can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stages.lookup import LONGEST_MATCH
from stages.pace import Mean

GUESSED_LEAST, GUESSED_BEST = 0.05, 0.98
"""Chances that guesses are given at least, lest they are never tried again, and at most."""


class Guesses:
    """How often text that was looked up came true, by how long it agreed with what came before."""

    def __init__(self) -> None:
        self._chance = {agree: Mean(0.1, 1.0 - 0.8**agree) for agree in range(1, LONGEST_MATCH + 1)}

    def log_prob(self, agree: int) -> float:
        """Of each token that followed."""
        chance = self._chance[agree].value
        assert chance is not None
        return math.log(min(GUESSED_BEST, max(GUESSED_LEAST, chance)))

    def see(self, agree: int, guessed: Sequence[int], came: Sequence[int]) -> None:
        """Compare guessed tokens with those that came."""
        for guess, token in zip(guessed, came, strict=False):
            self._chance[agree].see(float(guess == token))
            if guess != token:
                return
