"""A file is written whole, or what was there stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.whole_file import write_whole


@pytest.mark.parametrize("before", [None, b"something longer than what comes"])
def test_a_file_has_what_was_written_and_nothing_lies_beside_it(
    tmp_path: Path, before: bytes | None
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["write", "move"])
def test_what_fails_leaves_what_was_there_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def half_written(beside: Path, data: bytes) -> None:
        with beside.open("wb") as file:
            file.write(data[:1])
            raise error

    def refused(*_: Path) -> None:
        raise error

    if place == "write":
        monkeypatch.setattr(Path, "write_bytes", half_written)
    else:
        monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(type(error)):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_path_that_cannot_be_written_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", b"new")
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "file", b"new")
    assert os.listdir(tmp_path) == ["folder"]
