"""What people see while a model is prepared: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from stages.progress import Progress, SilentProgress

MIB = 1 << 20
LINE_EVERY_S = 5.0


class BarProgress:
    """Progress on a terminal: a bar for each step, the last one moving."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def step(self, what: str, done: int, total: int) -> None:
        """See stages.progress.Progress."""
        if what not in self._tasks:
            self._finish()
            self._tasks[what] = self._bars.add_task(_title(what), total=None)
        self._bars.update(self._tasks[what], completed=done, total=total or None)

    def _finish(self) -> None:
        """Bars of unknown length stand still once the next step has begun."""
        for task in self._bars.tasks:
            if task.total is None:
                self._bars.update(task.id, completed=1, total=1, unsized=True)


class _Size(DownloadColumn):
    """Bytes done and to do, for steps that have bytes."""

    def render(self, task: Task) -> Text:
        sized = task.total is not None and not task.fields.get("unsized")
        return super().render(task) if sized else Text()


class LineProgress:
    """Progress where no line can be kept current: one for each step, more for the long ones.

    Steps without a size are short, and not told: a mistake found there is one line in all.
    """

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell, self._clock = tell, clock
        self._seen: set[str] = set()
        self._told = clock()

    def step(self, what: str, done: int, total: int) -> None:
        """See stages.progress.Progress."""
        now = self._clock()
        if not total or (what in self._seen and now - self._told < LINE_EVERY_S):
            return
        self._seen.add(what)
        self._told = now
        self._tell(f"{_title(what)}: {done / MIB:.0f} of {total / MIB:.0f} MiB")


@contextmanager
def shown_progress(console: Console, silent: bool) -> Iterator[Progress]:
    """Progress shown on `console` until the block ends, or none at all."""
    if silent:
        yield SilentProgress()
    elif not console.is_terminal:
        yield LineProgress(lambda line: console.print(line, highlight=False), time.monotonic)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), _Size(True), TimeElapsedColumn())
        with Bars(*columns, console=console) as bars:
            yield BarProgress(bars)


def _title(what: str) -> str:
    return what[:1].upper() + what[1:]
