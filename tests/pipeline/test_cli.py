"""The command line as a process: exit codes, Ctrl-C, closed pipes. Never a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline import cli
from pipeline.cli import run
from tests.made import make_model, make_tokenizer
from tests.pipeline.made_cli import (
    Here,
    Outcome,
    command,
    environment,
    interrupt,
    left_behind,
    process,
    read_until,
)
from tests.stages.made_gguf import MadeGguf

# A process imports everything anew, which takes seconds on a good day.
pytestmark = pytest.mark.timeout(600)

SLOW_DISK = """
import time
from {module} import {owner}
quick = {owner}.{method}
def slow(*args):
    time.sleep(0.2)
    return quick(*args)
{owner}.{method} = slow
"""
SLOW_WRITES = SLOW_DISK.format(
    module="stages.safetensors_writer", owner="SafetensorsWriter", method="write"
)
SLOW_READS = SLOW_DISK.format(
    module="stages.checkpoint", owner="Checkpoint", method="read_row_range"
)
ANNOUNCED = """
import pipeline.cli
run = pipeline.cli.run
def announced(arguments):
    print('about to start', flush=True)
    return run(arguments)
pipeline.cli.run = announced
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model"
    return make_tokenizer(make_model(path, "llama", dtype=torch.float32))


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys)


def ended(done: Outcome, path: Path) -> None:
    """Interrupted, in one line (after more of its progress, maybe), and nothing left behind."""
    assert done.code == 130, done
    progress = r"((Converting the model|Loading weights): \d+ of \d+ MiB\n)*"
    assert re.fullmatch(progress + "paceline: interrupted\n", done.err), done
    assert left_behind(path) == []


# --- Ctrl-C ---


def test_interrupted_while_it_starts(tmp_path: Path, model: Path) -> None:
    arguments = ["plan", "-m", model]
    with process(arguments, environment(tmp_path), ANNOUNCED) as started:
        assert started.stdout is not None
        read_until(started.stdout, "about to start")
        ended(interrupt(started), tmp_path)


@pytest.mark.parametrize("verb", [["plan"], ["generate", "hello"]])
def test_interrupted_while_it_converts(tmp_path: Path, verb: list[str]) -> None:
    gguf = MadeGguf(tmp_path, "llama").write(tmp_path / "made.gguf")
    arguments = [*verb, "-m", gguf]
    with process(arguments, environment(tmp_path), SLOW_WRITES) as started:
        assert started.stderr is not None
        read_until(started.stderr, "Converting the model")
        assert left_behind(tmp_path), "it was not at work yet"
        ended(interrupt(started), tmp_path)


def test_interrupted_while_it_loads(tmp_path: Path, model: Path) -> None:
    arguments = ["generate", "hello", "-m", model]
    with process(arguments, environment(tmp_path), SLOW_READS) as started:
        assert started.stderr is not None
        read_until(started.stderr, "Loading weights")
        ended(interrupt(started), tmp_path)


@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_while_it_answers(tmp_path: Path, model: Path, times: int) -> None:
    """The link is so slow that the sweep under way would take too long to wait for."""
    slow = ["--memory", "28000KiB", "-c", "64", "--link-gbps", "0.0001"]
    trace = tmp_path / "trace.json"
    arguments = ["generate", "hello", "-m", model, *slow, "--trace", trace]
    begun = SLOW_DISK.format(module="stages.sweep", owner="Sweep", method="layer")
    begun = begun.replace("time.sleep(0.2)", "print('sweeping', flush=True)")
    with process(arguments, environment(tmp_path), begun) as started:
        assert started.stdout is not None and started.stderr is not None
        read_until(started.stderr, "Loading weights")
        read_until(started.stdout, "sweeping")
        done = interrupt(started, times)
    ended(done, tmp_path)
    assert not trace.exists()


# --- Output that nobody takes, or that there is not ---


def test_a_closed_pipe_is_quiet(tmp_path: Path, model: Path) -> None:
    arguments = ["generate", "hello", "-m", model, "-n", "200"]
    with process(arguments, environment(tmp_path)) as started:
        assert started.stdout is not None and started.stderr is not None
        assert started.stdout.read(1)
        started.stdout.close()
        err = started.stderr.read()
    assert started.returncode == 1
    assert re.fullmatch(r"(Loading weights: .*\n)*", err), err


def test_a_full_disk_under_the_output_is_one_line(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    with full.open("w") as output:
        done = subprocess.run(
            command(["--help"]),
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(tmp_path),
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "paceline: output: No space left on device\n")


def test_closed_files_are_no_reason_to_fail(tmp_path: Path) -> None:
    shell = 'exec "$@" <&- >&- 2>&-'
    for arguments, code in ((["--version"], 0), (["generate", "-"], 2), (["--nonsense"], 2)):
        whole = ["sh", "-c", shell, "sh", *command(arguments)]
        assert subprocess.run(whole, env=environment(tmp_path), check=False).returncode == code


# --- Starting ---


def test_help_and_version_import_nothing_heavy(tmp_path: Path) -> None:
    """A third of a second, two to three times what the argument parser's own import takes.

    Processor time is measured, against each other, as the machine may be slow or busy.
    """
    tail = (
        "import atexit, os, sys\natexit.register(lambda: print(sum(os.times()[:2]), *sys.modules))"
    )

    def said(started: list[str]) -> str:
        done = subprocess.run(
            started, capture_output=True, text=True, env=environment(tmp_path), check=True
        )
        assert done.stderr == ""
        return done.stdout

    parser = [sys.executable, "-c", f"{tail}\nimport typer"]
    for argument, word in (("--help", "generate"), ("--version", "paceline")):
        said(command([argument]))  # compiled, and read from the disk once
        least, whole = said(parser), said(command([argument], tail))
        assert word in whole
        seconds, *modules = whole.splitlines()[-1].split()
        assert float(seconds) < 7 * float(least.split()[0])
        assert len(modules) < 500, "torch alone is more than a thousand"
        assert not {"torch", "transformers", "numpy", "rich.console"} & set(modules)


def test_another_package_in_place_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "site" / "stages").mkdir(parents=True)
    (tmp_path / "site" / "stages" / "__init__.py").write_text("")
    # The finder of an editable installation would find our modules inside the other package.
    before = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in str(f)]; "
        f"sys.path.insert(0, {str(tmp_path / 'site')!r})"
    )
    for arguments, code in ((["plan"], 1), (["doctor"], 0)):
        done = subprocess.run(
            command(arguments, before),
            capture_output=True,
            text=True,
            env=environment(tmp_path, COLUMNS="400"),
            check=False,
        )
        assert done.returncode == code, done
        text = done.stdout + done.stderr
        assert "imported in place of ours" in text and "environment of its own" in text
        assert "Traceback" not in text


# --- In this process ---


def test_without_a_command_there_is_help(here: Here) -> None:
    done = here()
    assert done.code == 2 and "Usage: paceline" in done.err and done.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["answer"], "No such command 'answer'"),
        (["--colour"], "No such option: --colour"),
        (["generate"], "Missing argument 'PROMPT'"),
        (["generate", "a", "b"], "unexpected extra argument"),
        (["generate", "a", "--nonsense"], "No such option: --nonsense"),
        (["generate", "a", "--memory"], "requires an argument"),
        (["plan", "-n", "3"], "No such option: -n"),
        (["doctor", "now"], "unexpected extra argument"),
    ],
)
def test_what_cannot_be_read(here: Here, arguments: list[str], words: str) -> None:
    complaint = here(*arguments).complaint
    assert words in complaint and complaint.endswith("See `paceline --help`.")


def test_ctrl_c_while_arguments_are_read(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes through the argument parser, which has its own way with it."""

    def impatient(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.arguments.Settings.from_environment", impatient)
    assert here("plan") == Outcome(130, "", "paceline: interrupted\n")


def test_an_import_that_fails_for_itself_is_no_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pipeline.commands", None)
    with pytest.raises(ImportError):
        run(["plan"])


def test_main_leaves_with_the_code(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "answer"])
    monkeypatch.setattr(cli, "_prepare_process", lambda: None)
    monkeypatch.setattr("signal.getsignal", lambda _: None)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "No such command" in capsys.readouterr().err


def test_the_environment_of_the_tests_has_no_settings() -> None:
    assert [name for name in os.environ if name.startswith("PACELINE_")] in ([], ["PACELINE_CACHE"])
