"""Whether another package stands under one of our import names.

The names are plain words, and two packages that install the same one end up with the wrong module
or with a mixture of both. Nothing of ours is imported here, lest it be theirs.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

OURS = ("routing", "stages", "pipeline", "paceline")
"""The import names that we install."""


class Shadow(NamedTuple):
    """Somebody else's module under one of our names. `wins`: Python finds it and not ours."""

    name: str
    found: str
    advice: str
    wins: bool


def find_shadows(search: Sequence[str] | None = None) -> tuple[Shadow, ...]:
    """Look along `search` (by default sys.path), at modules and at what was installed there."""
    search = sys.path if search is None else search
    folders = list(dict.fromkeys(os.path.realpath(entry or os.getcwd()) for entry in search))
    return tuple(shadow for name in OURS for shadow in _shadows(name, folders))


def _shadows(name: str, folders: Sequence[str]) -> Iterator[Shadow]:
    home = Path(__file__).resolve().parent.parent
    ours = {home / name / "__init__.py", home / f"{name}.py"}
    owners = _owners(name, folders)
    who = " and ".join(owners) or f"the package that brings {name}"
    ours_seen = strangers_seen = False
    for folder in folders:
        spec = PathFinder.find_spec(name, [folder])
        # A folder without __init__.py has no origin, and gives way to any real module.
        if spec is None or spec.origin is None:
            continue
        if Path(spec.origin).resolve() in ours:
            ours_seen = True
            continue
        strangers_seen = True
        effect = "is hidden by ours" if ours_seen else "is imported in place of ours"
        advice = f"uninstall {who}, or install Paceline in an environment of its own"
        yield Shadow(name, f"{name} from {spec.origin} {effect}", advice, not ours_seen)
    if owners and not strangers_seen:
        # Both were written to one folder, the later over the earlier.
        advice = f"uninstall {who}, then install Paceline again"
        yield Shadow(name, f"{name} is also installed by {who}", advice, False)


def _owners(name: str, folders: Sequence[str]) -> list[str]:
    """The distributions other than ours that install a module called `name`."""
    found = set()
    for distribution in importlib.metadata.distributions(path=list(folders)):
        tops = set((distribution.read_text("top_level.txt") or "").split())
        if not tops:
            tops = {file.parts[0].removesuffix(".py") for file in distribution.files or ()}
        if name in tops:
            found.add(distribution.metadata["Name"])
    return sorted(found - {"paceline"})
