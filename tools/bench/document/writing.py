"""A document and its pictures onto the disk: each file wholly or not at all, the document last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tools.bench.document.markdown import paragraphs
from tools.bench.document.reading import Read, ResultFileError, read_results
from tools.bench.document.sections import (
    HEAD,
    benchmark_section,
    machine_section,
    missing_section,
)
from tools.bench.needed import need_matplotlib
from tools.bench.results import check_writable, make_directory, write_file


def write_document(paths: Iterable[Path], to: Path) -> None:
    """Write the results in `paths` into `to`, their pictures into the folder of its name beside it.

    The same files give the same document. Raises UsageError; then the document is as it was.
    """
    need_matplotlib("report")
    reads = read_results(paths)
    check_writable(to, "--to")
    folder = to.with_suffix("")
    if folder == to:
        folder = to.with_name(f"{to.name}.pictures")
    sections, pictures = [], {}
    for read, name in zip(reads, picture_names(reads), strict=True):
        section, pictures[name] = _rendered(read, f"{folder.name}/{name}")
        sections.append(section)
    text = "\n".join((paragraphs(*HEAD), machine_section(reads), *sections, missing_section(reads)))
    make_directory(folder, "--to")
    for name, picture in pictures.items():
        write_file(folder / name, picture, "--to")
    write_file(to, text.encode(), "--to")


def picture_names(reads: Iterable[Read]) -> list[str]:
    """WHAT.png, and WHAT-2.png where there is a second result of the same benchmark."""
    seen: Counter[str] = Counter()
    names = []
    for read in reads:
        what = read.shared.what
        seen[what] += 1
        names.append(f"{what}.png" if seen[what] == 1 else f"{what}-{seen[what]}.png")
    return names


def _rendered(read: Read, picture: str) -> tuple[str, bytes]:
    from tools.bench.pictures.drawing import draw, png

    try:
        return benchmark_section(read, picture), png(draw(read.result))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"not what a result of {read.shared.what} has: {type(error).__name__} {error}"
        raise ResultFileError(read.path, problem) from error
