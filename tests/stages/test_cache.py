"""Cached directories appear whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from routing.errors import DiskFullError, OptionError
from stages import cache
from stages.cache import atomic_directory, cache_dir

ROOT = Path(__file__).parents[2]


def test_the_environment_says_where_the_cache_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b"
    assert cache_dir().is_dir()


@pytest.mark.skipif(sys.platform != "linux", reason="XDG is Linux's convention")
def test_else_it_is_where_the_system_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "paceline"


def test_a_cache_that_cannot_be_made_is_an_option_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OptionError, match="PACELINE_CACHE"):
        cache_dir()


def test_a_directory_appears_when_it_is_complete(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "final"
    with atomic_directory(final, needed=10) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_text("whole")
        assert not final.exists()
    assert (final / "sub" / "file").read_text() == "whole"
    assert [path.name for path in final.iterdir()] == ["sub"]
    assert [path.name for path in final.parent.iterdir()] == ["final"]


def write_half(final: Path, error: BaseException) -> None:
    """Begin a directory, and fail."""
    with atomic_directory(final) as directory:
        (directory / "file").write_text("half")
        raise error


@pytest.mark.parametrize(
    "error", [ValueError(), KeyboardInterrupt(), SystemExit(), GeneratorExit()]
)
def test_whatever_is_raised_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        write_half(tmp_path / "final", error)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda path: 99)
    with (
        pytest.raises(DiskFullError, match="final needs 1 MiB") as caught,
        atomic_directory(tmp_path / "final", needed=100),
    ):
        raise AssertionError("the block must not run")
    assert (caught.value.needed, caught.value.free) == (100, 99)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_as_such_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    with pytest.raises(DiskFullError):
        write_half(tmp_path / "final", OSError(number, os.strerror(number)))
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_the_system_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), atomic_directory(tmp_path / "final"):
        raise PermissionError(errno.EACCES, "no")


def test_the_first_of_two_writers_wins(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with atomic_directory(final) as slow:
        (slow / "file").write_text("second")
        with atomic_directory(final) as quick:
            (quick / "file").write_text("first")
    assert (final / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [final]


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    final = tmp_path / "final [1]*"  # letters that mean something in a pattern
    with atomic_directory(final) as first:
        (first / "file").touch()
        with pytest.raises(ZeroDivisionError), atomic_directory(final):
            raise ZeroDivisionError
        assert (first / "file").exists()
    assert (final / "file").exists()


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    final = tmp_path / "final"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom stages.cache import atomic_directory\n"
        "with atomic_directory(Path(sys.argv[1])) as directory:\n"
        "    (directory / 'file').touch()\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(final)], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 1
    with atomic_directory(final) as directory:
        (directory / "other").touch()
    assert list(tmp_path.iterdir()) == [final]
    assert [path.name for path in final.iterdir()] == ["other"]
