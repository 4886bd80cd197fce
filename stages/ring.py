"""The ring: the few slots of the device that streamed pieces pass through.

A slot goes free -> filling -> ready -> in use -> free, and every step asserts the one before:
nothing computes before its slot is filled, no slot is refilled before its user has finished.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import torch

from stages.device import Buffer, Device

State = Literal["free", "filling", "ready", "in use"]


class Ring:
    """`slots` buffers of `slot_bytes` each and their states. For the event loop only.

    With `poison` a slot is filled with NaN whenever it becomes free (a test's tool: it takes
    as long as the slot is large). Raises DeviceMemoryError, holding nothing, if they do not fit.
    """

    def __init__(self, device: Device, slots: int, slot_bytes: int, poison: bool = False) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes given, at least 1 of 1 expected")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._poison = poison
        self._buffers: list[Buffer] = []
        try:
            for _ in range(slots):
                self._buffers.append(device.allocate(slot_bytes, "ring"))
        except BaseException:
            self._free_buffers()
            raise
        self._states: list[State] = ["free"] * slots
        self._pieces = [-1] * slots
        self._free = deque(range(slots))
        for slot in range(slots):
            self._spoil(slot)

    def take_free(self) -> int | None:
        """free -> filling: the slot that has been free for longest, or None."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._step(slot, "free", "filling")
        return slot

    def mark_ready(self, slot: int, piece: int) -> None:
        """filling -> ready: piece `piece` stands in the slot, whole."""
        self._step(slot, "filling", "ready")
        self._pieces[slot] = piece

    def begin_use(self, slot: int, piece: int) -> Buffer:
        """ready -> in use: the slot's buffer, to be read until `release`."""
        assert self._pieces[slot] == piece, (slot, piece, self._pieces[slot])
        self._step(slot, "ready", "in use")
        return self._buffers[slot]

    def release(self, slot: int) -> None:
        """in use -> free: whatever reads the slot has finished, as its event has told."""
        self._step(slot, "in use", "free")
        self._give_back(slot)

    def abandon(self, slot: int) -> None:
        """filling -> free: the piece is not wanted any more, and no read is under way."""
        self._step(slot, "filling", "free")
        self._give_back(slot)

    def buffer(self, slot: int) -> Buffer:
        """The slot's buffer, for the link to fill."""
        return self._buffers[slot]

    def state(self, slot: int) -> State:
        """Where the slot is in its cycle."""
        return self._states[slot]

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    @property
    def held(self) -> int:
        """How many slots are filling, ready or in use."""
        return sum(state != "free" for state in self._states)

    def check(self) -> None:
        """Asserts conservation: free + held == slots, each free slot listed once."""
        assert self.free + self.held == self.slots, (self._states, self._free)
        assert len(set(self._free)) == len(self._free), self._free
        assert all(self._states[slot] == "free" for slot in self._free), self._states

    def close(self) -> None:
        """Frees the buffers. No read may be under way, and work on slots in use must have ended.

        States are not asked: an actor that died may have left a slot half-way.
        """
        self._free_buffers()

    def _step(self, slot: int, before: State, after: State) -> None:
        state = self._states[slot]
        assert state == before, f"slot {slot} is {state}, not {before}, and cannot be {after}"
        self._states[slot] = after

    def _give_back(self, slot: int) -> None:
        self._pieces[slot] = -1
        self._spoil(slot)
        self._free.append(slot)

    def _spoil(self, slot: int) -> None:
        if self._poison:  # all bits set is a NaN in every float format
            buffer = self._buffers[slot]
            buffer.tensor(torch.uint8, (buffer.nbytes,)).fill_(0xFF)

    def _free_buffers(self) -> None:
        for buffer in self._buffers:
            buffer.free()
