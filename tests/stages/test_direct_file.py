from __future__ import annotations

import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest

from routing.errors import LinkError
from stages.direct_file import DirectFile
from stages.pieces import BLOCK

BYTES = random.Random(5).randbytes(5 * BLOCK + 123)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "weights").write_bytes(BYTES)
    return str(tmp_path / "weights")


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, 8 * BLOCK))


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opened(path: str, flags: int, *rest: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", opened)


def test_reads_whole_blocks_and_the_end_of_the_file(path: str, memory: memoryview) -> None:
    file = DirectFile(path)
    assert file.size == len(BYTES)
    file.read_into(memory[: 2 * BLOCK], BLOCK, 2 * BLOCK)
    assert memory[: 2 * BLOCK] == BYTES[BLOCK : 3 * BLOCK]
    file.read_into(memory[: 2 * BLOCK], 4 * BLOCK, BLOCK + 123)
    assert memory[: BLOCK + 123] == BYTES[4 * BLOCK :]
    file.close()
    file.close()


def test_a_file_that_is_too_short_is_named(path: str, memory: memoryview) -> None:
    file = DirectFile(path)
    with pytest.raises(LinkError, match=r"ends at byte 20603, 5 bytes before") as caught:
        file.read_into(memory[: 2 * BLOCK], 4 * BLOCK, BLOCK + 128)
    assert caught.value.path == path
    file.close()


def test_short_reads_go_on(path: str, memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DirectFile(path)
    generator = random.Random(3)
    real = os.preadv
    calls = 0

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        assert offset % BLOCK == 0  # a direct read may not begin inside a block
        got = real(fd, buffers, offset)
        return max(min(got, BLOCK), got - generator.randrange(2 * BLOCK))

    monkeypatch.setattr(os, "preadv", short)
    file.read_into(memory[: 6 * BLOCK], 0, len(BYTES))
    assert memory[: len(BYTES)] == BYTES
    assert calls > 2
    file.close()


def test_a_disk_error_is_named(
    path: str, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DirectFile(path)

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(LinkError, match="Input/output error") as caught:
        file.read_into(memory[:BLOCK], 0, BLOCK)
    assert isinstance(caught.value.__cause__, OSError)
    file.close()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="gone"):
        DirectFile(str(tmp_path / "gone"))


def test_buffered_where_direct_reads_are_refused(
    path: str, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    file = DirectFile(path)
    assert not file.direct
    file.read_into(memory[: 2 * BLOCK], 4 * BLOCK, BLOCK + 123)
    assert memory[: BLOCK + 123] == BYTES[4 * BLOCK :]
    file.close()


def test_direct_reads_refused_at_the_first_read(
    path: str, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not DirectFile(path).direct:
        pytest.skip("no direct reads here")
    real = os.preadv
    refused = False

    def first_fails(*args: Any) -> int:
        nonlocal refused
        if not refused:
            refused = True
            raise OSError(22, "Invalid argument")
        return real(*args)

    monkeypatch.setattr(os, "preadv", first_fails)
    file = DirectFile(path)
    assert refused
    assert not file.direct
    file.read_into(memory[:BLOCK], 0, BLOCK)
    assert memory[:BLOCK] == BYTES[:BLOCK]
    file.close()


def test_systems_without_positioned_reads(
    path: str, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("preadv", "posix_fadvise", "O_DIRECT"):
        monkeypatch.delattr(os, name, raising=False)
    file = DirectFile(path)
    assert not file.direct
    file.read_into(memory[: 6 * BLOCK], 0, len(BYTES))
    assert memory[: len(BYTES)] == BYTES
    with pytest.raises(LinkError, match="ends at byte"):
        file.read_into(memory[: 6 * BLOCK], 0, len(BYTES) + 1)
    file.close()
