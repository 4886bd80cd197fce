"""Whether what is done beside the rounds makes them quicker: both are tried, time and again.

No model of the machine says it for sure. Drafting ahead saves drafting, but takes a core from the
sweep; that lets a ring of few slots run full, and then the link stands still too. So some rounds go
with it and some without, and the quicker way is kept, the longer the oftener it proved quicker.
"""

from __future__ import annotations

from stages.pace import LEAP, Mean

TRIED = 5
"""Rounds of a trial. The first still has to do with the way before, and does not count."""
REST, MOST_REST = 16, 128
"""Rounds until the other way is tried again: at first, and after many times the same result."""


class Trial:
    """`on`: whether the next round is to go with it. No clock in here."""

    def __init__(self) -> None:
        self.on = True
        self._seconds = {True: Mean(0.3), False: Mean(0.3)}
        self._before: bool | None = None
        self._left, self._rest = TRIED, REST
        self._better: bool | None = None
        self._resting = False

    def see(self, on: bool, seconds: float) -> None:
        """A round went with it, or without it, and took so long (where ways differ in the tokens
        that are to be expected: for each of them). It may have gone without although a trial asked
        for it: that is no round of the trial."""
        if on is self._before:
            mean = self._seconds[on]
            usual = mean.value
            mean.see(seconds if usual is None else min(seconds, LEAP * usual))
        self._before = on
        if on is self.on:
            self._left -= 1
            if not self._left:
                self._turn()

    def _turn(self) -> None:
        quick, slow = self._seconds[True].value, self._seconds[False].value
        if self._resting or quick is None or slow is None:
            self.on, self._left, self._resting = not self.on, TRIED, False
            return
        better = quick <= slow
        self._rest = min(2 * self._rest, MOST_REST) if better is self._better else REST
        self.on = self._better = better
        self._left, self._resting = self._rest, True
