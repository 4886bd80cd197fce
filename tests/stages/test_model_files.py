from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from routing.errors import ModelFormatError, ModelNotFoundError
from stages.checkpoint import Checkpoint
from tests.stages.made_files import (
    FUZZ,
    INDEX,
    SINGLE,
    VALUES,
    WEIGHTS,
    directory,
    encode,
    entry,
    made_shards,
    made_single,
    open_or_refuse,
    refused,
    sharded,
)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return made_single(tmp_path)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return made_shards(tmp_path / "shards")


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="absent"):
        Checkpoint.open(tmp_path / "absent")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "no config.json"),
        (b"not json", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object"),
        (b"\xff{}", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"quantization_config": {"quant_method": "gptq"}}', "already quantized by 'gptq'"),
        (b'{"quantization_config": {}}', "already quantized"),
        (b'{"text_config": {"quantization_config": {"quant_method": "x"}}}', "quantized by 'x'"),
    ],
)
def test_damaged_config(single: Path, config: bytes | None, words: str) -> None:
    if config is None:
        (single / "config.json").unlink()
        assert "no config.json" in str(refused(single, single.name))
        return
    (single / "config.json").write_bytes(config)
    refused(single, "config.json", words)


@pytest.mark.parametrize("config", ['{"quantization_config": null}', '{"limit": [0, Infinity]}'])
def test_sound_config(single: Path, config: str) -> None:
    (single / "config.json").write_text(config)
    Checkpoint.open(single).close()


def test_a_config_without_end(single: Path) -> None:
    os.truncate(single / "config.json", 1 << 40)  # sparse: takes no room on the disk
    refused(single, "config.json", "bytes, expected")


def test_no_weights(single: Path) -> None:
    (single / SINGLE).rename(single / "pytorch_model.bin")
    refused(single, single.name, "neither model.safetensors nor model.safetensors.index.json")


def test_weights_that_are_no_file(single: Path) -> None:
    (single / SINGLE).unlink()
    (single / SINGLE).mkdir()
    refused(single, SINGLE, "not a regular file")
    (single / SINGLE).rmdir()
    os.mkfifo(single / SINGLE)  # must not be waited for
    refused(single, SINGLE, "not a regular file")


def test_a_single_file_goes_before_an_index(shards: Path) -> None:
    save_file({"only": torch.ones(1)}, shards / SINGLE)
    with Checkpoint.open(shards) as checkpoint:
        assert set(checkpoint.tensors) == {"only"}


def test_missing_shard(shards: Path) -> None:
    (shards / "a.safetensors").unlink()
    refused(shards, "a.safetensors", "missing")


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_truncated_shard(shards: Path, kept: int) -> None:
    size = (shards / "sub/b.safetensors").stat().st_size
    os.truncate(shards / "sub/b.safetensors", kept % size)
    refused(shards, "b.safetensors")


def test_shard_without_a_tensor_of_the_index(shards: Path) -> None:
    save_file({"embed": WEIGHTS["embed"]}, shards / "a.safetensors")
    refused(shards, "a.safetensors", "lacks tensor 'scale'")


@pytest.mark.parametrize(
    "shard",
    [
        "../a.safetensors",
        "sub/../../a.safetensors",
        "/etc/a.safetensors",
        "..\\a.safetensors",
        "C:\\a.safetensors",
        "C:a.safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
        "\ud800.safetensors",
        "a" * 5000 + ".safetensors",
        "a.bin",
        "",
        ".",
        7,
        None,
        ["a.safetensors"],
    ],
)
def test_index_with_a_bad_shard_name(tmp_path: Path, shard: object) -> None:
    outside = sharded(tmp_path / "m", {"a.safetensors": {"w": torch.ones(1)}})
    shutil.copy(outside / "a.safetensors", tmp_path / "a.safetensors")
    (outside / INDEX).write_text(json.dumps({"weight_map": {"w": shard}}))
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(ModelFormatError):
        Checkpoint.open(outside)
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {}}', "{"])
def test_damaged_index(shards: Path, index: str) -> None:
    (shards / INDEX).write_text(index)
    refused(shards, INDEX)


def test_index_with_a_name_twice(shards: Path) -> None:
    (shards / INDEX).write_text('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}')
    refused(shards, INDEX, "'w' appears twice")


def test_one_shard_under_two_spellings(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m", {"a.safetensors": WEIGHTS})
    weight_map = {
        name: prefix + "a.safetensors" for name, prefix in zip(WEIGHTS, ("", "./") * 2, strict=True)
    }
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with Checkpoint.open(path) as checkpoint:
        assert set(checkpoint.tensors) == set(WEIGHTS)
        assert len(checkpoint.paths) == 1


def test_links_into_a_store_are_followed(single: Path, tmp_path: Path) -> None:
    store = tmp_path / "blobs"
    store.mkdir()
    (single / SINGLE).rename(store / "0123")
    (single / SINGLE).symlink_to(store / "0123")
    with Checkpoint.open(single) as checkpoint:
        assert torch.equal(checkpoint.read("embed"), WEIGHTS["embed"])


SHARDS = st.sampled_from(["a.safetensors", "./a.safetensors", "absent.safetensors", "../a"])
NAMES = st.sampled_from([*WEIGHTS, "absent"])


@given(index=st.one_of(VALUES, st.dictionaries(NAMES, st.one_of(SHARDS, SHARDS, VALUES))))
@FUZZ
def test_mutated_index(tmp_path_factory: pytest.TempPathFactory, index: object) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-index"
    if not path.exists():
        sharded(path, {"a.safetensors": WEIGHTS})
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    checkpoint = open_or_refuse(path, path.name)
    if checkpoint is not None:
        assert isinstance(index, dict)
        assert set(checkpoint.tensors) == set(index)
        checkpoint.close()


@given(config=st.one_of(st.binary(max_size=30), st.text(alphabet='{}[]":,a1', max_size=30)))
@FUZZ
def test_mutated_config(tmp_path_factory: pytest.TempPathFactory, config: bytes | str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-config"
    if not path.exists():
        directory(path, encode({"a": entry(0, 4)}, bytes(4)))
    text = config if isinstance(config, bytes) else config.encode()
    (path / "config.json").write_bytes(text)
    checkpoint = open_or_refuse(path, "config.json")
    if checkpoint is not None:
        checkpoint.close()
