"""Progress: bars on a terminal, lines elsewhere, nothing where nothing was asked for."""

from __future__ import annotations

import io

from rich.console import Console

from pipeline.bars import LINE_EVERY_S, MIB, LineProgress, shown_progress


def shown(*, terminal: bool, silent: bool = False) -> str:
    """What a preparation of three steps leaves on a console."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100, legacy_windows=False)
    with shown_progress(console, silent) as progress:
        progress.step("finding the model", 0, 0)
        progress.step("converting the model", 3 * MIB, 6 * MIB)
        progress.step("converting the model", 6 * MIB, 6 * MIB)
        progress.step("planning", 0, 0)
    return written.getvalue()


def test_bars_on_a_terminal() -> None:
    last = shown(terminal=True).split("\r")[-1]
    for title in ("Finding the model", "Converting the model", "Planning"):
        assert title in last
    assert "6.0/6.0 MiB" in last
    assert last.count("MiB") == 1, "steps without a size show none"


def test_lines_elsewhere() -> None:
    assert shown(terminal=False) == "Converting the model: 3 of 6 MiB\n"


def test_silence() -> None:
    assert shown(terminal=True, silent=True) == ""


def test_long_steps_say_how_far_they_are() -> None:
    now = 0.0
    lines: list[str] = []
    progress = LineProgress(lines.append, lambda: now)
    for second in range(12):
        now = float(second)
        progress.step("loading weights", second * MIB, 12 * MIB)
    assert LINE_EVERY_S == 5.0
    assert lines == [f"Loading weights: {done} of 12 MiB" for done in (0, 5, 10)]
