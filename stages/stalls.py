"""When two threads are slower than one.

A draft step opens some hundred parallel regions. Beside a busy process of somebody else each of
their ends may wait for a time slice of a core that is not ours: a step of 5 ms then took 50 to 400.
One thread waits for nobody, and takes hardly longer for the few rows of a draft.
"""

from __future__ import annotations

STALL = 4.0
"""So many times the usual is no longer the work's own doing."""
NARROW_STEPS = 64
"""For how many steps one thread is used after a stall."""
DRIFT = 1.02
"""What is usual grows by so much a step unless it is reached again: contexts grow."""


class Stalls:
    """Watches the steps of one worker. Not shared."""

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}
        self._left = 0

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
        if seconds > STALL * usual:
            self._left = NARROW_STEPS
        self._usual[rows] = min(usual * DRIFT, seconds)
