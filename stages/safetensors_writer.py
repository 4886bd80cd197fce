"""Writing a checkpoint of safetensors files without ever holding it.

The header comes first in the format, so the sizes of all tensors are settled before the first
byte of any is known; then the tensors follow in order, in pieces of any size. The header is padded
(with spaces, as the format allows) so that the tensors begin at a multiple of 4096 bytes, which
suits direct reads. The stock writer wants all tensors of a file in memory at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Final

import msgspec

ITEMSIZE: Final[dict[str, int]] = {"F16": 2, "BF16": 2, "F32": 4}
SHARD_BYTES: Final = 4 << 30
_ALIGN: Final = 4096


class NewTensor(msgspec.Struct, frozen=True):
    """A tensor about to be written; ``dtype`` is a key of ITEMSIZE."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


def cut_shards(
    tensors: Sequence[NewTensor], limit: int = SHARD_BYTES
) -> list[tuple[NewTensor, ...]]:
    """``tensors`` in order, cut into files of at most ``limit`` bytes (or of one tensor). Pure."""
    shards: list[list[NewTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return [tuple(shard) for shard in shards]


def encode_header(tensors: Sequence[NewTensor]) -> bytes:
    """The head of a file that holds ``tensors`` in this order, up to their first byte. Pure."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


class SafetensorsWriter:
    """Writes ``tensors`` into ``directory``: one file, or shards of ``limit`` bytes and an index.

    Call ``write`` for each piece of the tensors' little-endian bytes in order, then ``finish``.
    As a context manager it closes the file that is open; it removes nothing.
    """

    def __init__(
        self, directory: Path, tensors: Sequence[NewTensor], limit: int = SHARD_BYTES
    ) -> None:
        self._directory = directory
        self._shards = cut_shards(tensors, limit)
        self._number = 0
        self._left = 0
        self._file: IO[bytes] | None = None
        self.written = 0
        self.total = sum(tensor.nbytes for tensor in tensors)

    def write(self, piece: memoryview) -> None:
        """Append ``piece``, which lies within one tensor. Raises OSError as the disk does."""
        if self._left == 0:
            self._next_shard()
        assert self._file is not None
        assert piece.nbytes <= self._left, "more bytes than announced"
        self._file.write(piece)
        self._left -= piece.nbytes
        self.written += piece.nbytes

    def finish(self) -> None:
        """Close the last file and write the index, if there are several."""
        assert self.written == self.total, "fewer bytes than announced"
        self.close()
        if len(self._shards) > 1:
            places = {
                tensor.name: self._name(number)
                for number, shard in enumerate(self._shards, start=1)
                for tensor in shard
            }
            index = {"metadata": {"total_size": self.total}, "weight_map": places}
            path = self._directory / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=1), encoding="utf-8")

    def close(self) -> None:
        """Close the file that is open; a second call does nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _next_shard(self) -> None:
        self.close()
        shard = self._shards[self._number]
        self._number += 1
        self._file = (self._directory / self._name(self._number)).open("xb")
        self._file.write(encode_header(shard))
        self._left = sum(tensor.nbytes for tensor in shard)

    def _name(self, number: int) -> str:
        count = len(self._shards)
        return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
