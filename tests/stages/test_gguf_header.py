"""Headers of GGUF files: sound ones are read, all others end in one error that names the file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing.errors import ModelFormatError
from stages.gguf_header import GgufHeader, StringArray, content_key, read_gguf_header
from stages.source_file import SourceFile
from tests.stages.made_gguf import MadeGguf


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file that is sound. Not to be changed."""
    directory = tmp_path_factory.mktemp("small")
    made = MadeGguf(directory, "llama", layers=1, vocab=270)
    made.kind = lambda name: Kind.Q8_0
    return made.write(directory / "small.gguf")


def read(path: Path) -> GgufHeader:
    with closing(SourceFile.open(path)) as file:
        return read_gguf_header(file)


def test_truncated_files_are_refused_wherever_they_end(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 8, 23, 24, 100, len(whole) // 50, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
            read(path)


def replaced(small: Path, tmp_path: Path, at: int, value: int, size: int = 8) -> Path:
    data = bytearray(small.read_bytes())
    data[at : at + size] = value.to_bytes(size, "little")
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    return path


def entry_at(small: Path, name: bytes) -> int:
    """Where the number of dimensions of the tensor ``name`` stands."""
    data = small.read_bytes()
    return data.index(len(name).to_bytes(8, "little") + name) + 8 + len(name)


@pytest.mark.parametrize(
    ("at", "value", "size", "problem"),
    [
        (0, 0x46554748, 4, "does not begin"),
        (4, 1, 4, "version 1"),
        (4, 3 << 24, 4, "big-endian"),
        (8, 1 << 60, 8, "claims 1152921504606846976 tensors"),
        (8, 0, 8, "no tensors"),
        (16, 1 << 60, 8, "claims 1152921504606846976 metadata"),
        (24, 1 << 63, 8, "metadata key claims"),
    ],
)
def test_nonsense_at_the_front_is_refused(
    at: int, value: int, size: int, problem: str, small: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelFormatError, match=problem):
        read(replaced(small, tmp_path, at, value, size))


@pytest.mark.parametrize(
    ("shift", "value", "size", "problem"),
    [
        (0, 0, 4, "0 dimensions"),
        (0, 1 << 31, 4, "2147483648 dimensions"),
        (4, 0, 8, "has the shape"),
        (4, 1 << 63, 8, "has the shape"),
        (4, 33, 8, "blocks of 32"),
        (20, 250, 4, "unknown type 250"),
        (24, 1 << 40, 8, "it is truncated"),
        (24, (1 << 64) - 32, 8, "it is truncated"),
        (24, 1, 8, "not aligned"),
    ],
)
def test_nonsense_about_a_tensor_is_refused(
    shift: int, value: int, size: int, problem: str, small: Path, tmp_path: Path
) -> None:
    at = entry_at(small, b"blk.0.attn_q.weight") + shift
    with pytest.raises(ModelFormatError, match=problem):
        read(replaced(small, tmp_path, at, value, size))


def test_tensors_may_not_overlap_nor_share_a_name(small: Path, tmp_path: Path) -> None:
    first = entry_at(small, b"blk.0.attn_q.weight") + 24
    other = entry_at(small, b"blk.0.attn_output.weight") + 24
    offset = int.from_bytes(small.read_bytes()[other : other + 8], "little")
    with pytest.raises(ModelFormatError, match="overlap"):
        read(replaced(small, tmp_path, first, offset))
    data = small.read_bytes().replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight")
    (tmp_path / "twice.gguf").write_bytes(data)
    with pytest.raises(ModelFormatError, match="appears twice"):
        read(tmp_path / "twice.gguf")


@given(tail=st.binary(max_size=200))
@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_bytes_are_a_header_or_an_error(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "any.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + tail)
    with pytest.raises(ModelFormatError):
        read(path)


@given(changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), min_size=1))
@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_changed_header_is_sound_or_an_error(
    changes: list[tuple[float, bytes]], small: Path, tmp_path: Path
) -> None:
    data = bytearray(small.read_bytes())
    end = entry_at(small, b"output_norm.weight") + 64
    for place, new in changes:
        at = int(place * end)
        data[at : at + len(new)] = new
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    try:
        header = read(path)
    except ModelFormatError:
        return
    for tensor in header.tensors.values():
        assert header.data <= tensor.offset
        assert tensor.offset + tensor.nbytes <= len(data)


def test_a_sound_header_is_read(small: Path) -> None:
    header = read(small)
    assert header.architecture == "llama"
    assert header.fields["llama.embedding_length"] == 64
    assert header.fields["tokenizer.ggml.tokens"] == StringArray(270)
    assert header.fields["tokenizer.ggml.add_bos_token"] is False
    query = header.tensors["blk.0.attn_q.weight"]
    assert (query.kind, query.shape, query.nbytes) == (Kind.Q8_0, (64, 64), 64 * 2 * 34)


def test_what_a_file_is_called_does_not_matter_but_its_content_does(
    small: Path, tmp_path: Path
) -> None:
    def key(path: Path) -> str:
        with closing(SourceFile.open(path)) as file:
            return content_key(file, read_gguf_header(file))

    copy = tmp_path / "other name.gguf"
    copy.write_bytes(small.read_bytes())
    assert key(copy) == key(small)
    tensor = read(small).tensors["blk.0.ffn_up.weight"]
    assert key(replaced(small, tmp_path, tensor.offset + tensor.nbytes // 2, 1)) != key(small)
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(small.read_bytes() + bytes(8))
    assert key(longer) != key(small)
