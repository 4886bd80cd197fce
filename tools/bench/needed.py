"""What a benchmark needs beyond what Paceline itself does."""

from __future__ import annotations

from importlib.util import find_spec

from routing.errors import UsageError


class NotInstalledError(UsageError):
    """A package that something needs is not installed."""

    def __init__(self, what: str, package: str) -> None:
        self.what = what
        self.package = package
        super().__init__(
            f"{what} needs {package}, which is not installed: pip install {package}, or leave it"
            " out."
        )


def need_matplotlib(what: str) -> None:
    """Raises NotInstalledError if `what` cannot draw. Imports nothing."""
    if find_spec("matplotlib") is None:
        raise NotInstalledError(what, "matplotlib")
