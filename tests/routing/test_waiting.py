"""Tests of the waiting line."""

from __future__ import annotations

import asyncio

import pytest
from anyio import WouldBlock

from routing.waiting import WaitingLine
from tests.routing.turns import settle


class Apples:
    """Something to wait for."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def take(self) -> int:
        if not self.count:
            raise WouldBlock
        self.count -= 1
        return self.count


async def test_takes_at_once_what_is_there() -> None:
    line, apples = WaitingLine(), Apples(1)
    assert await line.take(apples.take) == 0
    assert len(line) == 0


async def test_first_come_first_served() -> None:
    line, apples, served = WaitingLine(), Apples(), list[int]()

    async def wait(who: int) -> None:
        await line.take(apples.take)
        served.append(who)

    async with asyncio.TaskGroup() as group:
        for who in range(4):
            group.create_task(wait(who))
        await settle()
        assert len(line) == 4
        apples.count = 4
        line.call_next()
        await settle()
    assert served == [0, 1, 2, 3]
    assert len(line) == 0


async def test_a_task_called_in_vain_keeps_its_place() -> None:
    line, apples, served = WaitingLine(), Apples(), list[int]()

    async def wait(who: int) -> None:
        await line.take(apples.take)
        served.append(who)

    async with asyncio.TaskGroup() as group:
        for who in range(2):
            group.create_task(wait(who))
        await settle()
        line.call_all()
        await settle()
        assert served == []
        apples.count = 1
        line.call_next()
        await settle()
        assert served == [0]
        apples.count = 1
        line.call_next()


async def test_a_cancelled_task_passes_its_call_on() -> None:
    line, apples = WaitingLine(), Apples()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(line.take(apples.take))
        second = group.create_task(line.take(apples.take))
        await settle()
        apples.count = 1
        line.call_next()
        first.cancel()  # Called, but not awake yet.
        await settle()
        assert first.cancelled()
        assert second.done()
    assert apples.count == 0


async def test_any_other_error_comes_out_and_the_line_goes_on() -> None:
    line, apples, broken = WaitingLine(), Apples(), [False]

    def fragile() -> int:
        if broken[0]:
            raise ZeroDivisionError
        return apples.take()

    async def meet_the_error() -> None:
        with pytest.raises(ZeroDivisionError):
            await line.take(fragile)

    async with asyncio.TaskGroup() as group:
        group.create_task(meet_the_error())
        await settle()
        group.create_task(line.take(apples.take))
        await settle()
        broken[0], apples.count = True, 1
        line.call_next()
    assert len(line) == 0
    assert apples.count == 0
