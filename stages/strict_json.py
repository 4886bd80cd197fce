"""JSON from files that nobody vouches for.

Python's reader takes the last of two equal keys, runs out of stack on deep nesting and knows four
text encodings. A damaged file must end in one error that names it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from routing.errors import ModelFormatError
from stages.source_file import SourceFile


def shown(name: str) -> str:
    """A name out of a file as it may stand in a message: one line, ASCII, not endless."""
    return ascii(name if len(name) <= 80 else name[:77] + "...")


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in ``text``. Raises ModelFormatError naming ``path`` for anything else.

    Duplicate keys, at any depth, are errors: two readers would see two different models.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ModelFormatError(str(path), f"the name {shown(twice)} appears twice")
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise ModelFormatError(str(path), f"it is not UTF-8 text at byte {error.start}") from None
    except RecursionError:
        raise ModelFormatError(str(path), "its JSON is nested too deeply") from None
    except ValueError as error:
        raise ModelFormatError(str(path), f"it is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(
            str(path), f"expected a JSON object, found {type(value).__name__} at the top"
        )
    return value


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in the file ``path``, which may hold ``limit`` bytes at most."""
    file = SourceFile.open(path)
    try:
        if file.size > limit:
            raise ModelFormatError(
                str(path), f"it has {file.size} bytes, expected {limit} at most in such a file"
            )
        return parse_object(file.read(0, file.size), path)
    finally:
        file.close()
