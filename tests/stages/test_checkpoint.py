from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from routing.errors import LinkError, ModelFormatError
from stages.checkpoint import DTYPES, Checkpoint
from tests.stages.made_files import (
    SINGLE,
    WEIGHTS,
    directory,
    encode,
    entry,
    made_shards,
    made_single,
)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return made_single(tmp_path)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return made_shards(tmp_path / "shards")


@pytest.mark.parametrize("layout", ["single", "shards"])
def test_reads_what_was_written(layout: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(layout)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.config == {"model_type": "made"}
        assert set(checkpoint.tensors) == set(WEIGHTS)
        for name, weight in WEIGHTS.items():
            read, spec = checkpoint.read(name), checkpoint.spec(name)
            assert torch.equal(read, weight)
            assert (read.dtype, read.shape) == (weight.dtype, weight.shape)
            assert (DTYPES[spec.dtype], spec.shape) == (weight.dtype, tuple(weight.shape))
            raw = Path(spec.path).read_bytes()[spec.offset : spec.offset + spec.nbytes]
            assert raw == weight.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert {Path(spec.path) for spec in checkpoint.tensors.values()} == set(checkpoint.paths)


@given(rows=st.lists(st.integers(0, 11), max_size=20), bounds=st.tuples(*[st.integers(0, 12)] * 2))
@settings(
    database=None,
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_rows_are_the_rows_asked_for(single: Path, rows: list[int], bounds: Any) -> None:
    start, stop = sorted(bounds)
    with Checkpoint.open(single) as checkpoint:
        assert torch.equal(checkpoint.read_rows("embed", rows), WEIGHTS["embed"][rows])
        assert torch.equal(
            checkpoint.read_row_range("embed", start, stop), WEIGHTS["embed"][start:stop]
        )


def test_rows_read_no_other_bytes(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        reads.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return preadv(fd, buffers, offset)

    with Checkpoint.open(single) as checkpoint:
        monkeypatch.setattr(os, "preadv", counted)
        checkpoint.read_rows("embed", [3, 4, 5, 9, 9])
        checkpoint.read_row_range("up", 1, 2)
    assert reads == [60, 20, 20, 24]


def test_rows_that_do_not_exist(single: Path) -> None:
    with Checkpoint.open(single) as checkpoint:
        for rows in ([12], [-1], [0, 99]):
            with pytest.raises(IndexError, match="12 rows"):
                checkpoint.read_rows("embed", rows)
        for start, stop in ((0, 13), (-1, 2), (3, 2)):
            with pytest.raises(IndexError, match="12 rows"):
                checkpoint.read_row_range("embed", start, stop)
        with pytest.raises(IndexError, match="no rows"):
            checkpoint.read_rows("scale", [0])


def test_tensors_without_a_float_dtype_are_not_weights(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", b"")
    save_file({"ids": torch.arange(3), "w": torch.ones(2, 2)}, path / SINGLE)
    with Checkpoint.open(path) as checkpoint:
        assert set(checkpoint.tensors) == {"w"}
        with pytest.raises(ModelFormatError, match="dtype I64"):
            checkpoint.read("ids")
        with pytest.raises(ModelFormatError, match="no tensor 'absent'"):
            checkpoint.read("absent")


def test_short_reads_are_completed(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: preadv(fd, [bufs[0][:3]], at))
    with Checkpoint.open(single) as checkpoint:
        assert torch.equal(checkpoint.read("embed"), WEIGHTS["embed"])


def test_large_reads_are_whole(tmp_path: Path) -> None:
    weight = torch.randn(1200, 512, generator=torch.Generator().manual_seed(0))
    path = directory(tmp_path / "m", b"")
    save_file({"w": weight}, path / SINGLE)
    with Checkpoint.open(path) as checkpoint:
        assert torch.equal(checkpoint.read("w"), weight)
        assert torch.equal(checkpoint.read_row_range("w", 100, 1100), weight[100:1100])


def test_a_disk_that_fails_is_a_link_error(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    with Checkpoint.open(single) as checkpoint:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(LinkError, match=r"model\.safetensors.*Input/output"):
            checkpoint.read("embed")


def test_a_file_cut_while_open_is_a_link_error(single: Path) -> None:
    with Checkpoint.open(single) as checkpoint:
        os.truncate(single / SINGLE, 100)
        with pytest.raises(LinkError, match="ends at byte"):
            checkpoint.read("up")


def test_a_file_replaced_while_open_stays_the_old_one(single: Path) -> None:
    with Checkpoint.open(single) as checkpoint:
        (single / "new").write_bytes(b"something else")
        os.replace(single / "new", single / SINGLE)
        assert torch.equal(checkpoint.read("norm"), WEIGHTS["norm"])


def test_threads_read_at_once(shards: Path) -> None:
    with Checkpoint.open(shards) as checkpoint, ThreadPoolExecutor(4) as pool:
        names = [name for _ in range(20) for name in WEIGHTS]
        for name, read in zip(names, pool.map(checkpoint.read, names), strict=True):
            assert torch.equal(read, WEIGHTS[name])


def test_close_gives_the_files_back(shards: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    checkpoint = Checkpoint.open(shards)
    read = checkpoint.read("up")
    assert len(os.listdir("/dev/fd")) == before + 2
    checkpoint.close()
    checkpoint.close()
    assert len(os.listdir("/dev/fd")) == before
    assert torch.equal(read, WEIGHTS["up"])
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("up")


def test_specs_are_absolute(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(single)
    with Checkpoint.open(Path()) as checkpoint:
        assert all(Path(spec.path).is_absolute() for spec in checkpoint.tensors.values())
        assert checkpoint.directory == single


def test_fingerprint_is_of_the_content(single: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other") / "moved"
    shutil.copytree(single, other)
    (other / "config.json").write_text('{"another": true}')
    with Checkpoint.open(single) as one, Checkpoint.open(other) as two:
        assert one.fingerprint() == one.fingerprint() == two.fingerprint()
        assert len(one.fingerprint()) == 32


def test_fingerprint_recipe_does_not_drift(tmp_path: Path) -> None:
    # Caches on users' disks are keyed by it: change it only together with the recipe's number.
    path = directory(tmp_path / "m", encode({"a": entry(0, 16, [4], "F32")}, bytes(range(16))))
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.fingerprint() == "98415dad898feb803fc204a6cf5ea37e"


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("name", list(WEIGHTS))
def test_fingerprint_sees_a_changed_weight(single: Path, name: str, at: int) -> None:
    with Checkpoint.open(single) as checkpoint:
        before = checkpoint.fingerprint()
    changed = {key: weight.clone() for key, weight in WEIGHTS.items()}
    changed[name].view(-1)[at] += 1
    save_file(changed, single / SINGLE, metadata={"format": "pt"})
    with Checkpoint.open(single) as checkpoint:
        assert checkpoint.fingerprint() != before


def test_fingerprint_sees_training_and_names(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator)
    keys = set()
    for tensors in (
        {"w": weight},
        {"v": weight},
        {"w": weight * 1.001},
        {"w": weight.view(32, 128)},
    ):
        path = directory(tmp_path / "m", b"")
        save_file(tensors, path / SINGLE)
        with Checkpoint.open(path) as checkpoint:
            keys.add(checkpoint.fingerprint())
    assert len(keys) == 4
