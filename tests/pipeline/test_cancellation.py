"""Cancelled anywhere, a request ends soon, leaves nothing behind, and disturbs nobody."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import preparation
from pipeline.engine import Engine
from pipeline.preparation import Interrupted, Prepared
from pipeline.settings import Settings
from pipeline.stream import TokenStream
from routing.errors import BusyError, EngineClosedError
from routing.mailboxes import Sender
from routing.messages import Failed, Verdict
from routing.sessions import SessionTable
from stages.device import Device
from stages.kv import KVStore
from stages.progress import Progress
from stages.verifier import Verifier
from tests import made
from tests.pipeline.made_engine import made_engine
from tests.pipeline.moments import Moments, idle, nothing_held

TOKENS = 5
IDS = made.make_prompt(320, 15, seed=1)
Plant = Callable[[pytest.MonkeyPatch], None]
Leave = Callable[[Engine, Moments, int, str | None], Awaitable[tuple[int, ...] | None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama")


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Moments:
    return Moments(monkeypatch)


async def by_task(
    engine: Engine, moments: Moments, when: int, name: str | None = None
) -> tuple[int, ...] | None:
    """The caller's task is cancelled."""
    task = asyncio.create_task(engine.generate(IDS, max_tokens=TOKENS))
    moments.after(when, task.cancel, name)
    try:
        return (await task).token_ids
    except asyncio.CancelledError:
        return None


async def by_scope(
    engine: Engine, moments: Moments, when: int, name: str | None = None
) -> tuple[int, ...] | None:
    """A scope around the call is cancelled, as a timeout does."""
    with anyio.CancelScope() as scope:
        moments.after(when, scope.cancel, name)
        return (await engine.generate(IDS, max_tokens=TOKENS)).token_ids
    return None


async def by_close(
    engine: Engine, moments: Moments, when: int, name: str | None = None
) -> tuple[int, ...] | None:
    """The stream is closed while its request is under way, without a look at it."""
    now = anyio.Event()
    moments.after(when, now.set, name)
    stream = engine.stream(IDS, max_tokens=TOKENS)
    async with anyio.create_task_group() as either:

        async def ends() -> None:
            await idle(engine)
            now.set()

        either.start_soon(ends)
        await now.wait()
        came_through = engine.sessions.empty
        if not came_through:
            await stream.aclose()
        either.cancel_scope.cancel()
    return (await stream.collect()).token_ids if came_through else None


async def by_break(
    engine: Engine, moments: Moments, when: int, name: str | None = None
) -> tuple[int, ...] | None:
    """The loop is left after some tokens, and the stream is dropped."""
    tokens: tuple[int, ...] = ()
    async for delta in engine.stream(IDS, max_tokens=TOKENS):
        tokens += delta.token_ids
        if len(tokens) > when % (2 * TOKENS):
            return None
    return tokens


async def strike(
    engine: Engine, moments: Moments, leave: Leave, when: int, name: str | None = None
) -> None:
    """Leave a request at a moment, and assert that it ends at once and that nothing is left."""
    moments.struck = len(moments.seen)
    tokens = await leave(engine, moments, when, name)
    moments.forget()
    await idle(engine)
    nothing_held(engine)
    # It may have come through: how many levels are drafted depends on the time they take.
    right = tuple(made.reference_generate(engine.runtime.opened.directory, IDS, TOKENS))
    assert tokens in (None, right)
    # The step under way is finished, and no more than that is computed.
    rest = Counter(moments.seen[moments.struck :]) if tokens is None else Counter()
    assert rest["verify Sweep"] <= 1, rest
    assert rest["verify _streamed"] <= 1, rest


@pytest.mark.parametrize(("leave", "stride"), [(by_task, 1), (by_scope, 3), (by_close, 3)])
async def test_cancelled_at_every_moment(
    model: Path, moments: Moments, leave: Leave, stride: int
) -> None:
    right = tuple(made.reference_generate(model, IDS, TOKENS))
    async with made_engine(model) as engine:
        whole = await engine.generate(IDS, max_tokens=TOKENS)
        assert whole.token_ids == right and whole.drafted > 0
        for when in range(0, len(moments.seen) - 2, stride):
            await strike(engine, moments, leave, when)
        assert (await engine.generate(IDS, max_tokens=TOKENS)).token_ids == right


def keep_rows(patch: pytest.MonkeyPatch) -> None:
    """The committer ends a session without giving its rows of KV back."""
    patch.setattr(KVStore, "reset", lambda *_: None)


def keep_the_place(patch: pytest.MonkeyPatch) -> None:
    """A session that ends is not followed by another."""
    end = SessionTable.end

    def planted(table: SessionTable, *args: Any) -> None:
        end(table, *args)
        if table._free:
            table._free.pop()

    patch.setattr(SessionTable, "end", planted)


def lose_a_message(patch: pytest.MonkeyPatch) -> None:
    """A mailbox counts a message that it has not taken."""
    send = Sender.send_nowait

    def planted(sender: Sender[Any], item: Any) -> None:
        send(sender, item)
        sender._counter.sent += isinstance(item, Verdict | Failed)

    patch.setattr(Sender, "send_nowait", planted)


def finish_the_sweep(patch: pytest.MonkeyPatch) -> None:
    """A sweep that all have left is computed to its end."""
    patch.setattr(Verifier, "_all_cancelled", lambda *_: False)


def cancel_nothing(patch: pytest.MonkeyPatch) -> None:
    """The stream that was left does not tell."""
    patch.setattr(SessionTable, "cancel", lambda *_: None)


@pytest.mark.parametrize(
    "plant", [keep_rows, keep_the_place, lose_a_message, finish_the_sweep, cancel_nothing]
)
async def test_a_planted_leak_is_noticed(
    model: Path, moments: Moments, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    """The test above is worth something."""
    plant(monkeypatch)
    second_sweep = 5  # of as many steps

    async def strikes() -> None:
        async with made_engine(model) as engine:
            await strike(engine, moments, by_task, second_sweep, "verify _streamed")

    with pytest.raises(AssertionError):
        await strikes()


async def test_a_hundred_and_more_at_random(tmp_path: Path, moments: Moments) -> None:
    """Six callers, three places, and someone leaves all the time; who stays is answered right."""
    # With fewer layers all weights fit beside three sessions, and nothing is drafted.
    model = made.make_model(tmp_path / "made", "llama", layers=8)
    dice = random.Random(5)
    right = tuple(made.reference_generate(model, IDS, TOKENS))
    left: Counter[bool] = Counter()

    async def caller(engine: Engine) -> None:
        for _ in range(18):
            leave = dice.choice([by_task, by_scope, by_break])
            tokens = await leave(engine, moments, dice.randrange(120), None)
            assert tokens in (None, right), leave
            left[tokens is None] += 1
            engine.check()

    async with made_engine(model, sessions=3) as engine:
        async with anyio.create_task_group() as callers:
            for _ in range(6):
                callers.start_soon(caller, engine)
        await idle(engine)
        nothing_held(engine)
        last = await engine.generate(IDS, max_tokens=TOKENS)
        assert last.token_ids == right and last.drafted > 0
    assert left[True] >= 60 and left[False] >= 10, left


async def test_a_thousand_before_anyone_looks(model: Path) -> None:
    """Asked and given up in one turn of the loop: the bell is full, the table is not."""
    async with made_engine(model, queue=2) as engine:
        for _ in range(1000):
            stream = engine.stream(IDS)
            engine.sessions.cancel(stream._session.id)
            assert [delta.finish_reason async for delta in stream] == ["cancelled"]
        for _ in range(1000):
            engine.sessions.cancel(engine.stream(IDS)._session.id)
        answer = await engine.generate(IDS, max_tokens=1)
        assert list(answer.token_ids) == made.reference_generate(model, IDS, 1)
        nothing_held(engine)


def test_control_c(model: Path, moments: Moments) -> None:
    """asyncio.run cancels the main task; all is closed on its way out."""
    devices: list[Device] = []

    async def main() -> None:
        async with made_engine(model) as engine:
            devices.append(engine.runtime.device)
            moments.after(11, lambda: signal.raise_signal(signal.SIGINT))
            await engine.generate(IDS, max_tokens=60)

    # Whoever runs the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert devices[0].memory.held == 0


async def test_while_queued(model: Path) -> None:
    async with made_engine(model) as engine, engine.stream(IDS, max_tokens=TOKENS) as first:
        await anext(first)
        queued = [asyncio.create_task(engine.generate(IDS, max_tokens=2)) for _ in range(3)]
        await anyio.lowlevel.checkpoint()
        assert engine.sessions.waiting == 3
        queued[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued[1]
        assert engine.sessions.waiting == 2, "a queued request holds nothing and ends at once"
        right = made.reference_generate(model, IDS, TOKENS)
        assert list((await first.collect()).token_ids) == right
        for task in (queued[0], queued[2]):
            assert list((await task).token_ids) == right[:2]
        nothing_held(engine)


async def test_a_request_that_was_cancelled_gives_up_its_place_in_the_queue(model: Path) -> None:
    async with made_engine(model, queue=1) as engine:
        live, queued = engine.stream(IDS), engine.stream(IDS)
        with pytest.raises(BusyError):
            engine.stream(IDS)
        await queued.aclose()
        await engine.stream(IDS).aclose()
        await live.aclose()
        nothing_held(engine)


@pytest.mark.parametrize("when", range(0, 34, 3))
async def test_closed_while_requests_run(model: Path, moments: Moments, when: int) -> None:
    """One lives, one waits; whatever is under way, both are told that the engine has closed."""
    struck = anyio.Event()
    moments.after(when, struck.set)
    told: list[object] = []

    async def generate(engine: Engine) -> None:
        try:
            told.append(await engine.generate(IDS, max_tokens=60))
        except Exception as error:
            told.append(error)

    async def loop(stream: TokenStream) -> None:
        try:
            told.append([delta async for delta in stream][-1].finish_reason)
        except Exception as error:
            told.append(error)

    async with made_engine(model) as engine, anyio.create_task_group() as callers:
        callers.start_soon(loop, engine.stream(IDS, max_tokens=60))
        callers.start_soon(generate, engine)
        await struck.wait()
        await engine.close()
        nothing_held(engine)
    assert "cancelled" in told and len(told) == 2, told
    assert any(isinstance(one, EngineClosedError) for one in told), told
    with pytest.raises(EngineClosedError):
        engine.stream(IDS)


async def test_closing_survives_its_callers_cancellation(model: Path, moments: Moments) -> None:
    """A bare Task.cancel, as asyncio.timeout and Ctrl-C send it, passes through anyio's shields."""
    begun = anyio.Event()
    moments.after(4, begun.set)
    async with made_engine(model) as engine:
        stream = engine.stream(IDS, max_tokens=60)
        await begun.wait()
        closing = asyncio.create_task(engine.close())
        await anyio.lowlevel.checkpoint()
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing
        await engine.close()
        assert engine.runtime.device.memory.held == 0
        assert [delta.finish_reason async for delta in stream][-1] == "cancelled"


async def test_whoever_closes_a_second_time_waits_for_the_first(
    model: Path, moments: Moments
) -> None:
    begun = anyio.Event()
    moments.after(4, begun.set)

    async def close(engine: Engine) -> None:
        await engine.close()
        assert engine.runtime.device.memory.held == 0, "close returned before all was freed"

    async with made_engine(model) as engine, anyio.create_task_group() as group:
        stream = engine.stream(IDS, max_tokens=60)
        await begun.wait()
        group.start_soon(close, engine)
        group.start_soon(close, engine)
        del stream


@pytest.mark.parametrize("bare", [True, False])
async def test_cancelled_while_it_opens(monkeypatch: pytest.MonkeyPatch, bare: bool) -> None:
    """The work of opening ends at its next step of progress, whichever way it is cancelled."""
    loop, working, interrupted = asyncio.get_running_loop(), anyio.Event(), threading.Event()

    def endless(settings: Settings, progress: Progress, *_: object) -> Prepared:
        for _ in range(4000):
            try:
                progress.step("made", 0, 1)
            except Interrupted:
                interrupted.set()
                raise
            loop.call_soon_threadsafe(working.set)
            interrupted.wait(0.01)  # the pace of its steps
        raise ValueError("it went on to its end")

    monkeypatch.setattr(preparation, "_prepare", endless)
    async with anyio.create_task_group() as group:

        async def opens() -> None:
            async with Engine.open("made"):
                pass

        if bare:
            opening = asyncio.create_task(opens())
        else:
            group.start_soon(opens)
        await working.wait()
        if bare:
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        group.cancel_scope.cancel()
    assert interrupted.is_set()


async def test_deltas_after_a_cancel_are_those_of_a_closed_stream(model: Path) -> None:
    async with made_engine(model) as engine:
        stream = engine.stream(IDS, max_tokens=TOKENS)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        assert [delta async for delta in stream] == []
        await idle(engine)
        nothing_held(engine)
