"""What a drafter finds of a target: a device, rows of keys and values, embedding rows, noise."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from stages.device import CpuDevice
from stages.embedding import Embedding
from stages.kv import KVStore
from stages.loading import OpenedModel
from stages.noise import Noise

EMBEDDING_ROWS = 2048
NOISE_ROWS = 256
"""Rows of noise kept: the same positions are drafted at again and again."""


class TargetRows:
    """A context manager that owns the device and `places` places, whose rows others put in."""

    def __init__(self, opened: OpenedModel, places: int, capacity: int) -> None:
        """`capacity`: the longest text. `opened` stays the caller's."""
        self.opened, self.shape = opened, opened.shape
        self.device = CpuDevice()
        self.noise = Noise(NOISE_ROWS)
        with ExitStack() as undo:
            undo.callback(self.device.close)
            self.kv = KVStore(
                self.device, opened.shape, places=places, capacity=capacity, dtype=opened.dtype
            )
            undo.callback(self.kv.close)
            self.embedding = Embedding(
                opened.checkpoint,
                opened.embedding_name,
                opened.dtype,
                opened.architecture.embed,
                EMBEDDING_ROWS,
            )
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()
