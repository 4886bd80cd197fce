"""The keys and values of every session: who stands where, what counts, what is scratch.

A place holds one session. Its rows are one block of `capacity` rows a layer: rows below
`committed(place)` are the target's own keys and values, rows from there on are the
verifier's scratch. A sweep writes the rows of a tree (or of a prompt) into that scratch in
node order, and attends to the whole run [0, committed + rows) without copying it together.
`commit` then moves the accepted scratch rows down, and only those. Nothing a substitute
computed ever gets in here: the drafter has scratch of its own (`DraftScratch`), so it may read
committed rows while a sweep writes beside them.

Only the verifier writes scratch, only the committer commits and resets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stages.device import Buffer, Device
from stages.shapes import ModelShape


class KVStore:
    """Target keys and values for `places` sessions of at most `capacity` rows each.

    The memory is taken at construction (`places` blocks of `place_bytes`) and given back by
    `close`; raises DeviceMemoryError when the device has less. Pages are touched only as rows
    are written.
    """

    def __init__(
        self,
        device: Device,
        shape: ModelShape,
        *,
        places: int,
        capacity: int,
        dtype: torch.dtype,
        poison: bool = False,
    ) -> None:
        self.capacity = capacity
        self._poison = poison
        self._size = (len(shape.layers), 2, shape.kv_heads, capacity, shape.head_dim)
        nbytes = math.prod(self._size) * dtype.itemsize
        self._buffers: list[Buffer] = []
        try:
            for _ in range(places):
                self._buffers.append(device.allocate(nbytes, "kv"))
        except BaseException:
            self._free()
            raise
        # (layers, keys and values, kv_heads, capacity, head_dim) a place
        self._blocks = [buffer.tensor(dtype, self._size, 0) for buffer in self._buffers]
        self._committed = [0] * places
        if poison:
            for block in self._blocks:
                block.fill_(math.nan)

    def committed(self, place: int) -> int:
        """Rows of `place` that count: each is the target's for one token of the session."""
        return self._committed[place]

    def write(
        self, place: int, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put keys and values, each (kv_heads, rows, head_dim), into scratch from `row` on.

        `row` counts from the first scratch row. Changes no committed row.
        """
        start = self._committed[place] + row
        stop = start + keys.shape[1]
        if stop > self.capacity:
            raise AssertionError(f"KV rows {start}..{stop} pass the capacity {self.capacity}")
        block = self._blocks[place][layer]
        block[0, :, start:stop] = keys
        block[1, :, start:stop] = values

    def view(self, place: int, layer: int, scratch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (kv_heads, committed + scratch, head_dim) of one layer, not copied.

        Safe until the place's next `commit` or `reset`.
        """
        stop = self._committed[place] + scratch
        block = self._blocks[place][layer]
        return block[0, :, :stop], block[1, :, :stop]

    def first(self, place: int, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (kv_heads, rows, head_dim) of the first `rows` rows, not copied.

        For the drafter, which may run while more rows are committed behind those it looks at.
        """
        block = self._blocks[place][layer]
        return block[0, :, :rows], block[1, :, :rows]

    def block(self, place: int) -> torch.Tensor:
        """All of a place's memory, (layers, keys and values, kv_heads, capacity, head_dim).

        To be read only, and only its committed rows.
        """
        return self._blocks[place]

    def commit(self, place: int, path: Sequence[int]) -> None:
        """Keep the scratch rows `path` (rising), in order; the rest of the scratch is void.

        Copies accepted rows only, and counts them after the last copy: a failure in between
        leaves the committed rows as they were.
        """
        start = self._committed[place]
        count = len(path)
        sound = list(path) == sorted(set(path)) and (not count or path[0] >= 0)
        if not sound or (count and start + path[-1] >= self.capacity):
            raise AssertionError(f"commit of rows {path} at {start} in {self.capacity}")
        stay = 0
        while stay < count and path[stay] == stay:
            stay += 1
        block = self._blocks[place]
        if stay < count:
            rows = torch.tensor([start + row for row in path[stay:]])
            block[:, :, :, start + stay : start + count] = block.index_select(3, rows)
        self._committed[place] = start + count
        if self._poison:
            block[:, :, :, start + count :] = math.nan

    def reset(self, place: int) -> None:
        """Forget every row of `place`; another session may have it."""
        self._committed[place] = 0
        if self._poison:
            self._blocks[place].fill_(math.nan)

    def check(self) -> None:
        """Assert conservation: every place within its capacity."""
        assert all(0 <= rows <= self.capacity for rows in self._committed), self._committed

    @property
    def rows_held(self) -> int:
        """Committed rows over all places."""
        return sum(self._committed)

    def close(self) -> None:
        """Give the memory back. No view may be used afterwards."""
        self._blocks.clear()
        self._committed = [0] * len(self._committed)
        self._free()

    def _free(self) -> None:
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()


class DraftScratch:
    """The drafter's own keys and values: (kv_heads, rows, head_dim) a layer, one row a node."""

    def __init__(self, device: Device, shape: ModelShape, *, rows: int, dtype: torch.dtype) -> None:
        size = (len(shape.layers), 2, shape.kv_heads, rows, shape.head_dim)
        self._buffer = device.allocate(math.prod(size) * dtype.itemsize, "draft scratch")
        self._block = self._buffer.tensor(dtype, size, 0)
        self.rows = rows

    def write(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values of nodes `row` and on, each (kv_heads, rows, head_dim)."""
        stop = row + keys.shape[1]
        if stop > self.rows:
            raise AssertionError(f"draft rows {row}..{stop} pass the {self.rows} there are")
        block = self._block[layer]
        block[0, :, row:stop] = keys
        block[1, :, row:stop] = values

    @property
    def block(self) -> torch.Tensor:
        """All of it, (layers, keys and values, kv_heads, rows, head_dim)."""
        return self._block

    def view(self, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (kv_heads, rows, head_dim) of the first `rows` nodes, not copied."""
        block = self._block[layer]
        return block[0, :, :rows], block[1, :, :rows]

    def keep(self, rows: Sequence[int]) -> None:
        """Move `rows` (rising) to the front, in order; what the others held is void."""
        if list(rows) != list(range(len(rows))):
            self._block[:, :, :, : len(rows)] = self._block.index_select(3, torch.tensor(rows))

    def close(self) -> None:
        """Give the memory back."""
        self._block = torch.empty(0)
        self._buffer.free()
