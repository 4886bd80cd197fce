"""Tests of the mailboxes: conservation, order, closing, and cancellation at every turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from anyio import BrokenResourceError, ClosedResourceError, WouldBlock
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.mailboxes import EndOfMail, Mailbox, Receiver, Sender
from tests.routing.turns import settle, turns


def ends(places: int) -> tuple[Mailbox[int], Sender[int], Receiver[int]]:
    mailbox = Mailbox[int]("test", places)
    sender, receiver = mailbox.sender(), mailbox.receiver()
    mailbox.seal()
    return mailbox, sender, receiver


async def test_items_arrive_in_order_until_the_end() -> None:
    mailbox, sender, receiver = ends(3)
    with receiver:
        with sender:
            for item in range(3):
                await sender.send(item)
            assert mailbox.waiting == mailbox.places == 3
        assert [item async for item in receiver] == [0, 1, 2]
        with pytest.raises(EndOfMail):
            await receiver.receive()
        with pytest.raises(EndOfMail):
            receiver.receive_nowait()
    mailbox.check()


async def test_a_full_mailbox_makes_senders_wait() -> None:
    mailbox, sender, receiver = ends(1)
    with sender, receiver:
        sender.send_nowait(0)
        with pytest.raises(WouldBlock):
            sender.send_nowait(1)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(sender.send(1))
            await settle()
            assert not waiting.done()
            assert await receiver.receive() == 0
        assert await receiver.receive() == 1
        with pytest.raises(WouldBlock):
            receiver.receive_nowait()
    mailbox.check()


async def test_the_end_comes_when_the_last_clone_is_closed() -> None:
    mailbox, sender, receiver = ends(2)
    clone = sender.clone()
    with receiver:
        async with asyncio.TaskGroup() as group:
            end = group.create_task(anext_or_none(receiver))
            sender.close()
            sender.close()
            await settle()
            assert not end.done()
            assert mailbox.open_senders == 1
            clone.close()
        assert end.result() is None
    assert mailbox.open_senders == mailbox.open_receivers == 0


async def anext_or_none(receiver: Receiver[int]) -> int | None:
    async for item in receiver:
        return item
    return None


async def test_unsealed_mailboxes_do_not_end() -> None:
    mailbox = Mailbox[int]("test", 1)
    sender, receiver = mailbox.sender(), mailbox.receiver()
    with receiver:
        async with asyncio.TaskGroup() as group:
            end = group.create_task(anext_or_none(receiver))
            sender.close()
            await settle()
            assert not end.done()
            mailbox.seal()
    with pytest.raises(ClosedResourceError):
        mailbox.sender()
    with pytest.raises(ClosedResourceError):
        mailbox.receiver()
    with pytest.raises(ClosedResourceError):
        sender.clone()


async def test_nobody_waits_for_a_receiver_that_has_gone() -> None:
    _, sender, receiver = ends(1)
    with sender:
        sender.send_nowait(0)

        async def fail() -> None:
            with pytest.raises(BrokenResourceError):
                await sender.send(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await settle()
            receiver.close()
        with pytest.raises(BrokenResourceError):
            sender.send_nowait(2)


async def test_closing_an_end_wakes_those_who_wait_there() -> None:
    _, sender, receiver = ends(1)
    clone = sender.clone()

    async def fail(operation: Coroutine[Any, Any, object]) -> None:
        with pytest.raises(ClosedResourceError):
            await operation

    async with asyncio.TaskGroup() as group:
        group.create_task(fail(receiver.receive()))
        await settle()
        receiver.close()

    _, full, reader = ends(1)
    full.send_nowait(0)
    async with asyncio.TaskGroup() as group:
        group.create_task(fail(full.send(1)))
        await settle()
        full.close()
    assert await reader.receive() == 0
    with pytest.raises(EndOfMail):
        await reader.receive()
    for end in (sender, clone, reader):
        end.close()


async def test_a_cancelled_scope_neither_sends_nor_receives() -> None:
    mailbox, sender, receiver = ends(1)
    with sender, receiver:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await sender.send(1)
        sender.send_nowait(2)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await receiver.receive()
        assert (mailbox.sent, mailbox.received, mailbox.waiting) == (1, 0, 1)


async def test_an_item_given_to_a_task_that_is_cancelled_before_it_wakes_is_not_lost() -> None:
    _, sender, receiver = ends(1)
    with sender, receiver:
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(receiver.receive())
            await settle()
            sender.send_nowait(7)
            reader.cancel()
        assert reader.cancelled()
        assert receiver.receive_nowait() == 7


async def test_an_item_that_a_cancelled_sender_still_held_is_not_sent() -> None:
    mailbox, sender, receiver = ends(1)
    with sender, receiver:
        sender.send_nowait(0)
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(sender.send(1))
            await settle()
            assert receiver.receive_nowait() == 0
            writer.cancel()
        assert writer.cancelled()
        assert mailbox.waiting == 0


async def test_a_forgotten_end_warns() -> None:
    def forget() -> None:
        _, _sender, receiver = ends(1)
        receiver.close()

    with pytest.warns(ResourceWarning, match="Unclosed"):
        forget()


@dataclass
class Traffic:
    """Tasks that send and receive, each cancelled by asyncio or by its scope, or not at all.

    A send and a receive return in the same turn in which they put and took, so `sent` and
    `got` are the exact orders of both.
    """

    sender: Sender[int]
    receiver: Receiver[int]
    sent: list[int] = field(default_factory=list)
    got: list[int] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    sending: set[asyncio.Task[None]] = field(default_factory=set)
    scopes: list[anyio.CancelScope] = field(default_factory=list)

    async def put(self, item: int, scope: anyio.CancelScope) -> None:
        with scope:
            await self.sender.send(item)
            self.sent.append(item)

    async def take(self, scope: anyio.CancelScope) -> None:
        with scope:
            self.got.append(await self.receiver.receive())

    def start(self, group: asyncio.TaskGroup, item: int | None) -> None:
        scope = anyio.CancelScope()
        job = self.take(scope) if item is None else self.put(item, scope)
        self.scopes.append(scope)
        task = group.create_task(job)
        self.tasks.append(task)
        if item is not None:
            self.sending.add(task)

    def check_waits(self, mailbox: Mailbox[int]) -> list[asyncio.Task[None]]:
        """Assert that nobody waits for what is there; returns the tasks that still wait."""
        waiting = [task for task in self.tasks if not task.done()]
        for task in waiting:
            assert mailbox.waiting == (mailbox.places if task in self.sending else 0)
        return waiting


Step = tuple[str, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["send", "receive", "receive now"]), st.just(0)),
        st.tuples(st.sampled_from(["cancel task", "cancel scope"]), st.integers(0, 40)),
        st.tuples(st.just("turns"), st.integers(1, 3)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(places=st.integers(1, 3), steps=STEPS)
def test_nothing_is_lost_doubled_or_overlooked(places: int, steps: list[Step]) -> None:
    asyncio.run(run_traffic(places, steps))


async def run_traffic(places: int, steps: list[Step]) -> None:
    mailbox, sender, receiver = ends(places)
    traffic = Traffic(sender, receiver)
    with sender, receiver:
        async with asyncio.TaskGroup() as group:
            for number, (step, value) in enumerate(steps):
                if step == "send":
                    traffic.start(group, number)
                elif step == "receive":
                    traffic.start(group, None)
                elif step == "receive now":
                    if mailbox.waiting:
                        traffic.got.append(receiver.receive_nowait())
                elif step == "turns":
                    await turns(value)
                elif traffic.tasks:
                    victim = value % len(traffic.tasks)
                    if step == "cancel task":
                        traffic.tasks[victim].cancel()
                    else:
                        traffic.scopes[victim].cancel()
                mailbox.check()
            await settle()
            for task in traffic.check_waits(mailbox):
                task.cancel()
        left = [receiver.receive_nowait() for _ in range(mailbox.waiting)]
    assert traffic.got + left == traffic.sent
    mailbox.check()
    assert mailbox.sent == len(traffic.sent)


async def test_several_producers_and_consumers_lose_nothing() -> None:
    mailbox = Mailbox[int]("test", 2)
    senders = [mailbox.sender() for _ in range(3)]
    receivers = [mailbox.receiver() for _ in range(2)]
    mailbox.seal()
    got: list[int] = []

    async def produce(sender: Sender[int], first: int) -> None:
        with sender:
            for item in range(first, first + 50):
                await sender.send(item)

    async def consume(receiver: Receiver[int]) -> None:
        with receiver:
            async for item in receiver:
                got.append(item)

    async with anyio.create_task_group() as group:
        for number, sender in enumerate(senders):
            group.start_soon(produce, sender, 100 * number)
        for receiver in receivers:
            group.start_soon(consume, receiver)
    assert sorted(got) == [*range(50), *range(100, 150), *range(200, 250)]
    mailbox.check()
