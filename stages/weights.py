"""Weights that stay on the device: small tensors, resident matrices, substitutes.

Streamed matrices are the ring's business (ring.py, prefetcher.py). Everything here is loaded once,
row block by row block, charged to the device's memory account and given back by `close`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch.nn import functional

from stages.checkpoint import Checkpoint
from stages.device import Buffer, Device
from stages.draft_layer import Product, is_common
from stages.formats import ROW_MULTIPLE, head_format
from stages.heap import give_back
from stages.packed import Packed
from stages.placement import Placement
from stages.progress import Progress
from stages.shapes import MatrixShape, ModelShape
from stages.skeleton import Skeleton
from stages.substitutes import Substitute, quantize

_BLOCK_BYTES = 4 << 20


class Weights:
    """What the plan keeps on the device.

    resident: full-precision tensors in the compute dtype by name (norms and biases included);
    substitutes: the low-bit copies of streamed matrices, the head's included, and of resident ones
    if the placement says so, by the names whose rows they join (`fusions`).
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._opened = ExitStack()
        self.resident: dict[str, torch.Tensor] = {}
        self.substitutes: dict[tuple[str, ...], Substitute] = {}

    @classmethod
    def load(
        cls,
        device: Device,
        checkpoint: Checkpoint,
        skeleton: Skeleton,
        shape: ModelShape,
        placement: Placement,
        progress: Progress,
    ) -> Weights:
        """Read and quantize. Raises DeviceMemoryError, LinkError, ModelFormatError.

        Holds nothing when it raises.
        """
        weights = cls(device)
        total = sum(m.nbytes for m in (*shape.matrices(), shape.head))
        resident = frozenset(placement.resident)
        try:
            for name in skeleton.small():
                weights._keep(name, checkpoint, skeleton.dtype, "norms")
            done = 0
            form = placement.substitute
            alone = frozenset[str]() if placement.low_resident else resident
            for group in fusions(skeleton, shape, alone):
                progress.step("Loading weights", done, total)
                for name in (matrix.name for matrix in group):
                    if name in resident:
                        weights._keep(name, checkpoint, skeleton.dtype, "resident")
                if form is not None and group[0].name not in alone:
                    low = head_format(form) if group == (shape.head,) else form
                    weights._substitute(group, checkpoint, low)
                # What the heap keeps of all that was read would come to hundreds of MB.
                give_back()
                done += sum(matrix.nbytes for matrix in group)
            progress.step("Loading weights", total, total)
        except BaseException:
            weights.close()
            raise
        return weights

    def _keep(self, name: str, checkpoint: Checkpoint, dtype: torch.dtype, what: str) -> None:
        spec = checkpoint.spec(name)
        count = 1
        for size in spec.shape:
            count *= size
        buffer = self._take(count * dtype.itemsize, what)
        tensor = buffer.tensor(dtype, tuple(spec.shape), 0)
        for start, stop in _row_blocks(spec.shape[0], spec.nbytes):
            tensor[start:stop] = checkpoint.read_row_range(name, start, stop)
        self.resident[name] = tensor

    def _take(self, nbytes: int, what: str) -> Buffer:
        buffer = self._device.allocate(nbytes, what)
        self._opened.callback(buffer.free)
        return buffer

    def _substitute(
        self, group: tuple[MatrixShape, ...], checkpoint: Checkpoint, form: str
    ) -> None:
        def blocks() -> Iterator[torch.Tensor]:
            for matrix in group:
                for start, stop in _row_blocks(matrix.rows, matrix.nbytes):
                    yield checkpoint.read_row_range(matrix.name, start, stop)

        rows = sum(matrix.rows for matrix in group)
        substitute = quantize(blocks(), (rows, group[0].cols), form)
        self._device.memory.take(substitute.nbytes, "substitutes")
        self._opened.callback(self._device.memory.give, substitute.nbytes, "substitutes")
        self.substitutes[tuple(matrix.name for matrix in group)] = substitute

    def product(self, *names: str) -> Product:
        """x (rows, in) -> (rows, out of all `names` joined), as the drafter computes it."""
        whole = self.substitutes.get(names)
        if whole is not None:
            return whole.matmul
        if len(names) == 1:
            return functools.partial(functional.linear, weight=self.resident[names[0]])
        parts = [self.product(name) for name in names]
        return lambda x: torch.cat([part(x) for part in parts], dim=1)

    def compiled(self, *names: str) -> Packed | None:
        """What the compiled part multiplies by for all of `names` joined, if it does."""
        whole = self.substitutes.get(names)
        return None if whole is None else whole.compiled

    def close(self) -> None:
        """Give everything back. No tensor or substitute may be used afterwards."""
        self.resident.clear()
        self.substitutes.clear()
        self._opened.close()


def fusions(
    skeleton: Skeleton, shape: ModelShape, resident: frozenset[str]
) -> Iterator[tuple[MatrixShape, ...]]:
    """All matrices once: those whose substitutes make one product in groups, others alone.

    A layer of the common shape takes q, k and v at once, and gate and up, where none of them is
    `resident` and their rows are whole blocks of the packed layout.
    """
    for layer in shape.layers:
        left = {matrix.name: matrix for matrix in layer.matrices}
        for names in joined(skeleton, layer.index):
            group = tuple(left[name] for name in names)
            if all(m.name not in resident and m.rows % ROW_MULTIPLE == 0 for m in group):
                yield group
                for name in names:
                    del left[name]
        for matrix in left.values():
            yield (matrix,)
    yield (shape.head,)


def joined(skeleton: Skeleton, layer: int) -> tuple[tuple[str, ...], ...]:
    """The names of matrices that share their input; none where the layer is not of common shape."""
    if not is_common(skeleton.layers[layer]):
        return ()
    prefix = skeleton.architecture.layer_prefix(layer)
    attention = tuple(f"{prefix}self_attn.{part}_proj.weight" for part in ("q", "k", "v"))
    return attention, tuple(f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up"))


def _row_blocks(rows: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Row ranges of at most about 4 MiB each, multiples of 64 rows where there are as many."""
    step = max(1, _BLOCK_BYTES * rows // max(1, nbytes))
    step = max(64, step // 64 * 64)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
