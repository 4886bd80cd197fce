from __future__ import annotations

import random

import pytest
import torch

from routing.errors import DeviceMemoryError
from stages.device import PAGE, CpuDevice
from stages.ring import Ring


def make(slots: int = 2, poison: bool = False) -> Ring:
    return Ring(CpuDevice(), slots, PAGE, poison)


def test_a_slot_goes_round() -> None:
    ring = make()
    slot = ring.take_free()
    assert slot == 0
    assert ring.state(0) == "filling"
    ring.mark_ready(0, 5)
    assert ring.begin_use(0, 5) is ring.buffer(0)
    assert (ring.free, ring.held) == (1, 1)
    ring.release(0)
    assert [ring.take_free(), ring.take_free(), ring.take_free()] == [1, 0, None]
    ring.abandon(1)
    ring.check()


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ([], "mark_ready"),
        ([], "release"),
        (["take"], "begin_use"),  # computing before the slot is filled
        (["take"], "release"),
        (["take", "mark_ready"], "mark_ready"),
        (["take", "mark_ready"], "release"),
        (["take", "mark_ready"], "abandon"),
        (["take", "mark_ready", "begin_use"], "begin_use"),
        (["take", "mark_ready", "begin_use"], "abandon"),  # refilling one in use
        (["take", "mark_ready", "begin_use", "release"], "release"),
    ],
)
def test_steps_out_of_order_are_bugs(steps: list[str], wrong: str) -> None:
    ring = make(1)

    def step(name: str) -> None:
        if name == "take":
            assert ring.take_free() == 0
        elif name in ("mark_ready", "begin_use"):
            getattr(ring, name)(0, 0)
        else:
            getattr(ring, name)(0)

    for name in steps:
        step(name)
    with pytest.raises(AssertionError):
        step(wrong)
    ring.check()


def test_the_wrong_piece_is_a_bug() -> None:
    ring = make(1)
    ring.take_free()
    ring.mark_ready(0, 3)
    with pytest.raises(AssertionError):
        ring.begin_use(0, 4)


def test_poison_stands_in_free_slots() -> None:
    ring = make(1, poison=True)
    tensor = ring.buffer(0).tensor(torch.bfloat16, (PAGE // 2,))
    assert tensor.isnan().all()
    ring.take_free()
    tensor.fill_(1.0)
    ring.mark_ready(0, 0)
    ring.begin_use(0, 0)
    ring.release(0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert ring.buffer(0).tensor(dtype, (PAGE // dtype.itemsize,)).isnan().all()


def test_a_ring_that_does_not_fit_holds_nothing() -> None:
    device = CpuDevice(limit=3 * PAGE)
    with pytest.raises(DeviceMemoryError):
        Ring(device, 4, PAGE)
    assert device.memory.held == 0
    ring = Ring(device, 3, PAGE)
    assert device.memory.by_name == {"ring": 3 * PAGE}
    ring.close()
    assert device.memory.held == 0
    with pytest.raises(ValueError, match="at least"):
        Ring(device, 0, PAGE)


def test_closing_after_a_death_frees_every_slot() -> None:
    """An actor that died leaves slots half-way: their memory is given back all the same."""
    device = CpuDevice()
    ring = Ring(device, 3, PAGE)
    filling, used = ring.take_free(), ring.take_free()
    assert filling is not None and used is not None
    ring.mark_ready(used, 0)
    ring.begin_use(used, 0)
    ring.close()
    assert device.memory.held == 0


def test_conservation_over_a_random_history() -> None:
    generator = random.Random(4)
    ring = make(5)
    by_state: dict[str, list[int]] = {"filling": [], "ready": [], "in use": []}
    for _ in range(2000):
        state = generator.choice(["free", *by_state])
        if state == "free":
            slot = ring.take_free()
            if slot is not None:
                by_state["filling"].append(slot)
        elif by_state[state]:
            slot = by_state[state].pop(generator.randrange(len(by_state[state])))
            if state == "filling" and generator.random() < 0.8:
                ring.mark_ready(slot, slot)
                by_state["ready"].append(slot)
            elif state == "filling":
                ring.abandon(slot)
            elif state == "ready":
                ring.begin_use(slot, slot)
                by_state["in use"].append(slot)
            else:
                ring.release(slot)
        ring.check()
        assert ring.held == sum(map(len, by_state.values()))
