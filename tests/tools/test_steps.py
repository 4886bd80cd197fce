"""Steps as a person sees them, and commands that end when we do."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.steps import CommandError, Steps, advice, run_command, summary


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Listening(Steps):
    """Steps whose every detail is handed to `hear`."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__(1, io.StringIO())
        self._hear = hear

    def tell(self, detail: str) -> None:
        self._hear(detail)


def python(source: str) -> list[str]:
    """Unbuffered, as set-up's own commands are: otherwise errors overtake what led to them."""
    return [sys.executable, "-u", "-c", source]


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_commands_output_goes_to_the_log_and_its_meaning_to_the_step(tmp_path: Path) -> None:
    told: list[str] = []
    source = "print('Collecting anyio==4'); print('noise'); print('Collecting rich', end='')"
    run_command("pip", python(source), tmp_path / "log", Listening(told.append))
    assert told == ["choosing anyio", "choosing rich"]
    assert (tmp_path / "log").read_text() == "Collecting anyio==4\nnoise\nCollecting rich"


def test_a_failure_shows_the_end_the_status_the_hint_and_the_log(tmp_path: Path) -> None:
    source = (
        "import sys\n"
        "for n in range(50): print('line', n)\n"
        "print('No space left on device', file=sys.stderr); sys.exit(7)"
    )
    with pytest.raises(CommandError) as caught:
        run_command("pip install", python(source), tmp_path / "log", Listening(lambda _: None))
    assert caught.value.status == 7
    *tail, last = str(caught.value).splitlines()
    assert tail[0] == "  line 36"
    assert tail[-1] == "  No space left on device"
    assert last.startswith("pip install failed (exit status 7). The disk is full")
    assert last.endswith(str(tmp_path / "log"))


@pytest.mark.parametrize("deaf", [(), ("child",), ("parent", "child")])
def test_an_interrupt_ends_the_command_and_its_children(
    tmp_path: Path, deaf: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.steps.GRACE_S", 0.2)
    read, write = os.pipe()  # whoever holds its writing end is alive

    def hear(detail: str) -> None:
        raise KeyboardInterrupt

    source = (
        "import os, signal, time\n"
        "who = 'parent' if os.fork() else 'child'\n"
        f"signal.signal(signal.SIGINT, signal.SIG_IGN if who in {deaf} else signal.SIG_DFL)\n"
        "if who == 'child': print('Collecting', os.getpid(), flush=True)\n"
        "time.sleep(50)"
    )
    os.set_inheritable(write, True)
    with monkeypatch.context() as patch:
        keeping = functools.partial(subprocess.Popen, pass_fds=(write,))
        patch.setattr(subprocess, "Popen", keeping)
        with pytest.raises(KeyboardInterrupt):
            run_command("pip", python(source), tmp_path / "log", Listening(hear))
    os.close(write)
    with open(read, "rb") as end:
        assert end.read() == b""  # returns at once: nobody is left


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("Collecting torch>=2.13 (from paceline==0.1.0)", "choosing torch"),
        ("Collecting spacy<3.9,>=3.8", "choosing spacy"),
        (
            "  Downloading torch-2.13.0-cp311-none-any.whl (190.1 MB)",
            "downloading torch (190.1 MB)",
        ),
        (
            "  Downloading gguf-0.19.0-py3-none-any.whl.metadata (4.0 kB)",
            "downloading gguf (4.0 kB)",
        ),
        ("  Using cached hf_xet-1.8.0-abi3.whl (3 MB)", "from pip's cache: hf_xet (3 MB)"),
        ("Processing ./some/where/rich-15.0.0-py3-none-any.whl", "reading rich"),
        ("Processing ./a/rich-15.0.0-py3-none-any.whl (from x->y)", "reading rich"),
        ("Installing collected packages: a, b, c", "unpacking 3 packages"),
        ("Requirement already satisfied: pip", None),
        ("Downloading", None),
        ("Collecting", None),
        ("", None),
    ],
)
def test_a_line_of_pip_is_summarized(line: str, meaning: str | None) -> None:
    assert summary(line) == meaning


def test_common_causes_get_a_hint_and_others_none() -> None:
    assert "disk is full" in advice("OSError: [Errno 28] No space left on device")
    assert "network" in advice("NewConnectionError('...')")
    assert "another Python" in advice("ERROR: No matching distribution found for torch==2.13.0")
    assert advice("something else") == ""


def test_without_a_terminal_a_step_is_a_line_at_each_end_and_one_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    steps = Steps(2, stream, clock)
    with steps.step("packages"):
        steps.tell("torch")
        for clock.now in (0.3, 19.9, 20.0, 39.0, 41.7):
            steps.tick()
    assert stream.getvalue().splitlines() == [
        "[1/2] packages",
        "[1/2] packages: torch (20 s)",
        "[1/2] packages: torch (42 s)",
        "[1/2] packages: done (42 s)",
    ]


def test_on_a_terminal_a_step_is_one_line_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal(), Clock()
    steps = Steps(1, stream, clock)

    def long_work() -> None:
        with steps.step("packages"):
            steps.tell("a very long name of something that is downloaded")
            for clock.now in (0.1, 0.3):
                steps.tick()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        long_work()
    lines = stream.getvalue().split("\r\x1b[2K")[1:]
    assert lines == [
        "[1/1] packages",
        "[1/1] packages: a very long n",
        "[1/1] packages: stopped (0 s)\n",
    ]
