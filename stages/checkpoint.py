"""A model's weights on disk, readable tensor by tensor and row by row.

Opening reads config.json, the index and the headers, and checks all of them; the weights stay where
they are until somebody asks for a byte range of them. Each file is opened once and stays open, so a
model that is replaced by a download while it runs goes on from the files it started with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from routing.errors import ModelFormatError
from stages.model_files import INDEX, find_files
from stages.safetensors_header import TensorSpec, read_header
from stages.source_file import SourceFile
from stages.strict_json import shown

__all__ = ["DTYPES", "Checkpoint", "TensorSpec"]

DTYPES: Final[dict[str, torch.dtype]] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# Part of every fingerprint: raise it when the recipe changes.
_RECIPE: Final = b"paceline weights 1"
_SAMPLES, _SAMPLE_BYTES = 8, 256


class Checkpoint:
    """The tensors of one model directory. Reads may come from any thread.

    ``directory`` is absolute, ``config`` the parsed config.json, ``paths`` the weight files, and
    ``tensors`` the floating-point tensors by name (integer buffers are checked and left out).
    Whoever opened it closes it, when no read is under way; tensors that were read stay valid.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        files: dict[str, SourceFile],
        digests: dict[str, bytes],
        specs: dict[str, TensorSpec],
    ) -> None:
        self.directory = directory
        self.config = config
        self.paths = tuple(Path(path) for path in files)
        self.tensors = {name: spec for name, spec in specs.items() if spec.dtype in DTYPES}
        self._others = {name: spec for name, spec in specs.items() if spec.dtype not in DTYPES}
        self._files = files
        self._digests = digests

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Open the checkpoint in ``directory`` and check every header of it.

        Raises ModelNotFoundError (no such directory) or ModelFormatError naming the file at fault
        (quantized weights included: the fault is config.json's then); no file stays open.
        """
        found = find_files(directory)
        files: dict[str, SourceFile] = {}
        digests: dict[str, bytes] = {}
        specs: dict[str, TensorSpec] = {}
        with ExitStack() as opened:
            for path, wanted in found.shards.items():
                file = SourceFile.open(path)
                opened.callback(file.close)
                header = read_header(file)
                files[str(path)], digests[str(path)] = file, header.digest
                for name in header.tensors if wanted is None else wanted:
                    if name not in header.tensors:
                        raise ModelFormatError(
                            str(path), f"it lacks tensor {shown(name)}, which {INDEX} places in it"
                        )
                    specs[name] = header.tensors[name]
            if not specs:
                raise ModelFormatError(str(path), "it holds no tensors")
            opened.pop_all()
        return cls(directory.absolute(), found.config, files, digests, specs)

    def spec(self, name: str) -> TensorSpec:
        """Where tensor ``name`` lies. Raises ModelFormatError if there is no such float tensor."""
        if name in self.tensors:
            return self.tensors[name]
        if name in self._others:
            other = self._others[name]
            raise ModelFormatError(
                other.path,
                f"tensor {shown(name)} has dtype {other.dtype}, expected one of "
                f"{', '.join(DTYPES)}",
            )
        raise ModelFormatError(
            str(self.directory), f"it has no tensor {shown(name)}, which its config.json calls for"
        )

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor in its own dtype and shape, in new memory."""
        spec = self.spec(name)
        return self._read(spec, spec.offset, spec.shape)

    def read_row_range(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (not included): (stop - start, ...), in new memory.

        Only their bytes are read. Raises IndexError for rows that the tensor does not have.
        """
        spec = self.spec(name)
        row = _row_bytes(spec)
        if not 0 <= start <= stop <= spec.shape[0]:
            raise IndexError(f"rows {start}:{stop} of {name}, which has {spec.shape[0]} rows")
        return self._read(spec, spec.offset + start * row, (stop - start, *spec.shape[1:]))

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """The given rows in the given order: (len(rows), ...), in new memory.

        Rows may repeat. Runs of neighbors are one read. Raises IndexError as above.
        """
        spec = self.spec(name)
        row = _row_bytes(spec)
        for index in rows:
            if not 0 <= index < spec.shape[0]:
                raise IndexError(f"row {index} of {name}, which has {spec.shape[0]} rows")
        buffer, view = _bytes(len(rows) * row)
        first = 0
        for last in range(1, len(rows) + 1):
            if last < len(rows) and rows[last] == rows[last - 1] + 1:
                continue
            piece = view[first * row : last * row]
            self._files[spec.path].read_into(piece, spec.offset + rows[first] * row)
            first = last
        return buffer.view(DTYPES[spec.dtype]).reshape(len(rows), *spec.shape[1:])

    def fingerprint(self) -> str:
        """A key for the weights' content: 32 hexadecimal digits, the same wherever they lie.

        BLAKE2b over, for each weight file by order of name: its size, its header, and of each
        tensor used eight pieces of 256 bytes spread evenly over it, both ends included (all of it
        where that is less). File names, dates and config.json do not enter. Training touches every
        weight and so changes the key; a hand edit of a few bytes inside one tensor may not.
        """
        digest = hashlib.blake2b(_RECIPE, digest_size=16)
        for path, file in self._files.items():
            digest.update(file.size.to_bytes(8, "little"))
            digest.update(self._digests[path])
        specs = (*self.tensors.values(), *self._others.values())
        place = {path: number for number, path in enumerate(self._files)}
        for spec in sorted(specs, key=lambda spec: (place[spec.path], spec.offset)):
            for offset, nbytes in _samples(spec):
                digest.update(self._files[spec.path].read(offset, nbytes))
        return digest.hexdigest()

    def close(self) -> None:
        """Close the files; a second call does nothing. Reading afterwards is a ValueError."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, spec: TensorSpec, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        nbytes = DTYPES[spec.dtype].itemsize
        for size in shape:
            nbytes *= size
        buffer, view = _bytes(nbytes)
        self._files[spec.path].read_into(view, offset)
        return buffer.view(DTYPES[spec.dtype]).reshape(shape)


def _bytes(nbytes: int) -> tuple[torch.Tensor, memoryview]:
    """New memory as a tensor of bytes, and the same memory to read into."""
    buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    array: Any = buffer.numpy()
    return buffer, memoryview(array)


def _row_bytes(spec: TensorSpec) -> int:
    if not spec.shape:
        raise IndexError(f"{spec.name} is a single number and has no rows")
    return spec.nbytes // spec.shape[0]


def _samples(spec: TensorSpec) -> list[tuple[int, int]]:
    """Offset and size of the pieces that stand for a tensor in the fingerprint."""
    spread = spec.nbytes - _SAMPLE_BYTES
    if spec.nbytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(spec.offset, spec.nbytes)]
    return [(spec.offset + i * spread // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)]
