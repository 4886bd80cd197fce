"""A model opened but not loaded: its files, its config, its sizes. Headers are all that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.architectures import Architecture, check_supported, load_config
from stages.checkpoint import Checkpoint
from stages.codec import DTYPES
from stages.rope import Rope, read_rope
from stages.shapes import ModelShape
from stages.skeleton import Skeleton, describe


class OpenedModel:
    """What a plan and a runtime start from. `close` it; skeletons and shapes stay valid."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelNotFoundError, ModelFormatError or UnsupportedModelError; leaves nothing."""
        self.directory = directory
        self.config: Any = load_config(directory)
        self.architecture: Architecture = check_supported(self.config)
        self.checkpoint = Checkpoint.open(directory)
        try:
            names = self.checkpoint.tensors
            head = self.checkpoint.spec(self.architecture.head_name(names))
            self.dtype = compute_dtype(head.dtype)
            self.rope: Rope = read_rope(self.config, self.architecture)
            self.shape: ModelShape = describe(self.skeleton(), self.checkpoint, self.dtype.itemsize)
        except BaseException:
            self.checkpoint.close()
            raise

    def skeleton(self) -> Skeleton:
        """A new skeleton with nothing bound."""
        return Skeleton(self.config, self.architecture, self.dtype)

    @property
    def embedding_name(self) -> str:
        """The tensor that embedding rows are read from."""
        return self.architecture.embedding_name(self.checkpoint.tensors)

    @property
    def paths(self) -> list[str]:
        """The weight files."""
        return [str(path) for path in self.checkpoint.paths]

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.close()


def compute_dtype(source: str) -> torch.dtype:
    """What the CPU computes in: float64 for float64 sources, else float32.

    Two AVX2 cores do 32 rows three times faster in float32 than in bfloat16.
    """
    return torch.float64 if DTYPES[source] is torch.float64 else torch.float32
