"""Weights that stay on the device: small tensors, resident matrices, substitutes.

Streamed matrices are the ring's business (ring.py, prefetcher.py). Everything here is loaded once,
layer by layer, charged to the device's memory account and given back by `close`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch.nn import functional

from routing.errors import DeviceMemoryError
from stages.device import Buffer, Device
from stages.draft_layer import Product, is_common
from stages.formats import ROW_MULTIPLE, head_format
from stages.heap import give_back
from stages.loading import OpenedModel
from stages.packed import Packed
from stages.placement import Placement
from stages.probe import Probe
from stages.progress import Progress
from stages.sensitivity import Sensitivity
from stages.shapes import LayerShape, MatrixShape
from stages.skeleton import Skeleton
from stages.substitutes import Substitute, quantize

_BLOCK_BYTES = 4 << 20
_ALIGN = 64
"""Of each tensor among those of a layer: a cache line."""


class Weights:
    """What the plan keeps on the device.

    resident: full-precision tensors in the compute dtype by name (norms and biases included);
    substitutes: the low-bit copies of streamed matrices, the head's included, and of resident ones
    if the placement says so, by the names whose rows they join (`fusions`); form: their format
    (some layers' may be finer); sensitivity: of each layer, where it was measured.
    """

    def __init__(self, device: Device, opened: OpenedModel, form: str | None) -> None:
        """With nothing loaded."""
        self._device, self._opened, self.form = device, opened, form
        self.sensitivity: tuple[float, ...] | None = None
        self._undo = ExitStack()
        self.resident: dict[str, torch.Tensor] = {}
        self.substitutes: dict[tuple[str, ...], Substitute] = {}

    @classmethod
    def load(
        cls,
        device: Device,
        opened: OpenedModel,
        placement: Placement,
        progress: Progress,
        *,
        measure: bool = False,
    ) -> Weights:
        """Read and quantize. Raises DeviceMemoryError, LinkError, ModelFormatError.

        For substitutes the streamed matrices of a layer are held in full, one layer at a time:
        less than what the ring and its decode buffer take later. Holds nothing when it raises.
        With `measure` layers' sensitivity is measured meanwhile, if there are to be substitutes;
        what is loaded is the same. Where it does not fit in, all is loaded once more without it:
        only a context of a few tokens claims less for later than a measurement takes.
        """
        if measure:
            with suppress(DeviceMemoryError):
                return cls._loaded(device, opened, placement, progress, measure=True)
        return cls._loaded(device, opened, placement, progress, measure=False)

    @classmethod
    def _loaded(
        cls,
        device: Device,
        opened: OpenedModel,
        placement: Placement,
        progress: Progress,
        *,
        measure: bool,
    ) -> Weights:
        weights = cls(device, opened, placement.substitute)
        try:
            weights._load(placement, progress, measure)
        except BaseException:
            weights.close()
            raise
        return weights

    def _load(self, placement: Placement, progress: Progress, measure: bool) -> None:
        opened, shape, form = self._opened, self._opened.shape, self.form
        resident = frozenset(placement.resident)
        alone = frozenset[str]() if placement.low_resident else resident
        skeleton = opened.skeleton()
        for name in skeleton.small():
            self._keep(name, "norms")
        skeleton.bind(self.resident)
        probe = self._probe(skeleton, measure)
        done, total = 0, sum(m.nbytes for m in (*shape.matrices(), shape.head))
        for layer in shape.layers:
            progress.step("Loading weights", done, total)
            for name in (m.name for m in layer.matrices if m.name in resident):
                self._keep(name, "resident")
                skeleton.bind({name: self.resident[name]})
            if probe is not None and form is not None:
                groups = [g for g in fusions(skeleton, layer, alone) if g[0].name not in alone]
                finer = placement.finer if layer.index in placement.raised else None
                self._substitute_layer(layer, groups, finer or form, probe)
            # What the heap keeps of all that was read would come to hundreds of MB.
            give_back()
            done += sum(matrix.nbytes for matrix in layer.matrices)
        progress.step("Loading weights", done, total)
        head = shape.head
        if head.name in resident:
            self._keep(head.name, "resident")
        if probe is not None and form is not None and head.name not in alone:
            parts = (part for _, part in self._rows(head.name))
            self._substitute((head,), parts, head_format(form), probe.head())
        if isinstance(probe, Sensitivity):
            self.sensitivity = probe.costs(part for _, part in self._rows(head.name))
            probe.close()
        give_back()
        progress.step("Loading weights", total, total)

    def _probe(self, skeleton: Skeleton, measure: bool) -> Probe | None:
        """None where there are to be no substitutes."""
        if self.form is None:
            return None
        if not measure:
            return Probe(self._opened, skeleton)
        probe = Sensitivity(self._opened, skeleton, self._device.memory)
        self._undo.callback(probe.close)
        return probe

    def _substitute_layer(
        self, layer: LayerShape, groups: Iterable[tuple[MatrixShape, ...]], form: str, probe: Probe
    ) -> None:
        """The substitutes of some groups of a layer; the probe needs all of the layer."""
        with self._streamed(layer) as streamed:
            inputs = probe.layer(layer.index, streamed)
            for group in groups:
                blocks = _blocks(group, {**self.resident, **streamed})
                self._substitute(group, blocks, form, inputs[group[0].name])

    def _keep(self, name: str, what: str) -> None:
        buffer = self._device.allocate(self._nbytes(name), what)
        self._undo.callback(buffer.free)
        self.resident[name] = self._read(name, buffer, 0)

    @contextmanager
    def _streamed(self, layer: LayerShape) -> Iterator[dict[str, torch.Tensor]]:
        """A layer's matrices that are not resident, in full, for as long as it lasts."""
        names = [m.name for m in layer.matrices if m.name not in self.resident]
        if not names:
            yield {}
            return
        places, size = [], 0
        for name in names:
            places.append(size)
            size += -(-self._nbytes(name) // _ALIGN) * _ALIGN
        buffer = self._device.allocate(size, "loading")
        try:
            yield {n: self._read(n, buffer, place) for n, place in zip(names, places, strict=True)}
        finally:
            buffer.free()

    def _nbytes(self, name: str) -> int:
        """Of a tensor in the compute dtype."""
        count = 1
        for size in self._opened.checkpoint.spec(name).shape:
            count *= size
        return count * self._opened.dtype.itemsize

    def _read(self, name: str, buffer: Buffer, place: int) -> torch.Tensor:
        """A tensor in the compute dtype, at byte `place` of the buffer."""
        shape = tuple(self._opened.checkpoint.spec(name).shape)
        into = buffer.tensor(self._opened.dtype, shape, place)
        for start, part in self._rows(name):
            into[start : start + len(part)] = part
        return into

    def _rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """A tensor in parts of at most about 4 MiB: the first row of each, and its rows in the
        source's dtype, multiples of 64 where there are as many."""
        checkpoint = self._opened.checkpoint
        spec = checkpoint.spec(name)
        step = _block_rows(spec.shape[0], spec.nbytes)
        for start in range(0, spec.shape[0], step):
            stop = min(spec.shape[0], start + step)
            yield start, checkpoint.read_row_range(name, start, stop)

    def _substitute(
        self,
        group: tuple[MatrixShape, ...],
        blocks: Iterable[torch.Tensor],
        form: str,
        inputs: torch.Tensor,
    ) -> None:
        rows = sum(matrix.rows for matrix in group)
        substitute = quantize(blocks, (rows, group[0].cols), form, inputs)
        self._device.memory.take(substitute.nbytes, "substitutes")
        self._undo.callback(self._device.memory.give, substitute.nbytes, "substitutes")
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
        self._undo.close()


def fusions(
    skeleton: Skeleton, layer: LayerShape, resident: frozenset[str]
) -> Iterator[tuple[MatrixShape, ...]]:
    """A layer's matrices once: those whose substitutes make one product in groups, others alone.

    A layer of the common shape takes q, k and v at once, and gate and up, where none of them is
    `resident` and their rows are whole blocks of the packed layout.
    """
    left = {matrix.name: matrix for matrix in layer.matrices}
    for names in joined(skeleton, layer.index):
        group = tuple(left[name] for name in names)
        if all(m.name not in resident and m.rows % ROW_MULTIPLE == 0 for m in group):
            yield group
            for name in names:
                del left[name]
    for matrix in left.values():
        yield (matrix,)


def joined(skeleton: Skeleton, layer: int) -> tuple[tuple[str, ...], ...]:
    """The names of matrices that share their input; none where the layer is not of common shape."""
    if not is_common(skeleton.layers[layer]):
        return ()
    prefix = skeleton.architecture.layer_prefix(layer)
    attention = tuple(f"{prefix}self_attn.{part}_proj.weight" for part in ("q", "k", "v"))
    return attention, tuple(f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up"))


def _blocks(
    group: tuple[MatrixShape, ...], tensors: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The rows of all matrices of a group, in views of at most about 4 MiB."""
    for matrix in group:
        tensor = tensors[matrix.name]
        yield from tensor.split(_block_rows(matrix.rows, tensor.nbytes))


def _block_rows(rows: int, nbytes: int) -> int:
    """As many as take about 4 MiB, a multiple of 64 where there are as many."""
    step = max(1, _BLOCK_BYTES * rows // max(1, nbytes))
    return max(64, step // 64 * 64)
