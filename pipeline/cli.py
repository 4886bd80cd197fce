"""The console script: runs a command and turns however it ends into an exit code.

0 done, 1 a failure while running, 2 a mistake in what was asked, 130 interrupted. Each but the
first comes with one line on standard error and no traceback. Nothing is imported before `run` can
catch what happens meanwhile: Ctrl-C, or another package under one of our import names.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn

DONE, FAILED, MISTAKEN, INTERRUPTED = 0, 1, 2, 130


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code. What it raises, SystemExit apart, is a bug."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except ImportError as error:
        return _shadowed(error)
    except OSError as error:
        # Output that nobody takes, most likely. Writing it again on the way out would fail again.
        _give_up_output()
        if isinstance(error, BrokenPipeError):
            return FAILED
        return _complain(f"{error.filename or 'output'}: {error.strerror or error}", FAILED)
    return code


def _run(arguments: Sequence[str]) -> int:
    from pipeline.arguments import read
    from routing.errors import PacelineError, UsageError

    try:
        work = read(arguments)
        if isinstance(work, int):
            return work
        work()
    except UsageError as error:
        return _complain(str(error), MISTAKEN)
    except PacelineError as error:
        return _complain(str(error), FAILED)
    return DONE


def _shadowed(error: ImportError) -> int:
    """Say whose module was found in place of ours; raise the error if that was not it."""
    from pipeline.shadows import find_shadows

    for shadow in find_shadows():
        if shadow.wins:
            return _complain(f"{shadow.found}. {shadow.advice}.", FAILED)
    raise error


def _give_up_output() -> None:
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _complain(message: str, code: int) -> int:
    with suppress(OSError):
        print(f"paceline: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _prepare_process() -> None:
    """What a library must not do to its process, and a program may."""
    # Files closed by whoever started us.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Not every terminal can show every character that a model can say.
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions:
        import warnings

        warnings.simplefilter("ignore")
    import logging

    # What ours warns of stands in the tables.
    logging.getLogger("paceline").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> NoReturn:
    """The console script."""
    try:
        _prepare_process()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before or after what `run` watches over
        code = _complain("interrupted", INTERRUPTED)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A further Ctrl-C while threads are joined ends the process, and with no traceback either.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
