"""Tests of the router: routes, skips, pushes back, closes, and is cancelled at any turn."""

from __future__ import annotations

import asyncio
import contextlib
import random

import anyio
import pytest
from anyio import BrokenResourceError, WouldBlock
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.errors import BusyError
from routing.mailboxes import EndOfMail, Mailbox, Receiver
from routing.messages import Batch, DraftOrder, Request, Route, Routed, ToDrafter
from routing.router import FixedPolicy, Policy, Router
from routing.sessions import Session, SessionTable
from routing.trace import Trace
from tests.routing.made import drafter_mail, made_request
from tests.routing.turns import settle, turns

ROUTE = Route(width=2, depth=3, budget=5, reasons=("made",))


class Office:
    """A router with its mailboxes, and the caller's and the drafter's ends of them."""

    def __init__(self, places: int = 1, queue: int = 4, policy: Policy | None = None) -> None:
        self.table = SessionTable(places, queue)
        self.admission = Mailbox[int]("admission", places + queue)
        self.submit = self.admission.sender()
        self.trace = Trace()
        self.mailbox, orders, self.drafter = drafter_mail(places)
        self.router = Router(
            self.admission.receiver(),
            orders,
            self.table,
            FixedPolicy(ROUTE) if policy is None else policy,
            self.trace,
        )
        self.admission.seal()
        self.opened: list[Session] = []

    def open(self) -> Session:
        session = self.table.open(made_request(len(self.opened)))
        self.opened.append(session)
        with contextlib.suppress(WouldBlock):
            self.submit.send_nowait(session.id)
        return session

    def close(self) -> None:
        """Close every end that a caller or the drafter holds."""
        self.submit.close()
        self.drafter.close()
        for session in self.opened:
            self.table.end(session.id, "stop")
            session.batches.close()
        self.table.check()
        self.mailbox.check()
        self.admission.check()
        assert self.mailbox.open_senders == 0
        assert self.admission.open_receivers == 0


async def test_routes_admits_and_tells_the_drafter() -> None:
    office = Office(places=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(office.router.run())
        first, second = office.open(), office.open()
        assert await office.drafter.receive() == Routed(0, 0, ROUTE)
        assert await office.drafter.receive() == Routed(1, 1, ROUTE)
        assert (first.state, first.route, second.state) == ("live", ROUTE, "live")
        office.submit.close()
    assert [(s.stage, s.session) for s in office.trace.spans()] == [("route", 0), ("route", 1)]
    office.close()


async def test_requests_wait_for_a_place_in_order_and_the_cancelled_are_skipped() -> None:
    office = Office(places=1)
    async with asyncio.TaskGroup() as group:
        group.create_task(office.router.run())
        sessions = [office.open() for _ in range(5)]
        assert await office.drafter.receive() == Routed(0, 0, ROUTE)
        await settle()
        office.table.cancel(1)  # The router waits on its behalf.
        office.table.cancel(3)  # Still in the admission queue.
        await settle()
        with pytest.raises(WouldBlock):
            office.drafter.receive_nowait()
        for expected in (2, 4):
            office.table.end(expected - 2, "stop")
            assert await office.drafter.receive() == Routed(expected, 0, ROUTE)
        assert sessions[3].finish_reason == "cancelled"
        office.submit.close()
    office.close()


async def test_a_cancelled_head_does_not_hold_up_the_rest() -> None:
    office = Office(places=1, queue=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(office.router.run())
        for _ in range(3):
            office.open()
        await settle()
        with pytest.raises(BusyError):
            office.table.open(made_request(99))
        office.table.cancel(1)
        assert office.open().state == "queued"
        await settle()
        office.submit.close()
        office.table.cancel_all()
        office.table.end(0, "cancelled")
    office.close()


async def test_ids_of_the_cancelled_that_fill_the_mailbox_hold_nobody_up() -> None:
    office = Office(places=1, queue=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(office.router.run())
        office.open(), office.open()
        assert await office.drafter.receive() == Routed(0, 0, ROUTE)
        await settle()
        for _ in range(20):
            office.table.cancel(office.open().id)
        assert office.admission.waiting == office.admission.places
        last = office.open()
        office.submit.close()
        office.table.end(0, "stop")
        assert await office.drafter.receive() == Routed(1, 0, ROUTE)
        office.table.end(1, "stop")
        assert await office.drafter.receive() == Routed(last.id, 0, ROUTE)
    office.close()


async def test_closing_admission_lets_those_who_wait_in_and_then_closes() -> None:
    office = Office(places=1)
    async with asyncio.TaskGroup() as group:
        router = group.create_task(office.router.run())
        office.open(), office.open()
        office.submit.close()
        await settle()
        assert not router.done()
        assert office.drafter.receive_nowait() == Routed(0, 0, ROUTE)
        office.table.end(0, "stop")
        await settle()
        assert router.done()
        # The router has closed its end; the session that lives keeps the mailbox open.
        assert office.drafter.receive_nowait() == Routed(1, 0, ROUTE)
        with pytest.raises(WouldBlock):
            office.drafter.receive_nowait()
        office.table.end(1, "stop")
        with pytest.raises(EndOfMail):
            office.drafter.receive_nowait()
    office.close()


class Picky:
    """Fails for one request."""

    def route(self, request: Request) -> Route:
        if request.id == 0:
            raise ValueError("no route")
        return ROUTE


async def test_a_policy_that_fails_fails_its_request_alone() -> None:
    office = Office(policy=Picky())
    async with asyncio.TaskGroup() as group:
        group.create_task(office.router.run())
        failed = office.open()
        office.open()
        assert await office.drafter.receive() == Routed(1, 0, ROUTE)
        office.submit.close()
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, ValueError)
    office.close()


async def test_a_drafter_that_has_gone_kills_the_router_and_every_end_is_closed() -> None:
    office = Office()
    office.drafter.close()
    session = office.open()
    with pytest.raises(BrokenResourceError):
        await office.router.run()
    with pytest.raises(BrokenResourceError):
        office.submit.send_nowait(5)
    office.table.fail_all(RuntimeError("the drafter has gone"))
    assert session.finish_reason == "error"
    office.close()


async def test_cancelled_at_any_turn_every_live_session_has_its_message() -> None:
    for by_scope in (False, True):
        admitted = [await cancel_the_router(turn, by_scope) for turn in range(1, 20)]
        assert admitted == sorted(admitted)
        assert (admitted[0], admitted[-1]) == (0, 3)


async def cancel_the_router(turn: int, by_scope: bool) -> int:
    """Two places, four requests; a place is freed at turn 8; the router is cancelled at `turn`."""
    office, scope = Office(places=2), anyio.CancelScope()
    told: list[ToDrafter] = []

    async def run() -> None:
        with scope:
            await office.router.run()

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            office.open()
        router = group.create_task(run())
        for now in range(1, 20):
            await turns(1)
            told += [office.drafter.receive_nowait() for _ in range(office.mailbox.waiting)]
            if now == 8:
                office.table.end(0, "stop")
            if now == turn:
                scope.cancel() if by_scope else router.cancel()
            office.table.check()
    told += [office.drafter.receive_nowait() for _ in range(office.mailbox.waiting)]
    routed = {message.session for message in told}
    assert len(routed) == len(told)
    assert {s.id for s in office.opened if s.state == "live"} == routed - {0}
    office.close()
    return len(told)


class Loop:
    """Drafter, verifier and committer in one: a random number of rounds for each session."""

    def __init__(self, office: Office, seed: int) -> None:
        self.office = office
        self.random = random.Random(seed)
        self.seen: list[int] = []

    async def run(self, drafter: Receiver[ToDrafter]) -> None:
        async for message in drafter:
            session = self.office.table.get(message.session)
            if isinstance(message, Routed):
                self.seen.append(session.id)
            assert session.place == message.place
            await turns(self.random.randrange(3))
            self.commit(session)
            self.office.table.check()

    def commit(self, session: Session) -> None:
        assert session.place is not None
        assert session.orders is not None
        if session.cancelled or not session.deliver(Batch((7,))):
            self.office.table.end(session.id, "cancelled")
        elif session.generated == session.request.max_tokens:
            self.office.table.end(session.id, "length")
        elif self.random.random() < 0.1:
            self.office.table.end(session.id, "error", ValueError("made"))
        else:
            session.orders.send_nowait(DraftOrder(session.id, session.place, 7, 0))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    places=st.integers(1, 3),
    queue=st.integers(0, 3),
    callers=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from(["read", "cancel", "leave"])), max_size=12
    ),
)
def test_the_whole_round_ends_empty(
    seed: int, places: int, queue: int, callers: list[tuple[int, str]]
) -> None:
    asyncio.run(run_round(seed, places, queue, callers))


async def run_round(seed: int, places: int, queue: int, callers: list[tuple[int, str]]) -> None:
    office = Office(places, queue)
    loop = Loop(office, seed)

    async def call(patience: int, manner: str) -> None:
        await turns(patience)
        try:
            session = office.open()
        except BusyError:
            return
        got = [] if manner != "read" else [batch.tokens async for batch in session.batches]
        await turns(patience)
        if manner == "cancel":
            office.table.cancel(session.id)
        session.batches.close()
        if manner == "read" and session.finish_reason == "length":
            assert len(got) == session.request.max_tokens

    async with anyio.create_task_group() as actors:
        actors.start_soon(office.router.run)
        actors.start_soon(loop.run, office.drafter)
        async with anyio.create_task_group() as group:
            for patience, manner in callers:
                group.start_soon(call, patience, manner)
        office.table.close()
        office.submit.close()
    # Both actors have ended by themselves: closing ran round.
    assert office.table.empty
    assert office.mailbox.waiting == office.admission.waiting == 0
    assert sorted(loop.seen) == loop.seen, "admitted in order"
    office.close()
