"""The header of a GGUF file: magic, version, counts, metadata, then a table of tensors.

The readers that exist trust it: a wrong count makes them loop or allocate for as long as it says,
and a wrong offset reads outside the file. So the header is read here first, and nothing in it is
believed before it has been checked against the size of the file; no number out of it decides an
allocation. What passes can be given to the other readers. Only little-endian files of versions 2
and 3 are read; nothing has been written in the others for years.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from routing.errors import LinkError, ModelFormatError
from stages.source_file import SourceFile
from stages.strict_json import shown

_HEADER_LIMIT: Final = 256 << 20  # bytes; the largest vocabularies take some 20 MiB
_COUNT_LIMIT: Final = 1 << 16  # tensors, metadata fields
_ELEMENT_LIMIT: Final = 1 << 22  # array elements in all; vocabularies and merges reach a million
_NAME_LIMIT: Final = 1 << 10
_STRING_LIMIT: Final = 16 << 20
_RANK_LIMIT: Final = 4
_ALIGNMENT_LIMIT: Final = 1 << 20
_SAMPLE: Final = 4096

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
# The types of fixed size by their number in the file; the two others follow.
_CODES: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_CODES_64: Final = {10: "Q", 11: "q", 12: "d"}
_SCALARS: Final = {kind: struct.Struct("<" + code) for kind, code in (_CODES | _CODES_64).items()}
_STRING: Final = 8
_ARRAY: Final = 9


class StringArray(msgspec.Struct, frozen=True):
    """An array of strings (a vocabulary, merges): only their number is kept."""

    count: int


Value: TypeAlias = int | float | bool | str | tuple[int | float | bool, ...] | StringArray


class GgufTensor(msgspec.Struct, frozen=True):
    """Where one tensor lies. ``shape`` is in torch's order, rows first; the rest are bytes."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufHeader(msgspec.Struct, frozen=True):
    """What a file says about itself, checked; ``data`` is where the tensors' bytes begin."""

    path: Path
    fields: dict[str, Value]
    tensors: dict[str, GgufTensor]
    data: int

    @property
    def architecture(self) -> str:
        """``general.architecture``, as llama.cpp names it."""
        value = self.fields["general.architecture"]
        assert isinstance(value, str)
        return value


def read_gguf_header(file: SourceFile) -> GgufHeader:
    """Read and check the header of ``file``; the tensors themselves are not read.

    Raises ModelFormatError naming the file for a header that is damaged, lies, or does not fit
    the file (which is then truncated).
    """
    try:
        return _Parser(file).parse()
    except LinkError as error:
        raise ModelFormatError(str(file.path), error.problem) from error


def content_key(file: SourceFile, header: GgufHeader) -> str:
    """32 hexadecimal digits that stand for the file's content, wherever it lies and is called.

    It digests the size, the whole header, and the middle 4 KiB of each tensor: reading a large
    file whole would take longer than using it. Two files collide only if they agree in all of
    that, which an edit of single weights could achieve and no other quantization or training does.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(_U64.pack(file.size))
    digest.update(file.read(0, header.data))
    for tensor in header.tensors.values():
        sample = min(_SAMPLE, tensor.nbytes)
        digest.update(file.read(tensor.offset + (tensor.nbytes - sample) // 2, sample))
    return digest.hexdigest()


class _Parser:
    """Reads from the front; ``_take`` is the only way to bytes, and checks that they exist."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._limit = min(file.size, _HEADER_LIMIT)
        self._at = 0
        self._window = b""
        self._window_at = 0
        self._elements = 0

    def parse(self) -> GgufHeader:
        if self._file.size < 24 or self._take(4) != b"GGUF":
            raise self._wrong("it does not begin as GGUF files do")
        version = self._u32()
        if version not in (2, 3):
            hint = " (big-endian?)" if version & 0xFFFF == 0 else ""
            raise self._wrong(f"it is GGUF version {version}{hint}, expected 2 or 3")
        tensor_count, field_count = self._u64(), self._u64()
        if tensor_count == 0:
            raise self._wrong("it holds no tensors")
        # The shortest field takes 13 bytes, the shortest tensor entry 32.
        self._check_count("tensors", tensor_count, 32)
        self._check_count("metadata fields", field_count, 13)
        fields: dict[str, Value] = {}
        for _ in range(field_count):
            key = self._text("a metadata key", _NAME_LIMIT)
            if key in fields:
                raise self._wrong(f"the metadata field {shown(key)} appears twice")
            fields[key] = self._value(key, self._u32())
        alignment = self._alignment(fields)
        entries = [self._entry() for _ in range(tensor_count)]
        data = self._at + -self._at % alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self._wrong(f"tensor {shown(name)} appears twice")
            tensors[name] = self._tensor(name, shape, kind, offset, data, alignment)
        self._check_overlaps(tensors.values())
        return GgufHeader(self._file.path, fields, tensors, data)

    def _wrong(self, problem: str) -> ModelFormatError:
        return ModelFormatError(str(self._file.path), problem)

    def _take(self, nbytes: int) -> bytes:
        """The next ``nbytes`` bytes, which are asked for only after their number was checked."""
        end = self._at + nbytes
        if end > self._limit:
            raise self._wrong(
                f"its header runs past byte {self._limit}; it is truncated or damaged"
            )
        if end > self._window_at + len(self._window):
            self._window_at = self._at
            self._window = self._file.read(self._at, min(max(nbytes, 1 << 20), self._left()))
        begin = self._at - self._window_at
        self._at = end
        return self._window[begin : begin + nbytes]

    def _left(self) -> int:
        return self._limit - self._at

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def _check_count(self, what: str, count: int, least: int) -> None:
        if count > _COUNT_LIMIT or count * least > self._left():
            raise self._wrong(f"it claims {count} {what}, more than it can hold")

    def _text(self, what: str, limit: int) -> str:
        length = self._u64()
        if length > limit:
            raise self._wrong(f"{what} claims {length} bytes, expected {limit} at most")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"{what} is not UTF-8 text") from None

    def _value(self, key: str, kind: int) -> Value:
        if kind in _SCALARS:
            return self._scalars(kind, 1)[0]
        if kind == _STRING:
            return self._text(f"the metadata field {shown(key)}", _STRING_LIMIT)
        if kind == _ARRAY:
            return self._array(key, self._u32(), self._u64())
        raise self._wrong(f"the metadata field {shown(key)} has the unknown type {kind}")

    def _scalars(self, kind: int, count: int) -> tuple[int | float | bool, ...]:
        item = _SCALARS[kind]
        return tuple(value for (value,) in item.iter_unpack(self._take(count * item.size)))

    def _array(self, key: str, kind: int, count: int) -> Value:
        self._elements += count
        if self._elements > _ELEMENT_LIMIT:
            raise self._wrong(f"the metadata field {shown(key)} claims {count} elements")
        if kind in _SCALARS:
            return self._scalars(kind, count)
        if kind != _STRING:
            raise self._wrong(f"the metadata field {shown(key)} is an array of type {kind}")
        for _ in range(count):
            self._text(f"an element of {shown(key)}", _STRING_LIMIT)
        return StringArray(count)

    def _alignment(self, fields: dict[str, Value]) -> int:
        architecture = fields.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise self._wrong("it does not name its architecture (general.architecture)")
        alignment = fields.get("general.alignment", 32)
        if (
            type(alignment) is not int
            or not 0 < alignment <= _ALIGNMENT_LIMIT
            or alignment & (alignment - 1)
        ):
            raise self._wrong(
                f"its alignment is {ascii(alignment)[:80]}, expected a power of two up to "
                f"{_ALIGNMENT_LIMIT}"
            )
        return alignment

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor's name", _NAME_LIMIT)
        rank = self._u32()
        if not 0 < rank <= _RANK_LIMIT:
            raise self._wrong(
                f"tensor {shown(name)} has {rank} dimensions, expected 1 to {_RANK_LIMIT}"
            )
        # The file has the fastest dimension first.
        shape = tuple(self._u64() for _ in range(rank))[::-1]
        return name, shape, self._u32(), self._u64()

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, data: int, alignment: int
    ) -> GgufTensor:
        try:
            quantization = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError):
            raise self._wrong(f"tensor {shown(name)} has the unknown type {kind}") from None
        if min(shape) < 1 or prod(shape) > 8 * self._file.size or shape[-1] % block:
            raise self._wrong(
                f"tensor {shown(name)} has the shape {shape}, which cannot be in blocks of {block} "
                f"({quantization.name}) in a file of {self._file.size} bytes"
            )
        nbytes = prod(shape) // block * block_bytes
        if offset % alignment:
            raise self._wrong(f"tensor {shown(name)} is not aligned to {alignment} bytes")
        if data + offset + nbytes > self._file.size:
            raise self._wrong(
                f"tensor {shown(name)} ends at byte {data + offset + nbytes}, but the file has "
                f"{self._file.size} bytes; it is truncated"
            )
        return GgufTensor(name, quantization, shape, data + offset, nbytes)

    def _check_overlaps(self, tensors: Iterable[GgufTensor]) -> None:
        reached, before = 0, ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < reached:
                raise self._wrong(f"tensors {shown(before)} and {shown(tensor.name)} overlap")
            reached, before = tensor.offset + tensor.nbytes, tensor.name
