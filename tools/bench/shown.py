"""What a person sees while a benchmark runs."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status


class Shown:
    """Progress on standard error: a line that is kept current, or many where it is no terminal.

    It is the Progress (stages/progress.py) of the model's preparation as well.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._step = ""

    def step(self, what: str, done: int, total: int) -> None:
        """See Progress."""
        if self._console.is_terminal:
            self.tell(f"{what}: {done / total:.0%}" if total else what)
        elif what != self._step:
            self.tell(what)
        self._step = what

    def tell(self, what: str) -> None:
        """What is being done now."""
        if not self._console.is_terminal:
            self._console.print(what)
        elif self._status is None:
            self._status = self._console.status(what)
            self._status.start()
        else:
            self._status.update(what)

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
