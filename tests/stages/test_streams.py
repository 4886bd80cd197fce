from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
import torch

from routing.errors import EngineClosedError
from stages.cores import Cores
from stages.streams import Event, Stream, settle


@contextmanager
def opened(name: str = "test", cores: Cores | None = None) -> Iterator[Stream]:
    stream = Stream(name, cores)
    try:
        yield stream
    finally:
        stream.close()


class Gate:
    """Work that says when it has begun, and goes on when it is let."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self.finished = False

    def work(self) -> str:
        self.begun.set()
        assert self.open.wait(10)
        self.finished = True
        return "result"

    async def until_begun(self) -> None:
        await anyio.to_thread.run_sync(self.begun.wait)


async def test_launches_run_in_order_and_give_their_results() -> None:
    order: list[int] = []
    with opened() as stream:
        events = [stream.launch(order.append, number) for number in range(20)]
        assert await stream.run(lambda a, b: a + b, 1, 2) == 3
        assert all(event.done() for event in events)
    assert order == list(range(20))


async def test_work_runs_in_one_thread_without_gradients() -> None:
    with opened("verify") as stream:
        assert await stream.run(torch.is_grad_enabled) is False
        first = await stream.run(threading.get_ident)
        assert await stream.run(threading.get_ident) == first != threading.get_ident()
        assert await stream.run(lambda: threading.current_thread().name) == "verify"


async def test_an_exception_reaches_everyone_who_waits_and_the_stream_goes_on() -> None:
    with opened() as stream:
        event = stream.launch(int, "x")
        for _ in range(2):
            with pytest.raises(ValueError, match="invalid literal"):
                await event
        with pytest.raises(ValueError, match="invalid literal"):
            event.wait()
        assert await stream.run(int, "7") == 7


async def test_work_waits_for_events_of_other_streams() -> None:
    gate = Gate()
    with opened("a") as first, opened("b") as second:
        before = first.launch(gate.work)
        after = second.launch(lambda: gate.finished, after=[before])
        await gate.until_begun()
        assert not after.done()
        gate.open.set()
        assert await after is True


async def test_work_whose_forerunner_failed_is_not_run() -> None:
    ran: list[int] = []
    with opened("a") as first, opened("b") as second:
        failed = first.launch(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            await second.launch(ran.append, 1, after=[failed])
    assert ran == []


async def test_native_cancellation_waits_for_the_work_to_end() -> None:
    gate = Gate()
    with opened() as stream:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(stream.run(gate.work))
            await gate.until_begun()
            for _ in range(3):  # insisting does not help
                task.cancel()
                await asyncio.sleep(0)
            assert not task.done()
            gate.open.set()
        assert gate.finished
        assert task.cancelled()


async def test_scope_cancellation_waits_for_the_work_to_end() -> None:
    gate = Gate()
    passed = False
    with opened() as stream:
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                nonlocal passed
                await stream.run(gate.work)
                passed = True

            tasks.start_soon(wait)
            await gate.until_begun()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0.005)
                assert not gate.finished
                gate.open.set()
        assert gate.finished
        assert not passed


async def test_waiting_after_the_end_still_lets_a_cancellation_through() -> None:
    event = Event[int]()
    event.resolve(5)
    assert await event == 5
    with anyio.CancelScope() as scope:
        scope.cancel()
        await settle([event])
    assert scope.cancelled_caught


async def test_settle_waits_for_all_in_spite_of_failures_and_cancellation() -> None:
    gates = [Gate(), Gate()]
    with opened("a") as first, opened("b") as second:
        events: list[Event[Any]] = [
            first.launch(gates[0].work),
            first.launch(int, "x"),
            second.launch(gates[1].work),
        ]
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(settle(events))
            await gates[0].until_begun()
            task.cancel()
            gates[0].open.set()
            await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.sleep(0.005)
            assert not task.done()
            gates[1].open.set()
        assert all(gate.finished for gate in gates)
        assert task.cancelled()


async def test_closing_finishes_what_was_launched_and_refuses_more() -> None:
    stream = Stream("test")
    order: list[int] = []
    for number in range(10):
        stream.launch(order.append, number)
    stream.close()
    stream.close()
    assert order == list(range(10))
    with pytest.raises(EngineClosedError):
        stream.launch(order.append, 10)


async def test_an_idle_stream_keeps_nothing_alive() -> None:
    with opened() as stream:
        tensor = torch.zeros(3)
        seen = weakref.ref(tensor)
        await stream.run(torch.sum, tensor)
        await stream.run(int)  # the worker has gone on to something else
        del tensor
        gc.collect()
        assert seen() is None


async def test_work_gets_its_share_of_the_cores() -> None:
    cores = Cores(2)
    with opened("draft", cores) as draft, opened("verify", cores) as verify:
        assert await draft.run(torch.get_num_threads) == 2
        with cores.busy("draft"), cores.busy("verify"):
            assert await draft.run(torch.get_num_threads) == 1
            assert await verify.run(torch.get_num_threads) == 1
        assert await verify.run(torch.get_num_threads) == 2
    cores.check()
    assert cores.held == 0


async def test_who_waits_for_another_holds_no_cores() -> None:
    cores = Cores(1)
    gate = Gate()
    with opened("a") as first, opened("b", cores) as waiting, opened("c", cores) as third:
        event = waiting.launch(int, after=[first.launch(gate.work)])
        await gate.until_begun()
        assert await third.run(lambda: cores.held) == 1
        gate.open.set()
        await event
