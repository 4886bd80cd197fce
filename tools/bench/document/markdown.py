"""Markdown out of tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def rows_of(table: Table) -> str:
    """A table for people as one of Markdown; title, caption and sections are left out."""
    columns = table.columns
    heads = [str(column.header) for column in columns]
    right = [column.justify == "right" for column in columns]
    return table_of(heads, zip(*(map(str, column.cells) for column in columns), strict=True), right)


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool]) -> str:
    """A table; `right` says which columns have numbers."""
    rules = ["---:" if numbers else "---" for numbers in right]
    return "\n".join(
        _line(cells) for cells in (map(_cell, heads), rules, *(map(_cell, r) for r in rows))
    )


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)


def code(line: str) -> str:
    """A command line."""
    return f"```bash\n{line}\n```"


def paragraphs(*parts: str) -> str:
    """Those that are not empty, with an empty line between."""
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return "<br>".join(" ".join(line.split()) for line in text.splitlines()).replace("|", "\\|")
