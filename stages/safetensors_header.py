"""The header of a safetensors file: 8 bytes of length (little-endian), JSON, then the tensors.

Nothing in a header is believed before it has been checked against the size of the file, and no
number out of it decides an allocation. We hold to the format's own rules, so that whatever is
accepted here the reference reader accepts too: every data byte belongs to exactly one tensor.
Beyond them, a tensor without elements is refused: no weight is empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeGuard

import msgspec

from routing.errors import ModelFormatError
from stages.source_file import SourceFile
from stages.strict_json import parse_object, shown

HEADER_LIMIT: Final = 100_000_000  # bytes; the reference reader's own bound
RANK_LIMIT: Final = 8
_FIELDS: Final = {"dtype", "shape", "data_offsets"}
# Every element type of the format, in bits: a type that we never compute with must still be
# measured, or the tensors beside it cannot be trusted.
BITS: Final[dict[str, int]] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor lies. ``offset`` and ``nbytes`` are bytes of the file ``path``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int
    nbytes: int


class Header(msgspec.Struct, frozen=True):
    """What a file says about itself: its tensors by name, and a digest of the header's bytes."""

    tensors: dict[str, TensorSpec]
    digest: bytes


def read_header(file: SourceFile) -> Header:
    """Read and check the header of ``file``; the tensors themselves are not read.

    Raises ModelFormatError naming the file for a header that is damaged, lies, or does not fit
    the file (which is then truncated or has grown).
    """
    path = file.path
    if file.size < 8:
        raise ModelFormatError(
            str(path), f"it has {file.size} bytes, too few for a safetensors file"
        )
    length = int.from_bytes(file.read(0, 8), "little")
    if length > HEADER_LIMIT:
        raise ModelFormatError(
            str(path),
            f"its header claims {length} bytes, expected {HEADER_LIMIT} at most; "
            "it is damaged or no safetensors file",
        )
    if length > file.size - 8:
        raise ModelFormatError(
            str(path),
            f"its header claims {length} bytes, but the file ends after {file.size - 8} of them; "
            "it is truncated or no safetensors file",
        )
    if length == 0 or file.read(8, 1) != b"{":
        raise ModelFormatError(str(path), "its header does not begin with '{', as in safetensors")
    text = file.read(8, length)
    return Header(parse_header(text, path, file.size), hashlib.blake2b(text).digest())


def parse_header(text: bytes, path: Path, size: int) -> dict[str, TensorSpec]:
    """The tensors that the header ``text`` of a file of ``size`` bytes describes. Pure."""
    entries = parse_object(text, path)
    _check_metadata(entries.pop("__metadata__", {}), path)
    start = 8 + len(text)
    specs = {name: _spec(name, entry, path, start, size) for name, entry in entries.items()}
    _check_cover(specs.values(), path, start, size)
    return specs


def _check_metadata(metadata: object, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) and _is_text(key) and _is_text(value)
        for key, value in metadata.items()
    ):
        raise ModelFormatError(str(path), "its __metadata__ is not a table of strings")


def _is_text(value: str) -> bool:
    """Whether ``value`` can be written as UTF-8: JSON can spell half of a surrogate pair."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _spec(name: str, entry: object, path: Path, start: int, size: int) -> TensorSpec:
    """Check one entry of the header by itself."""

    def wrong(problem: str) -> ModelFormatError:
        return ModelFormatError(str(path), f"tensor {shown(name)} {problem}")

    if not _is_text(name):
        raise wrong("has a name that is not Unicode text")
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise wrong("is not described by exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise wrong(f"has the unknown dtype {ascii(dtype)[:80]}")
    if not _is_sizes(shape) or len(shape) > RANK_LIMIT or 0 in shape:
        raise wrong(
            f"has the shape {ascii(shape)[:80]}, expected up to {RANK_LIMIT} positive sizes"
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"has the offsets {ascii(offsets)[:80]}, expected its first byte and its end")
    begin, end = offsets
    if end > size - start:
        raise wrong(f"ends at byte {start + end}, but the file has {size} bytes; it is truncated")
    bits = BITS[dtype]
    for count in shape:
        bits *= count
        if bits > 8 * size:  # stop before the product of nonsense grows any further
            break
    if bits != 8 * (end - begin):
        raise wrong(f"has {end - begin} bytes, which is not the size of {dtype} {shape}")
    return TensorSpec(name, dtype, tuple(shape), str(path), start + begin, end - begin)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of unsigned 64-bit integers (``True`` is none)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 64 for n in value)


def _check_cover(specs: Iterable[TensorSpec], path: Path, start: int, size: int) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    reached, before = start, "the header"
    for spec in sorted(specs, key=lambda spec: spec.offset):
        if spec.offset != reached:
            how = "overlaps" if spec.offset < reached else "leaves a gap after"
            raise ModelFormatError(str(path), f"tensor {shown(spec.name)} {how} {before}")
        reached, before = spec.offset + spec.nbytes, shown(spec.name)
    if reached != size:
        raise ModelFormatError(str(path), f"its last {size - reached} bytes belong to no tensor")
