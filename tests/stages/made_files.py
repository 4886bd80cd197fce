"""Model directories in all states: sound, sharded, damaged in a chosen way."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from routing.errors import ModelFormatError
from stages.checkpoint import Checkpoint

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = {
    "embed": torch.arange(60, dtype=torch.float32).reshape(12, 5),
    "norm": torch.linspace(-1, 1, 7, dtype=torch.float64),
    "up": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).to(torch.bfloat16),
    "scale": torch.tensor(1.5, dtype=torch.float16),
}
Entries = dict[str, Any]


def encode(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with the given header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: object = (4,), dtype: object = "U8") -> Entries:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def directory(path: Path, file: bytes, config: bytes = b"{}") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes(config)
    (path / SINGLE).write_bytes(file)
    return path


def sharded(path: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "made"}')
    weight_map = {}
    for shard, tensors in shards.items():
        (path / shard).parent.mkdir(exist_ok=True)
        save_file(tensors, path / shard)
        weight_map.update(dict.fromkeys(tensors, shard))
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def made_single(path: Path) -> Path:
    """WEIGHTS in one file."""
    (path / "config.json").write_text('{"model_type": "made"}')
    save_file(WEIGHTS, path / SINGLE, metadata={"format": "pt"})
    return path


def made_shards(path: Path) -> Path:
    """WEIGHTS in two files and an index."""
    first = {name: WEIGHTS[name] for name in ("embed", "scale")}
    second = {name: WEIGHTS[name] for name in ("norm", "up")}
    return sharded(path, {"a.safetensors": first, "sub/b.safetensors": second})


def refused(path: Path, at: str, *words: str) -> ModelFormatError:
    """Opening fails, blames the file ``at``, says ``words``, and leaves no file open."""
    before = sorted(os.listdir("/dev/fd"))
    with pytest.raises(ModelFormatError) as caught:
        Checkpoint.open(path)
    assert len(os.listdir("/dev/fd")) == len(before)
    assert Path(caught.value.path).name == at
    for word in words:
        assert word in caught.value.problem, caught.value.problem
    return caught.value


# What a mutation may put in the place of anything.
NUMBERS = st.one_of(
    st.integers(-3, 30),
    st.sampled_from([1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, 10**40]),
)
VALUES = st.one_of(
    NUMBERS,
    st.lists(NUMBERS, max_size=4),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "F32", "F16", "BF16", "F64", "BOOL", "F4", "Q4_K", "\ud800"]),
    st.dictionaries(st.sampled_from(["dtype", "x"]), NUMBERS, max_size=2),
)
FUZZ = settings(database=None, deadline=None, max_examples=100)


def open_or_refuse(path: Path, file: str) -> Checkpoint | None:
    """The property of every fuzz test: a checkpoint, or one error that names the file."""
    checkpoint, problem = None, ""
    tracemalloc.start()
    try:
        checkpoint = Checkpoint.open(path)
    except ModelFormatError as error:
        problem = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1_000_000
    assert checkpoint is not None or file in problem
    problem.encode()  # can be printed
    return checkpoint
