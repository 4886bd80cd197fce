"""`.venv` is made once, mended when half made, and never taken for whole when it is not.

What runs pip is replaced by a fake that leaves behind what pip would; one test of the commands
themselves goes through a real process.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import environment as module
from tools import quickstart
from tools.environment import Environment, PinnedWheel, guarded
from tools.steps import CommandError, SetupError, Steps

REPOSITORY = Path(module.__file__).resolve().parent.parent
EVERYTHING = ["venv", "install", "import", "download", "install"]
WHEEL = PinnedWheel("some-model", "1.0", hashlib.sha256(b"good").hexdigest())


class Pip:
    """Stands in for run_command: notes each command and leaves behind what it would."""

    def __init__(self, root: Path) -> None:
        self.home = root / ".venv"
        self.commands: list[list[str]] = []
        self.environ: Mapping[str, str] = {}
        self.wheel = b"good"
        self.before: Callable[[list[str]], None] = lambda command: None

    def __call__(
        self,
        what: str,
        command: Sequence[str | Path],
        log: Path,
        steps: Steps,
        environ: Mapping[str, str],
    ) -> None:
        words = [str(word) for word in command]
        self.commands.append(words)
        self.environ = environ
        self.before(words)
        if "venv" in words:
            (self.home / "bin").mkdir()
            (self.home / "bin" / "python").write_text("")
        if "download" in words:
            folder = Path(words[words.index("--dest") + 1])
            folder.mkdir(parents=True)
            (folder / "some_model-1.0-py3-none-any.whl").write_bytes(self.wheel)

    def verbs(self) -> list[str]:
        known = {"venv": "venv", "install": "install", "download": "download", "-c": "import"}
        return [
            next(known[word] for word in command if word in known and command[1] in ("-m", word))
            for command in self.commands
        ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "constraints.txt").write_text("rich==15")
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/rows.c").write_text("")
    return tmp_path


@pytest.fixture
def pip(root: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    fake = Pip(root)
    monkeypatch.setattr(module, "run_command", fake)
    return fake


@pytest.fixture
def environment(root: Path, pip: Pip) -> Environment:
    return Environment(root, WHEEL)


def test_a_fresh_checkout_gets_everything_once(environment: Environment, pip: Pip) -> None:
    environment.ensure(["test", "dev"])
    assert pip.verbs() == EVERYTHING
    pinned = str(environment.root / "constraints.txt")
    assert pip.commands[1][-4:] == ["-c", pinned, "-e", f"{environment.root}[dev,test]"]
    assert "some-model==1.0" in pip.commands[3]
    assert pip.commands[4][-1].endswith(".whl")
    assert not (environment.home / "tmp").exists()
    environment.ensure(["test"])
    environment.ensure()
    assert len(pip.commands) == 5


def test_pip_is_kept_from_foreign_packages_and_places(
    environment: Environment, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    environment.ensure()
    assert not {"PYTHONPATH", "PIP_TARGET"} & set(pip.environ)
    assert pip.environ["TMPDIR"] == str(environment.home / "tmp")
    assert pip.environ["PYTHONUNBUFFERED"], "what it says comes at once, and in order"


def test_an_extra_that_is_missing_is_added_to_those_there(
    environment: Environment, pip: Pip
) -> None:
    environment.ensure()
    assert not environment.ready(["test"])
    environment.ensure(["test"])
    environment.ensure(["bench"])
    assert pip.verbs()[5:] == EVERYTHING[1:] * 2
    assert pip.commands[-4][-1].endswith("[bench,test]")
    assert environment.ready(["bench", "test"])


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "constraints.txt", "setup.py", "stages/rows.c", "stages/new.h"]
)
def test_changed_inputs_update_it_in_place(environment: Environment, pip: Pip, name: str) -> None:
    environment.ensure()
    (environment.root / name).write_text("changed")
    assert not environment.ready(())
    environment.ensure()
    assert pip.verbs().count("venv") == 1
    assert environment.ready(())


@pytest.mark.parametrize("failing", ["venv", "-e", "LlamaForCausalLM", "download", ".whl"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SetupError("no"), OSError(28, "full")])
def test_a_half_made_environment_is_made_anew(
    environment: Environment, pip: Pip, failing: str, error: BaseException
) -> None:
    def fail(command: list[str]) -> None:
        if any(word.endswith(failing) for word in command):
            raise error

    pip.before = fail
    with pytest.raises((KeyboardInterrupt, SetupError)):
        environment.ensure()
    assert not environment.ready(())
    assert not (environment.home / "tmp").exists()
    (environment.home / "leavings").write_text("")
    pip.before = lambda command: None
    pip.commands.clear()
    environment.ensure()
    assert pip.verbs() == EVERYTHING
    assert not (environment.home / "leavings").exists()


def test_an_update_that_was_cut_off_is_made_anew_with_all_extras(
    environment: Environment, pip: Pip
) -> None:
    environment.ensure(["test"])

    def fail(command: list[str]) -> None:
        raise KeyboardInterrupt

    pip.before = fail
    with pytest.raises(KeyboardInterrupt):
        environment.ensure(["bench"])
    pip.before = lambda command: None
    environment.ensure()
    assert pip.verbs()[-5] == "venv"
    assert environment.ready(["bench", "test"])


def damage_python(home: Path) -> None:
    (home / "bin" / "python").unlink()


def damage_stamp(home: Path) -> None:
    (home / "setup.json").write_text("{")


def stamp_of_another_python(home: Path) -> None:
    stamp = json.loads((home / "setup.json").read_text())
    (home / "setup.json").write_text(json.dumps(stamp | {"python": "cpython-3.1-z80"}))


def only_a_file(home: Path) -> None:
    shutil.rmtree(home)
    home.write_text("")


@pytest.mark.parametrize(
    "damage", [damage_python, damage_stamp, stamp_of_another_python, only_a_file]
)
def test_a_damaged_environment_is_made_anew(
    environment: Environment, pip: Pip, damage: Callable[[Path], None]
) -> None:
    environment.ensure()
    damage(environment.home)
    assert not environment.ready(())
    environment.ensure()
    assert pip.verbs().count("venv") == 2
    assert environment.ready(())


def test_a_copied_checkout_does_not_run_the_originals_scripts(
    environment: Environment, pip: Pip, tmp_path: Path
) -> None:
    environment.ensure()
    copy = tmp_path / "copy"
    shutil.copytree(environment.root, copy, ignore=lambda _folder, _names: {"copy"})
    assert environment.ready(())
    assert not Environment(copy, WHEEL).ready(())


def working_python(path: Path) -> None:
    path.write_text(f"#!/bin/sh\necho {module.PYTHON_VERSION}\n")
    path.chmod(0o755)


def test_an_environment_its_user_made_is_added_to(environment: Environment, pip: Pip) -> None:
    (environment.home / "bin").mkdir(parents=True)
    working_python(environment.python)
    environment.ensure()
    assert pip.verbs() == EVERYTHING[1:]


def test_a_removal_that_was_cut_off_does_not_leave_what_looks_like_its_users(
    environment: Environment, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    (environment.home / "bin").mkdir(parents=True)
    making = {"state": "making", "inputs": "", "python": "", "root": "", "extras": []}
    (environment.home / "setup.json").write_text(json.dumps(making))
    working_python(environment.python)

    def rmtree(folder: Path, **_: Any) -> None:
        (folder / "setup.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(KeyboardInterrupt):
            environment.ensure()
    environment.ensure()
    assert pip.verbs() == EVERYTHING


def test_another_file_in_the_wheels_place_is_refused(environment: Environment, pip: Pip) -> None:
    pip.wheel = b"bad"
    with pytest.raises(SetupError, match=f"expected {WHEEL.sha256}") as caught:
        environment.ensure()
    assert hashlib.sha256(b"bad").hexdigest() in str(caught.value)
    assert pip.verbs()[-1] == "download"
    assert not environment.ready(())


def lacking(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name)
    )


def test_without_ensurepip_this_pythons_own_pip_is_lent(
    environment: Environment, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch, "ensurepip")
    environment.ensure()
    assert "--without-pip" in pip.commands[0]
    lent = ["-m", "pip", "--python", str(environment.python), "install", "pip"]
    assert pip.commands[1] == [sys.executable, *lent]


@pytest.mark.parametrize("names", [("venv",), ("ensurepip", "pip")])
def test_a_python_without_venv_gets_one_line_with_the_fix(
    environment: Environment, pip: Pip, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    lacking(monkeypatch, *names)
    with pytest.raises(SetupError, match="apt install python3-venv") as caught:
        environment.ensure()
    assert "\n" not in str(caught.value)
    assert pip.commands == []


def test_two_at_once_make_it_once(root: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    lock = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        try:
            lock(file, operation)
        except BlockingIOError:
            waiting.set()
            raise

    monkeypatch.setattr(fcntl, "flock", flock)
    second = threading.Thread(target=lambda: Environment(root, WHEEL).ensure())

    def meanwhile(command: list[str]) -> None:
        if "venv" in command:
            second.start()
            assert waiting.wait(20)

    pip.before = meanwhile
    Environment(root, WHEEL).ensure()
    second.join(20)
    assert pip.verbs() == EVERYTHING


# --- The commands. ---


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "Stopped. Run the same command to go on.\n"),
        (SetupError("What to do."), 1, "What to do.\n"),
        (CommandError("pip", 2, Path("log"), ["end"]), 1, None),
        (None, 0, ""),
    ],
)
@pytest.mark.usefixtures("handlers")
def test_every_end_of_a_command_is_clean(
    error: BaseException | None, status: int, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        if error is not None:
            raise error

    assert guarded(work) == status
    if said is not None:
        assert capsys.readouterr().err == said


@pytest.mark.usefixtures("handlers")
def test_sigterm_is_an_exception_in_a_command() -> None:
    with pytest.raises(SystemExit) as caught:
        guarded(lambda: signal.raise_signal(signal.SIGTERM))
    assert caught.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ([], [quickstart.PROMPT, "--memory", "200MiB"]),
        (["Hi"], ["Hi", "--memory", "200MiB"]),
        (["Hi", "-n", "4"], ["Hi", "--memory", "200MiB", "-n", "4"]),
        (["--json"], [quickstart.PROMPT, "--memory", "200MiB", "--json"]),
        (["Hi", "--memory", "1GB"], ["Hi", "--memory", "1GB"]),
        (["--memory=1GB"], [quickstart.PROMPT, "--memory=1GB"]),
        (["-"], ["-", "--memory", "200MiB"]),
        ([""], ["", "--memory", "200MiB"]),
    ],
)
def test_quickstart_passes_its_arguments_on(given: list[str], arguments: list[str]) -> None:
    assert quickstart.generate_arguments(given) == ["generate", *arguments]


def test_the_command_becomes_the_program(root: Path) -> None:
    (root / ".venv/bin").mkdir(parents=True)
    program = root / ".venv/bin/said"
    program.write_text('#!/bin/sh\necho "$1, $2"\nexit 7\n')
    program.chmod(0o755)
    source = (
        "from pathlib import Path; from tools.environment import Environment\n"
        f"Environment(Path({str(root)!r})).execute('said', ['a b', 'c'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "a b, c\n", "")


def test_a_program_that_is_missing_is_one_line(environment: Environment) -> None:
    with pytest.raises(SetupError, match=r"cannot be started .* Remove .*\.venv"):
        environment.execute("paceline", [])


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_an_old_python_gets_one_line(name: str) -> None:
    for file in (f"tools/{name}.py", "tools/__init__.py"):
        ast.parse((REPOSITORY / file).read_text(), feature_version=(3, 7))
    source = (
        "import runpy, sys\n"
        "sys.version_info = (3, 9, 1, 'final', 0)\n"
        f"runpy.run_path('tools/{name}.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Paceline needs Python 3.11 or newer")
    assert done.stderr.count("\n") == 1
