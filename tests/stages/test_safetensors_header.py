from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from stages.checkpoint import DTYPES, Checkpoint, TensorSpec
from stages.safetensors_header import BITS, HEADER_LIMIT
from tests.stages.made_files import (
    FUZZ,
    SINGLE,
    VALUES,
    Entries,
    directory,
    encode,
    entry,
    open_or_refuse,
    refused,
)

OVER = 1 << 62
TWICE = b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4)).encode(),) * 2)
BAD: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": b"\x02" + bytes(6),
    "no header": encode(b""),
    "no tensors": encode({}),
    "length beyond the file": encode({"a": entry(0, 4)}, bytes(4), length=90_000_000),
    "length beyond all bounds": encode({"a": entry(0, 4)}, bytes(4), length=(1 << 64) - 1),
    "not json": encode(b"{nonsense"),
    "not utf-8": encode(b'{"\xff": 1}'),
    "an array": encode([1]),
    "deep": encode(b'{"a":' + b"[" * 200_000),
    "metadata": encode({"__metadata__": 3, "a": entry(0, 4)}, bytes(4)),
    "metadata of numbers": encode({"__metadata__": {"x": 1}, "a": entry(0, 4)}, bytes(4)),
    "a name twice": encode(TWICE, bytes(4)),
    "a key twice": encode(b'{"a":{"dtype":"U8","dtype":"U8"}}'),
    "a name that is no text": encode(
        b'{"\\ud800":%s}' % json.dumps(entry(0, 4)).encode(), bytes(4)
    ),
    "no object": encode({"a": 7}),
    "nothing said": encode({"a": {}}),
    "negative offset": encode({"a": entry(-4, 0)}, bytes(4)),
    "offsets swapped": encode({"a": entry(4, 0)}, bytes(4)),
    "three offsets": encode({"a": {**entry(0, 4), "data_offsets": [0, 2, 4]}}, bytes(4)),
    "offsets as text": encode({"a": {**entry(0, 4), "data_offsets": "04"}}, bytes(4)),
    "offsets as fractions": encode({"a": entry(0.0, 4.0)}, bytes(4)),  # type: ignore[arg-type]
    "end beyond the file": encode({"a": entry(0, 8, [8])}, bytes(4)),
    "far beyond the file": encode({"a": entry(OVER, OVER + 4)}, bytes(4)),
    "overlap": encode({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)),
    "the same bytes": encode({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)),
    "gap": encode({"a": entry(0, 4), "b": entry(6, 10)}, bytes(10)),
    "gap at the start": encode({"a": entry(2, 6)}, bytes(6)),
    "bytes at the end": encode({"a": entry(0, 4)}, bytes(9)),
    "wrong size": encode({"a": entry(0, 4, [5])}, bytes(4)),
    "wrong size of the dtype": encode({"a": entry(0, 4, [4], "F16")}, bytes(4)),
    "half a byte": encode({"a": entry(0, 1, [1], "F4")}, bytes(1)),
    "zero dimension": encode({"a": entry(0, 0, [0])}),
    "zero among huge": encode({"a": entry(0, 0, [OVER, 0])}),
    "huge dimensions": encode({"a": entry(0, 4, [OVER, OVER])}, bytes(4)),
    "dimensions that wrap to 4": encode({"a": entry(0, 4, [1 << 32, (1 << 32), 4])}, bytes(4)),
    "negative dimensions": encode({"a": entry(0, 4, [-2, -2])}, bytes(4)),
    "true as a dimension": encode({"a": entry(0, 4, [4, True])}, bytes(4)),
    "a number beyond 64 bits": encode({"a": entry(0, 4, [10**30])}, bytes(4)),
    "nine dimensions": encode({"a": entry(0, 4, [4] + [1] * 8)}, bytes(4)),
    "a shape that is a number": encode({"a": entry(0, 4, 4)}, bytes(4)),
    "unknown dtype": encode({"a": entry(0, 4, [4], "Q4")}, bytes(4)),
    "dtype that is no text": encode({"a": entry(0, 4, [4], ["U8"])}, bytes(4)),
}


@pytest.mark.parametrize("file", BAD.values(), ids=BAD.keys())
def test_bad_header(tmp_path: Path, file: bytes) -> None:
    path = directory(tmp_path / "m", file)
    tracemalloc.start()
    try:
        error = refused(path, SINGLE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 + 20 * len(file)
    assert str(error).isascii()
    assert "\n" not in str(error)
    assert len(error.problem) < 400


def test_a_sparse_header_is_not_read(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", struct.pack("<Q", HEADER_LIMIT))
    os.truncate(path / SINGLE, 2 * HEADER_LIMIT)
    tracemalloc.start()
    try:
        refused(path, SINGLE, "does not begin with")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_every_dtype_is_measured(tmp_path: Path) -> None:
    for dtype, bits in BITS.items():
        file = encode({"a": entry(0, bits, [8], dtype)}, bytes(bits))
        safetensors.deserialize(file)  # type: ignore[no-untyped-call]
        with Checkpoint.open(directory(tmp_path / "m", file)) as checkpoint:
            assert set(checkpoint.tensors) == ({"a"} if dtype in DTYPES else set())


GOOD: Entries = {
    "__metadata__": {"format": "pt"},
    "a": entry(0, 16, [2, 2], "F32"),
    "b": entry(16, 22, [3], "BF16"),
    "c": entry(22, 25, [3], "BOOL"),
}
SIZE = 25


CHANGES = ["field", "field", "reshape", "entry", "drop", "rename", "copy"]


@st.composite
def headers(draw: st.DrawFn) -> object:
    """A sound header in which up to three things have been changed."""
    header: Any = json.loads(json.dumps(GOOD))
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.sampled_from(sorted(header) or ["new"]))
        match draw(st.sampled_from(CHANGES)):
            case "field":
                if isinstance(header.get(where), dict):
                    key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]))
                    header[where][key] = draw(VALUES)
            case "reshape":
                if where != "__metadata__" and isinstance(header.get(where), dict):
                    header[where]["shape"] = draw(st.permutations([1, 3, 1]))
            case "entry":
                header[where] = draw(VALUES)
            case "drop":
                header.pop(where, None)
            case "rename":
                header[draw(st.text(max_size=5))] = header.pop(where, None)
            case _:
                header[draw(st.text(max_size=5))] = header.get(where)
    return header


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """The bytes of a file with a changed header, or of a sound one with changed bytes."""
    if draw(st.booleans()):
        none = st.none()
        length = draw(none | none | none | st.integers(0, (1 << 64) - 1) | st.integers(0, 400))
        size = draw(st.sampled_from([SIZE] * 6 + [SIZE - 1, SIZE + 1, 0]))
        return encode(draw(headers()), bytes(size), length)
    file = bytearray(encode(GOOD, bytes(SIZE)))
    for _ in range(draw(st.integers(0, 4))):
        file[draw(st.integers(0, len(file) - 1))] = draw(st.integers(0, 255))
    whole = st.just(len(file))
    return bytes(file[: draw(whole | whole | whole | st.integers(0, len(file)))])


@given(file=files())
@FUZZ
def test_mutated_file(tmp_path_factory: pytest.TempPathFactory, file: bytes) -> None:
    path = directory(tmp_path_factory.getbasetemp() / "fuzzed-file", file)
    checkpoint = open_or_refuse(path, SINGLE)
    event("accepted" if checkpoint else "refused")
    if checkpoint is None:
        return
    with checkpoint:
        # We accept nothing that the reference reader refuses, and read the same bytes out of it.
        reference = dict(safetensors.deserialize(file))  # type: ignore[no-untyped-call]
        for name, spec in checkpoint.tensors.items():
            assert isinstance(spec, TensorSpec)
            assert spec.offset + spec.nbytes <= len(file)
            read = checkpoint.read(name)
            assert tuple(read.shape) == spec.shape == tuple(reference[name]["shape"])
            assert read.reshape(-1).view(torch.uint8).numpy().tobytes() == reference[name]["data"]
        checkpoint.fingerprint()
