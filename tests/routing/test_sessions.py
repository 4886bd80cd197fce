"""Tests of the session table: places, ids, cancelling, closing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import anyio
import pytest
from anyio import ClosedResourceError, WouldBlock
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.errors import BusyError, EngineClosedError, EngineError
from routing.mailboxes import EndOfMail, Mailbox, Receiver, Sender
from routing.messages import Batch, DraftOrder, ToDrafter
from routing.sessions import Session, SessionTable
from tests.routing.made import drafter_mail, made_request
from tests.routing.turns import settle, turns


class Clock:
    """Counts how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Desk:
    """A table with the router's end of a drafter mailbox; keeps what it has to close."""

    def __init__(self, places: int, queue: int) -> None:
        self.table = SessionTable(places, queue, clock=Clock())
        self.mailbox: Mailbox[ToDrafter]
        self.orders: Sender[ToDrafter]
        self.drafter: Receiver[ToDrafter]
        self.mailbox, self.orders, self.drafter = drafter_mail(places)
        self.opened: list[Session] = []

    def open(self, max_tokens: int = 4) -> Session:
        session = self.table.open(made_request(len(self.opened), max_tokens))
        self.opened.append(session)
        return session

    async def live(self) -> Session:
        session = self.open()
        assert await self.table.admit(session, self.orders) is not None
        return session

    def check(self) -> None:
        """The table's own conservation, and that exactly live sessions hold the mailbox open."""
        self.table.check()
        assert self.mailbox.open_senders == self.table.live + 1
        assert self.table.live + self.table.free == self.table.places
        assert self.table.empty == (self.table.live + self.table.waiting == 0)


@contextlib.contextmanager
def desk(places: int, queue: int) -> Iterator[Desk]:
    """A desk; afterwards every session ends, and the mailbox with them."""
    made = Desk(places, queue)
    try:
        yield made
        made.check()
    finally:
        for session in made.opened:
            made.table.end(session.id, "stop")
            session.batches.close()
        made.orders.close()
        with made.drafter:
            assert made.table.empty
            assert made.mailbox.open_senders == 0
            made.table.check()


async def test_a_session_from_its_opening_to_its_end() -> None:
    with desk(places=1, queue=1) as d:
        session = d.open()
        assert (session.state, session.place, session.submitted) == ("queued", None, 1.0)
        assert d.table.get(session.id) is session
        assert await d.table.admit(session, d.orders) == 0
        assert (session.state, session.place, d.table.free) == ("live", 0, 0)
        assert session.deliver(Batch((5, 6)))
        assert session.deliver(Batch((7,)))
        assert (session.generated, session.first_token) == (3, 2.0)
        d.table.end(session.id, "stop")
        assert (session.state, session.place, session.orders) == ("ended", None, None)
        assert (session.finish_reason, session.error, session.ended) == ("stop", None, 3.0)
        assert [batch.tokens async for batch in session.batches] == [(5, 6), (7,)]
        with pytest.raises(KeyError):
            d.table.get(session.id)
        d.table.end(session.id, "error", ValueError("too late"))
        assert (session.finish_reason, session.error) == ("stop", None)


async def test_the_outbox_has_room_for_every_token() -> None:
    with desk(places=1, queue=1) as d:
        session = await d.live()
        for token in range(session.request.max_tokens):
            assert session.deliver(Batch((token,)))


async def test_a_caller_who_has_gone_cancels() -> None:
    with desk(places=1, queue=1) as d:
        session = await d.live()
        session.batches.close()
        assert not session.deliver(Batch((5,)))
        assert session.cancelled
        assert (session.generated, session.first_token) == (0, None)


async def test_the_queue_is_bounded_over_places_and_queue_together() -> None:
    with desk(places=2, queue=1) as d:
        first = d.open()
        d.open()
        d.open()
        with pytest.raises(BusyError) as busy:
            d.open()
        assert (busy.value.waiting, busy.value.limit) == (1, 1)
        await d.table.admit(first, d.orders)
        with pytest.raises(BusyError):
            d.open()
        d.table.end(first.id, "length")
        d.open()


async def test_without_a_queue_only_places_are_given() -> None:
    with desk(places=1, queue=0) as d:
        session = d.open()
        with pytest.raises(BusyError):
            d.open()
        d.table.cancel(session.id)
        await d.live()


async def test_cancelling_ends_a_queued_session_and_marks_a_live_one() -> None:
    with desk(places=1, queue=2) as d:
        live, queued = await d.live(), d.open()
        d.table.cancel(live.id)
        d.table.cancel(queued.id)
        assert (live.over.is_set(), queued.over.is_set()) == (False, True)
        assert (live.state, live.cancelled) == ("live", True)
        assert (queued.state, queued.finish_reason) == ("ended", "cancelled")
        with pytest.raises(EndOfMail):
            await queued.batches.receive()
        d.table.cancel(queued.id)
        d.table.cancel(99)
        d.open()
        d.table.cancel_all()
        assert d.table.waiting == 0


async def test_cancelling_wakes_who_waits_to_admit() -> None:
    with desk(places=1, queue=2) as d:
        await d.live()
        queued = d.open()
        async with asyncio.TaskGroup() as group:
            admission = group.create_task(d.table.admit(queued, d.orders))
            await settle()
            assert not admission.done()
            d.table.cancel(queued.id)
        assert admission.result() is None


async def test_cancelling_wakes_who_waits_behind_another() -> None:
    with desk(places=1, queue=2) as d:
        live, first, second = await d.live(), d.open(), d.open()
        async with asyncio.TaskGroup() as group:
            admissions = [group.create_task(d.table.admit(s, d.orders)) for s in (first, second)]
            await settle()
            d.table.cancel(second.id)
            await settle()
            assert [a.done() for a in admissions] == [False, True]
            d.table.end(live.id, "stop")
        assert [a.result() for a in admissions] == [0, None]


async def test_a_freed_place_goes_to_the_next_in_line() -> None:
    with desk(places=1, queue=2) as d:
        live, second, third = await d.live(), d.open(), d.open()
        async with asyncio.TaskGroup() as group:
            admissions = [group.create_task(d.table.admit(s, d.orders)) for s in (second, third)]
            await settle()
            d.table.end(live.id, "stop")
            await settle()
            assert [a.done() for a in admissions] == [True, False]
            d.table.end(second.id, "stop")
        assert third.state == "live"


async def test_admission_cancelled_in_the_turn_of_its_call_takes_no_place() -> None:
    with desk(places=1, queue=2) as d:
        live, second, third = await d.live(), d.open(), d.open()
        async with asyncio.TaskGroup() as group:
            admission = group.create_task(d.table.admit(second, d.orders))
            behind = group.create_task(d.table.admit(third, d.orders))
            await settle()
            d.table.end(live.id, "stop")
            admission.cancel()
        assert (second.state, third.state) == ("queued", "live")
        assert behind.result() == 0


async def test_admission_through_a_closed_sender_takes_no_place() -> None:
    with desk(places=1, queue=1) as d:
        session = d.open()
        closed = d.orders.clone()
        closed.close()
        with pytest.raises(ClosedResourceError):
            await d.table.admit(session, closed)
        assert (session.state, d.table.free) == ("queued", 1)


async def test_a_closed_table_lets_its_sessions_go_on() -> None:
    with desk(places=1, queue=1) as d:
        session = d.open()
        d.table.close()
        with pytest.raises(EngineClosedError):
            d.open()
        assert await d.table.admit(session, d.orders) == 0


async def test_a_failure_reaches_every_caller_once_and_for_all() -> None:
    error = EngineError("verifier", ValueError("boom"))
    with desk(places=1, queue=2) as d:
        live, queued = await d.live(), d.open()
        async with asyncio.TaskGroup() as group:
            admission = group.create_task(d.table.admit(queued, d.orders))
            await settle()
            d.table.fail_all(error)
        assert admission.result() is None
        d.table.fail_all(EngineError("drafter", ValueError("later")))
        for session in (live, queued):
            assert (session.finish_reason, session.error) == ("error", error)
            with pytest.raises(EndOfMail):
                await session.batches.receive()
        with pytest.raises(EngineError) as raised:
            d.open()
        assert raised.value is error


async def test_the_mailbox_ends_exactly_when_admission_is_closed_and_none_lives() -> None:
    mailbox, orders, drafter = drafter_mail(2)
    table = SessionTable(2, 2)
    sessions = [table.open(made_request(number)) for number in range(3)]
    with drafter:
        for session in sessions[:2]:
            await table.admit(session, orders)
        orders.close()
        table.end(0, "stop")
        with pytest.raises(WouldBlock):
            drafter.receive_nowait()
        # The last session's last order is still read before the end.
        last = sessions[1].orders
        assert last is not None
        last.send_nowait(DraftOrder(1, 1, token=5, position=3))
        table.end(1, "stop")
        assert drafter.receive_nowait() == DraftOrder(1, 1, token=5, position=3)
        with pytest.raises(EndOfMail):
            drafter.receive_nowait()
    table.cancel(2)
    mailbox.check()
    table.check()
    for session in sessions:
        session.batches.close()


async def test_admit_cancelled_at_any_turn_is_all_or_nothing() -> None:
    """Cancel by asyncio and by scope, at each turn from the first to the last and beyond."""
    for by_scope in (False, True):
        outcomes = [await admit_and_cancel(turn, by_scope) for turn in range(8)]
        assert outcomes[0] == "queued"
        assert outcomes[-1] == "live"
        assert outcomes == sorted(outcomes, reverse=True)


async def admit_and_cancel(turn: int, by_scope: bool) -> str:
    """A place is freed at turn 2; the task that waits for it is cancelled at turn `turn`."""
    with desk(places=1, queue=1) as d:
        live, session, scope = await d.live(), d.open(), anyio.CancelScope()

        async def admit() -> int | None:
            with scope:
                return await d.table.admit(session, d.orders)
            return None

        async with asyncio.TaskGroup() as group:
            admission = group.create_task(admit())
            for now in range(9):
                if now == 2:
                    d.table.end(live.id, "stop")
                if now == turn:
                    scope.cancel() if by_scope else admission.cancel()
                await turns(1)
                d.check()
        placed = not admission.cancelled() and admission.result() == 0
        assert placed == (session.state == "live")
        return session.state


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "admit", "cancel", "end", "cancel task", "cancel scope", "turns"],
        ),
        st.integers(0, 30),
    ),
    max_size=60,
)


class Clerks:
    """Tasks that wait in `admit`, each for its own session, with what came of them."""

    def __init__(self, d: Desk, group: asyncio.TaskGroup) -> None:
        self.desk = d
        self.group = group
        self.tasks: list[asyncio.Task[None]] = []
        self.scopes: list[anyio.CancelScope] = []
        self.asked: set[int] = set()
        """Sessions that a task waits for, or that live."""
        self.placed: list[int] = []

    def start(self, session: Session) -> None:
        if session.id not in self.asked:
            self.asked.add(session.id)
            scope = anyio.CancelScope()
            self.scopes.append(scope)
            self.tasks.append(self.group.create_task(self.admit(session, scope)))

    async def admit(self, session: Session, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                place = await self.desk.table.admit(session, self.desk.orders)
                assert session.place == place
                assert session.state == ("ended" if place is None else "live")
                if place is not None:
                    self.placed.append(session.id)
                return
        finally:
            if session.state != "live":
                assert session.place is None
                self.asked.discard(session.id)

    def do(self, step: str, value: int) -> None:
        d = self.desk
        if step == "open":
            room = d.table.places + d.table.queue - d.table.live - d.table.waiting
            if room:
                d.open()
            else:
                with pytest.raises(BusyError):
                    d.open()
        elif step in ("admit", "cancel", "end") and d.opened:
            session = d.opened[value % len(d.opened)]
            if step == "admit" and session.state != "live":
                self.start(session)
            elif step == "cancel":
                d.table.cancel(session.id)
            elif step == "end":
                d.table.end(session.id, "stop")
        elif step == "cancel task" and self.tasks:
            self.tasks[value % len(self.tasks)].cancel()
        elif step == "cancel scope" and self.scopes:
            self.scopes[value % len(self.scopes)].cancel()


@settings(deadline=None)
@given(places=st.integers(1, 3), queue=st.integers(0, 3), steps=STEPS)
def test_places_and_ids_are_conserved(places: int, queue: int, steps: list[Step]) -> None:
    asyncio.run(run_steps(places, queue, steps))


async def run_steps(places: int, queue: int, steps: list[Step]) -> None:
    with desk(places, queue) as d:
        async with asyncio.TaskGroup() as group:
            clerks = Clerks(d, group)
            for step, value in steps:
                if step == "turns":
                    await turns(1 + value % 3)
                clerks.do(step, value)
                d.check()
            await settle()
            d.check()
            waiting = [task for task in clerks.tasks if not task.done()]
            assert not waiting or d.table.free == 0, "a place is free, but somebody waits"
            assert len(waiting) <= d.table.waiting, "somebody waits for an ended session"
            d.table.cancel_all()
            await settle()
            assert all(task.done() for task in clerks.tasks), "nobody waits for an ended session"
        assert len(clerks.placed) == len(set(clerks.placed))


async def test_a_thousand_cancels_leave_nothing_behind() -> None:
    with desk(places=2, queue=3) as d:
        async with asyncio.TaskGroup() as group:
            for number in range(1000):
                session = d.open()
                admission = group.create_task(d.table.admit(session, d.orders))
                await turns(number % 4)
                if number % 3:
                    d.table.cancel(session.id)
                if number % 5 == 0:
                    admission.cancel()
                await turns(number % 3)
                d.table.end(session.id, "cancelled")
                d.check()
        assert d.table.empty
