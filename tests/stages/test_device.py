from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from routing.errors import DeviceMemoryError
from stages.device import PAGE, CpuDevice, MemoryAccount

MIB = 1024 * 1024


def anonymous_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here")
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_the_account_ends_exactly_at_its_limit() -> None:
    account = MemoryAccount(1000)
    account.take(600, "weights")
    account.take(400, "kv")
    with pytest.raises(DeviceMemoryError) as caught:
        account.take(1, "scratch")
    error = caught.value
    assert (error.asked, error.held, error.limit, error.what) == (1, 1000, 1000, "scratch")
    account.check()
    assert account.by_name == {"weights": 600, "kv": 400}
    account.give(400, "kv")
    account.take(300, "scratch")
    account.give(300, "scratch")
    assert (account.held, account.peak) == (600, 1000)
    account.check()


def test_giving_back_what_was_not_taken_is_a_bug() -> None:
    account = MemoryAccount()
    account.take(10, "a")
    with pytest.raises(AssertionError):
        account.give(11, "a")
    with pytest.raises(AssertionError):
        account.give(1, "b")
    account.check()


def test_conservation_after_a_random_history() -> None:
    generator = random.Random(1)
    account = MemoryAccount(5000)
    held: list[tuple[int, str]] = []
    for _ in range(2000):
        if held and generator.random() < 0.5:
            account.give(*held.pop(generator.randrange(len(held))))
        else:
            claim = (generator.randrange(800), generator.choice("abc"))
            try:
                account.take(*claim)
            except DeviceMemoryError:
                assert account.held + claim[0] > 5000
            else:
                held.append(claim)
        account.check()
        assert account.held == sum(nbytes for nbytes, _ in held)


def test_buffers_are_aligned_zeroed_and_accounted_in_pages() -> None:
    device = CpuDevice(limit=10 * PAGE)
    buffer = device.allocate(PAGE + 1, "slot")
    assert buffer.nbytes == len(buffer.view) == device.memory.held == 2 * PAGE
    bytes_of = buffer.tensor(torch.uint8, (buffer.nbytes,))
    assert bytes_of.data_ptr() % PAGE == 0
    assert not bytes_of.any()
    with pytest.raises(DeviceMemoryError):
        device.allocate(8 * PAGE + 1, "more")
    buffer.free()
    buffer.free()
    assert device.memory.held == 0
    assert device.memory.peak == 2 * PAGE
    device.memory.check()
    device.close()


def test_tensors_are_views_at_an_offset() -> None:
    device = CpuDevice()
    buffer = device.allocate(PAGE, "slot")
    tensor = buffer.tensor(torch.float32, (3, 4), offset=64)
    tensor.copy_(torch.arange(12.0).view(3, 4))
    assert bytes(buffer.view[64:68]) == b"\0\0\0\0"
    assert buffer.tensor(torch.float32, (2,), offset=64 + 40).tolist() == [10.0, 11.0]
    assert buffer.tensor(torch.bfloat16, (0, 4)).shape == (0, 4)
    for shape, offset in (((1,), 2), ((PAGE,), 0), ((1,), PAGE), ((1,), -4)):
        with pytest.raises(AssertionError):
            buffer.tensor(torch.float32, shape, offset)
    buffer.free()
    with pytest.raises(AssertionError, match="after it was freed"):
        buffer.tensor(torch.float32, (1,))


def test_freed_memory_goes_back_to_the_system_even_under_a_forgotten_tensor() -> None:
    device = CpuDevice()
    before = anonymous_bytes()
    buffer = device.allocate(64 * MIB, "slot")
    forgotten = buffer.tensor(torch.uint8, (buffer.nbytes,)).fill_(7)
    assert anonymous_bytes() - before > 60 * MIB
    buffer.free()
    assert anonymous_bytes() - before < 4 * MIB
    assert int(forgotten[12345]) == 0  # no crash
    address = forgotten.data_ptr()
    del forgotten
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in maps)
    assert not any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def test_nothing_is_left_when_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("stages.device._anonymous", refuse)
    device = CpuDevice()
    with pytest.raises(OSError, match="Cannot allocate"):
        device.allocate(PAGE, "slot")
    assert device.memory.held == 0
    device.memory.check()


async def test_streams_share_the_devices_cores_and_close_with_it() -> None:
    device = CpuDevice(cores=2)
    stream = device.stream("draft")
    with device.cores.busy("draft"), device.cores.busy("verify"):
        assert await stream.run(torch.get_num_threads) == 1
    with pytest.raises(AssertionError, match="exists"):
        device.stream("draft")
    device.close()
    device.close()
