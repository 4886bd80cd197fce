"""What a long preparation (fetching, unpacking, converting) tells whoever waits for it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Takes reports of work done. Called from the thread that does the work, and often."""

    def step(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of ``what`` (a few words) are done.

        ``total`` is 0 while it is unknown. Within one ``what``, ``done`` never falls, and the last
        report has ``done == total``. An exception raised here ends the work and leaves nothing
        behind, so this is also the place to cancel it.
        """


class SilentProgress:
    """Says nothing."""

    def step(self, what: str, done: int, total: int) -> None:
        pass
