"""Made tensor files and a consumer of pieces, for the tests of the link, the ring and its actor."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import torch

from routing.mailboxes import Mailbox
from routing.messages import PieceReady, SlotFree
from routing.trace import Trace
from stages.codec import DTYPES, NAMES, RawCodec
from stages.device import Buffer, Device
from stages.link import Link
from stages.pieces import Group, Piece, cut_pieces, slot_bytes
from stages.prefetcher import Prefetcher
from stages.ring import Ring
from stages.safetensors_header import TensorSpec

Tensors = dict[str, torch.Tensor]


def write_file(path: Path, tensors: Tensors, lead: int = 0, gap: int = 0) -> dict[str, TensorSpec]:
    """A file of tensors, `lead` bytes before the first and `gap` bytes between them."""
    specs = {}
    blob = bytearray(random.Random(lead).randbytes(lead))
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        specs[name] = TensorSpec(
            name, NAMES[tensor.dtype], tuple(tensor.shape), str(path), len(blob), len(raw)
        )
        blob += raw + b"\xff" * gap
    path.write_bytes(blob)
    return specs


class Made:
    """`count` pieces of a few random matrices each, in files of their own or in one."""

    def __init__(
        self, folder: Path, count: int = 4, dtype: str = "F32", lead: int = 8, files: int = 2
    ) -> None:
        generator = torch.Generator().manual_seed(count)
        self.tensors: Tensors = {}
        specs: dict[str, TensorSpec] = {}
        for number in range(files):
            part: Tensors = {}
            for index in range(number, count, files):
                for name, shape in (("up", (96, 64)), ("norm", (64,)), ("down", (64, 96))):
                    made = torch.randn(shape, generator=generator, dtype=torch.float64)
                    part[f"{index}.{name}"] = made.to(DTYPES[dtype])
            specs |= write_file(folder / f"part{number}", part, lead)
            self.tensors |= part
        groups = [
            Group("layer", index, tuple(specs[f"{index}.{n}"] for n in ("norm", "up", "down")))
            for index in range(count)
        ]
        self.pieces = cut_pieces(groups)
        self.paths = sorted({spec.path for spec in specs.values()})

    def wrong(self, piece: Piece, found: Tensors) -> list[str]:
        """The names of the tensors that are not what was written, NaN included."""
        return [
            placed.name
            for placed in piece.tensors
            if not torch.equal(found[placed.name], self.tensors[placed.name])
        ]


class Seen:
    """What a consumer found: pieces in order, and the names of tensors that were not right."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.wrong: list[str] = []


async def consume(
    made: Made,
    device: Device,
    link: Link,
    *,
    slots: int = 2,
    sweeps: int = 3,
    after_launch: Callable[[], bool] = lambda: False,
    trace: Trace | None = None,
) -> Seen:
    """Runs a prefetcher and, in the verifier's place, a user that compares every tensor.

    It compares at the start and at the end of its work, so that a slot filled too late and a slot
    refilled too early both show. If `after_launch()` is true, the slot is given back while the
    work is still under way: a planted bug.
    """
    ring = Ring(device, slots, slot_bytes(made.pieces), poison=True)
    stream = device.stream("user")
    ready, freed = Mailbox[PieceReady]("ready", slots), Mailbox[SlotFree]("freed", slots)
    prefetcher = Prefetcher(
        made.pieces, ring, link, ready.sender(), freed.receiver(), trace or Trace()
    )
    pieces, frees = ready.receiver(), freed.sender()
    ready.seal()
    freed.seal()
    seen = Seen()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prefetcher.run)
            with pieces, frees:
                for _ in range(sweeps * len(made.pieces)):
                    message = await pieces.receive()
                    seen.order.append(message.piece)
                    piece = made.pieces[message.piece]
                    buffer = ring.begin_use(message.slot, message.piece)
                    work = stream.launch(_compare, made, piece, buffer)
                    early = after_launch()
                    if early:
                        ring.release(message.slot)
                        frees.send_nowait(SlotFree(message.slot))
                    seen.wrong += await work
                    if not early:
                        ring.release(message.slot)
                        frees.send_nowait(SlotFree(message.slot))
                    ring.check()
        ready.check()
        freed.check()
    finally:
        ring.check()
        ring.close()
    return seen


def _compare(made: Made, piece: Piece, buffer: Buffer) -> list[str]:
    """Twice, with time between: at the beginning and at the end of the slot's use."""
    dtype = next(iter(made.tensors.values())).dtype
    found = RawCodec().decode(piece, buffer, dtype, None)
    wrong = made.wrong(piece, found)
    time.sleep(0.002)
    return wrong + made.wrong(piece, found)
