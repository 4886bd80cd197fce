"""Every error that a caller can meet.

    PacelineError
        UsageError                    the caller's mistake; the command line prints one line
            ModelNotFoundError
            ModelFormatError          damaged file, missing shard, nonsense header
            UnsupportedModelError
            BudgetError               no plan fits the memory given
            ContextLengthError
            OptionError
            DiskFullError
        BusyError                     the admission queue is full
        EngineError                   an actor died; every caller gets this one
        EngineClosedError
        DeviceMemoryError             an allocation would pass the device's limit
        LinkError                     input or output failed below the prefetcher

Constructors take the facts and build the message: what was given, what was expected, what to do.
The facts stay readable as attributes of the same names.
"""

from __future__ import annotations

from collections.abc import Sequence

_MIB = 1024 * 1024


def _mib_up(nbytes: int) -> str:
    """A size in MiB, rounded up: a budget of the printed number is enough."""
    return f"{-(-nbytes // _MIB)} MiB"


def _mib_down(nbytes: int) -> str:
    return f"{nbytes // _MIB} MiB"


class PacelineError(Exception):
    """The root of all errors raised on purpose."""


class UsageError(PacelineError):
    """The caller can mend it: a wrong name, file, option or size."""


class ModelNotFoundError(UsageError):
    """No model stands under the name or path given."""

    def __init__(self, model: str, hint: str) -> None:
        self.model = model
        self.hint = hint
        super().__init__(f"Model {model!r} was not found. {hint}")


class ModelFormatError(UsageError):
    """A file of the model is damaged, incomplete, or not what its name says."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}. Fetch or export the model again.")


class UnsupportedModelError(UsageError):
    """The model is sound, but this runtime has no loop for its architecture."""

    def __init__(self, architecture: str, supported: Sequence[str], why: str | None = None) -> None:
        self.architecture = architecture
        self.supported = tuple(supported)
        self.why = why
        reason = f" ({why})" if why else ""
        super().__init__(
            f"Architecture {architecture!r} is not supported{reason}. "
            f"Supported: {', '.join(self.supported)}."
        )


class BudgetError(UsageError):
    """No plan fits. `asked` and `smallest` are bytes; a budget of `smallest` works."""

    def __init__(self, asked: int, smallest: int, knob: str) -> None:
        self.asked = asked
        self.smallest = smallest
        self.knob = knob
        super().__init__(
            f"A memory budget of {_mib_down(asked)} is too small: the smallest plan needs "
            f"{_mib_up(smallest)}. Change {knob}."
        )


class ContextLengthError(UsageError):
    """The prompt does not fit the context. Both are token counts."""

    def __init__(self, prompt: int, context: int) -> None:
        self.prompt = prompt
        self.context = context
        super().__init__(
            f"The prompt has {prompt} tokens, but the context holds {context}, the answer "
            "included. Shorten the prompt, or raise the context."
        )


class OptionError(UsageError):
    """An option's value is out of its range or of the wrong kind."""

    def __init__(self, option: str, given: object, expected: str) -> None:
        self.option = option
        self.given = given
        self.expected = expected
        super().__init__(f"{option} was {given!r}; expected {expected}.")


class DiskFullError(UsageError):
    """A file could not be written for want of space. `needed` and `free` are bytes."""

    def __init__(self, path: str, needed: int, free: int) -> None:
        self.path = path
        self.needed = needed
        self.free = free
        super().__init__(
            f"{path} needs {_mib_up(needed)}, but its disk has {_mib_down(free)} free. "
            "Free some space, or choose another directory."
        )


class BusyError(PacelineError):
    """As many requests wait as are allowed to; the new one was refused at once."""

    def __init__(self, waiting: int, limit: int) -> None:
        self.waiting = waiting
        self.limit = limit
        super().__init__(
            f"{waiting} requests wait already, and the limit is {limit}. "
            "Try again later, or raise the queue limit."
        )


class EngineError(PacelineError):
    """An actor died and took the engine with it. `cause` is also the exception's __cause__."""

    def __init__(self, stage: str, cause: BaseException) -> None:
        self.stage = stage
        self.cause = cause
        what = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        super().__init__(f"The {stage} failed ({what}). The engine is closed; open a new one.")
        self.__cause__ = cause


class EngineClosedError(PacelineError):
    """A request came after the engine was closed."""

    def __init__(self) -> None:
        super().__init__("The engine is closed. Open a new one for further requests.")


class DeviceMemoryError(PacelineError):
    """An allocation would pass the device's limit. `asked`, `held` and `limit` are bytes."""

    def __init__(self, asked: int, held: int, limit: int, what: str) -> None:
        self.asked = asked
        self.held = held
        self.limit = limit
        self.what = what
        super().__init__(
            f"{what} asked for {asked} bytes while {held} of {limit} are held. "
            "Give the device more memory, or lower the context or the number of sessions."
        )


class LinkError(PacelineError):
    """Reading weights failed while the engine ran."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"Reading {path} failed: {problem}. Check the disk and the file.")
