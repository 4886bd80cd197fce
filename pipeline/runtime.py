"""What an engine runs on: a model opened, planned for its budget, and loaded where the plan says.

Owns every store and gives all of it back. Knows no actors and no requests.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol, TypeVar

from pipeline.planner import Plan
from stages.codec import RawCodec
from stages.device import Buffer, Device
from stages.drafting import DraftModel
from stages.embedding import Embedding
from stages.head import LogitRows
from stages.heap import trim
from stages.kv import DraftScratch, KVStore
from stages.link import Link
from stages.loading import OpenedModel
from stages.noise import Noise
from stages.progress import Progress
from stages.ring import Ring
from stages.schedule import schedule
from stages.sweep import Model
from stages.weights import Weights


class Closes(Protocol):
    """Something that gives back what it holds."""

    def close(self) -> None: ...


Owned = TypeVar("Owned", bound=Closes)


class Runtime:
    """The stores of one loaded model, on one device. Blocking: make and close it in a thread."""

    def __init__(
        self,
        opened: OpenedModel,
        plan: Plan,
        device: Device,
        progress: Progress,
        *,
        embedding_rows: int,
        link_gbps: float | None = None,
        poison: bool = False,
        measure: bool = False,
    ) -> None:
        """Takes `opened` and `device` over and closes them, also when this raises.

        With `measure`, layers' `sensitivity` is measured while they are loaded, where it can be.
        Raises DeviceMemoryError, LinkError, ModelFormatError.
        """
        self.opened, self.plan, self.device = opened, plan, device
        with ExitStack() as undo:
            undo.callback(opened.close)
            undo.callback(device.close)
            weights = Weights.load(device, opened, plan.placement, progress, measure=measure)
            undo.callback(weights.close)
            self.sensitivity = weights.sensitivity
            self._load(undo, weights, embedding_rows, link_gbps, poison)
            trim()
            self._undo = undo.pop_all()

    def _load(
        self,
        undo: ExitStack,
        weights: Weights,
        embedding_rows: int,
        link_gbps: float | None,
        poison: bool,
    ) -> None:
        opened, device, placement = self.opened, self.device, self.plan.placement
        shape, dtype, checkpoint = opened.shape, opened.dtype, opened.checkpoint
        skeleton = opened.skeleton()
        skeleton.bind({n: t for n, t in weights.resident.items() if n in skeleton})
        self.head = weights.resident.get(shape.head.name)
        self.steps, self.pieces = schedule(shape, placement, checkpoint.tensors)
        # A tree's rows stand behind the committed ones until they are accepted or void.
        capacity = placement.context + placement.tree_budget + 1
        self.kv = self._own(
            undo,
            KVStore(
                device,
                shape,
                places=placement.sessions,
                capacity=capacity,
                dtype=dtype,
                poison=poison,
            ),
        )
        embedding = Embedding(
            checkpoint, opened.embedding_name, dtype, opened.architecture.embed, embedding_rows
        )
        logit_rows = LogitRows(
            device,
            sessions=placement.sessions,
            each=placement.logit_rows,
            vocab=shape.vocab,
            dtype=dtype,
        )
        self.noise = Noise()
        self.model = Model(
            skeleton,
            opened.rope,
            embedding,
            self.kv,
            placement.prefill_rows,
            self._own(undo, logit_rows),
            self.noise,
        )
        self.ring: Ring | None = None
        self.link: Link | None = None
        self.decoded: Buffer | None = None
        if self.pieces:
            self.ring = self._own(
                undo, Ring(device, placement.slots, placement.slot_bytes, poison=poison)
            )
            scratch = RawCodec().scratch_bytes(self.pieces, dtype)
            if scratch:
                self.decoded = device.allocate(scratch, "decode buffer")
                undo.callback(self.decoded.free)
            self.link = device.open_link(opened.paths, gbps=link_gbps)
        self.draft_model: DraftModel | None = None
        if placement.draft_rows:
            rows = DraftScratch(device, shape, rows=placement.draft_rows, dtype=dtype)
            self.draft_model = DraftModel(
                opened.skeleton(),
                weights,
                shape,
                opened.rope,
                embedding,
                self.kv,
                self._own(undo, rows),
                self.noise,
            )

    def _own(self, undo: ExitStack, part: Owned) -> Owned:
        undo.callback(part.close)
        return part

    def check(self) -> None:
        """Assert conservation in every store."""
        self.kv.check()
        self.device.memory.check()
        if self.ring is not None:
            self.ring.check()

    def close(self) -> None:
        """Stop the device's workers, then free everything. No actor may run any more."""
        self.device.close()
        self._undo.close()
