"""How fast things go: running means of what drafting must be weighed against."""

from __future__ import annotations

import math

from routing.messages import SweepTimes

LEAP = 4.0
"""A stall of the machine is not the pace of the work."""
WAITED = 0.05
"""A sweep that waits for less than this share of its time is not held up by its weights."""
FIXED_ROWS = 10.0
"""A step that was never timed is taken to cost as much as its rows and so many more."""


class Mean:
    """An exponential running mean; None until it has seen a value."""

    def __init__(self, weight: float = 0.2, value: float | None = None) -> None:
        self._weight = weight
        self.value = value

    def see(self, value: float) -> None:
        """Take in one value."""
        if self.value is None:
            self.value = value
        else:
            self.value += self._weight * (value - self.value)


class StepTimes:
    """Seconds of a draft step by the number of its rows."""

    def __init__(self, fixed_rows: float = FIXED_ROWS) -> None:
        """`fixed_rows`: see FIXED_ROWS."""
        self._fixed = fixed_rows
        self._means: dict[int, Mean] = {}

    def see(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long; LEAP times the mean is the most that counts."""
        mean = self._means.setdefault(rows, Mean())
        mean.see(seconds if mean.value is None else min(seconds, LEAP * mean.value))

    def of(self, rows: int) -> float:
        """Seconds that a step of `rows` rows is likely to take; 0 before anything was timed."""
        if not self._means:
            return 0.0
        below = max((seen for seen in self._means if seen <= rows), default=None)
        above = min((seen for seen in self._means if seen >= rows), default=None)
        if below is None or above is None:
            near = above if below is None else below
            assert near is not None
            return self._timed(near) * (self._fixed + rows) / (self._fixed + near)
        if below == above:
            return self._timed(below)
        share = (rows - below) / (above - below)
        return self._timed(below) + share * (self._timed(above) - self._timed(below))

    def _timed(self, rows: int) -> float:
        seconds = self._means[rows].value
        assert seconds is not None
        return seconds


class SweepPace:
    """Seconds of a sweep by the rows of its trees, and whether it leaves a core to others.

    A sweep takes as long as its weights take to arrive, or as long as it computes. How fast they
    arrive is seen only where they are waited for: where they never are, it is taken for instant,
    until fewer rows make it show. Where stages take turns it takes both times.
    """

    def __init__(self, in_turn: bool = False) -> None:
        """`in_turn`: no weights arrive while a piece is computed."""
        self._in_turn, self._waited = in_turn, Mean()
        self._computed = StepTimes()
        self._arriving = Mean(value=0.0)
        self._cores = Mean()

    def see(self, times: SweepTimes) -> None:
        """A sweep is over."""
        self._computed.see(times.rows, times.computed)
        self._cores.see(times.cores)
        self._waited.see(times.waited)
        sweep = times.computed + times.waited
        self._arriving.see(sweep if times.waited >= WAITED * sweep else 0.0)

    def of(self, rows: int) -> float:
        """Seconds of a sweep; 0 before one was seen."""
        if self._in_turn:
            return self._computed.of(rows) + (self._waited.value or 0.0)
        return max(self._computed.of(rows), self._arrival)

    def longer(self, cores: int) -> float:
        """Seconds by which it is longer if one of so many cores does other work; infinite if it
        has no other, and before a sweep was seen."""
        needed = self._cores.value
        if cores < 2 or needed is None:
            return math.inf
        return max(needed / (cores - 1), self._arrival) - max(needed / cores, self._arrival)

    @property
    def _arrival(self) -> float:
        return self._arriving.value or 0.0


class Rate:
    """Tokens a second of one session's rounds: what the time of a draft step yields elsewhere."""

    def __init__(self, like: Rate | None = None) -> None:
        """Begins as `like` is by now."""
        self._seconds, self._tokens = Mean(), Mean()
        if like is not None:
            self._seconds.value, self._tokens.value = like._seconds.value, like._tokens.value

    def see(self, seconds: float, tokens: int) -> None:
        """A round took so long and yielded so many tokens."""
        usual = self._seconds.value
        self._seconds.see(seconds if usual is None else min(seconds, LEAP * usual))
        self._tokens.see(tokens)

    @property
    def value(self) -> float:
        """0 until a round was seen."""
        if self._seconds.value is None or self._tokens.value is None:
            return 0.0
        return self._tokens.value / max(self._seconds.value, 1e-9)
