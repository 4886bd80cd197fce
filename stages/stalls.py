"""When two threads are slower than one.

A draft step opens some hundred parallel regions. Beside a busy process of somebody else each of
their ends may wait for a time slice of a core that is not ours: a step of 5 ms then took 50 to 400.
One thread waits for nobody, and takes hardly longer for the few rows of a draft.

The first step after a sweep is slow by itself, by up to 4 times: the sweep has driven the
substitutes out of the caches.
"""

from __future__ import annotations

STALL = 8.0
"""So many times the usual is no longer the work's own doing."""
NARROW_STEPS, MOST_NARROW = 8, 256
"""For how many steps one thread is used after a stall: at first, and after many on end."""
DRIFT = 1.02
"""What is usual grows by so much a step unless it is reached again: contexts grow."""


class Stalls:
    """Watches the steps of one worker. Not shared."""

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}
        self._left, self._next, self._calm = 0, NARROW_STEPS, 0

    @property
    def narrow(self) -> bool:
        """Whether the next step should be made on one thread."""
        return self._left > 0

    def see(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long, on one thread where `narrow` said so."""
        if self._left:
            self._left -= 1
            return
        usual = self._usual.get(rows, seconds)
        self._usual[rows] = min(usual * DRIFT, seconds)
        self._calm += 1
        if seconds > STALL * usual:
            self._left, self._calm = self._next, 0
            self._next = min(2 * self._next, MOST_NARROW)
        elif self._calm > NARROW_STEPS:
            self._next = NARROW_STEPS
