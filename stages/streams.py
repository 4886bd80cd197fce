"""Streams and events: how blocking work leaves the event loop and how its end is told.

A stream is one worker thread that runs what is launched on it, in order, as a CUDA stream does.
An event is the completion of one such piece of work, or of a link's transfer. Awaiting an event
is shielded: a worker that writes into a store must never be abandoned, so a cancelled task first
waits for the work to end and is cancelled then. Ordering across streams is by `after`.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
import torch

from routing.errors import EngineClosedError
from stages.cores import Cores

T = TypeVar("T")
Delay = Callable[[], None]


def random_delay(generator: random.Random, longest: float = 0.002) -> Delay:
    """A pause of 0 to `longest` seconds in the calling thread: tests shake orders loose with it."""
    return lambda: time.sleep(generator.random() * longest)


class Event(Generic[T]):
    """The completion of one piece of work that was launched; its result or its exception.

    `await event` and `wait()` may be used any number of times, by any number of tasks and
    threads, before and after the end. Whoever makes an event calls `resolve` or `fail` once.
    """

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: Future[T] = Future()

    def resolve(self, value: T) -> None:
        """Ends the event with a result, from any thread."""
        self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Ends the event with an exception, from any thread."""
        self._future.set_exception(error)

    def done(self) -> bool:
        """Whether the work has ended, well or badly."""
        return self._future.done()

    def wait(self) -> T:
        """Blocks the calling thread until the end; returns the result or raises the exception."""
        return self._future.result()

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls `call` once at the end, in the thread that ends it (or here, if it has ended).

        `call` must be short and must not raise.
        """
        self._future.add_done_callback(lambda _: call())

    def __await__(self) -> Generator[Any, None, T]:
        return self._finish().__await__()

    async def _finish(self) -> T:
        if not self._future.done():
            await self.ended()
        return self._future.result()

    async def ended(self) -> None:
        """Waits for the end, shielded, without taking the result or raising the exception."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop was closed by force: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        self.when_done(tell)
        cancelled: asyncio.CancelledError | None = None
        # The shielded scope holds off anyio's cancellation, which would come again at every turn
        # of the loop; a bare Task.cancel() passes through a shield and is caught here.
        with anyio.CancelScope(shield=True):
            while not self._future.done():
                try:
                    await ended.wait()
                except asyncio.CancelledError as error:
                    cancelled = error
        if cancelled is not None:
            raise cancelled
        await anyio.lowlevel.checkpoint_if_cancelled()


async def settle(events: Iterable[Event[Any]]) -> None:
    """Waits until all events have ended, well or badly; only then lets a cancellation through."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        for event in events:
            try:
                await event.ended()
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    await anyio.lowlevel.checkpoint_if_cancelled()


class _Work(Generic[T]):
    """One launched call and its event."""

    __slots__ = ("after", "args", "event", "fn")

    def __init__(self, fn: Callable[..., T], args: tuple[Any, ...], after: Sequence[Event[Any]]):
        self.fn = fn
        self.args = args
        self.after = after
        self.event: Event[T] = Event()

    def run(self, cores: Cores | None, name: str, delay: Delay | None) -> None:
        try:
            for event in self.after:  # before any core is claimed: who waits holds nothing
                event.wait()
            if delay is not None:
                delay()
            result = self._call(cores, name)
        except BaseException as error:
            self.event.fail(error)
        else:
            self.event.resolve(result)

    def _call(self, cores: Cores | None, name: str) -> T:
        if cores is None:
            return self.fn(*self.args)
        with cores.claim(name) as threads:
            if threads > 1:
                return cores.in_lane(lambda: self._widely(threads))
            torch.set_num_threads(threads)
            return self.fn(*self.args)

    def _widely(self, threads: int) -> T:
        torch.set_grad_enabled(False)
        # A new thread's width is set lazily: have that over with, lest it undo what comes next.
        torch.get_num_threads()
        torch.set_num_threads(threads)
        return self.fn(*self.args)


class Stream:
    """One worker thread that runs what is launched on it, in order.

    The worker computes without gradients (torch's grad mode belongs to a thread, so the
    launcher's does not reach it). With `cores`, each piece of work claims its intra-op threads
    first. `delay`, if given, runs in the worker before each piece of work.
    """

    def __init__(self, name: str, cores: Cores | None = None, delay: Delay | None = None) -> None:
        self.name = name
        self._cores = cores
        self._delay = delay
        self._pending: deque[_Work[Any]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        # A daemon, so that an engine that was never closed does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def launch(
        self, fn: Callable[..., T], *args: Any, after: Sequence[Event[Any]] = ()
    ) -> Event[T]:
        """Queues fn(*args) behind what was launched before; returns at once.

        It runs when every event of `after` has ended well; if one of them failed, fn is not
        called and the new event fails with that same exception. Raises EngineClosedError once
        the stream is closed.
        """
        work = _Work(fn, args, tuple(after))
        with self._wake:
            if self._closing:
                raise EngineClosedError()
            self._pending.append(work)
            self._wake.notify()
        return work.event

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Launches fn(*args) and waits for its result, shielded as `await event` is."""
        return await self.launch(fn, *args)

    def close(self) -> None:
        """Runs what is still queued, then joins the thread. Blocks; may be called again."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        if self._cores is not None:
            # torch sets a new thread's width lazily, from the value that any thread set last.
            # Have that over with now, lest it undo a claim later.
            torch.get_num_threads()
        while (work := self._next()) is not None:
            work.run(self._cores, self.name, self._delay)
            del work  # an idle worker keeps no tensors alive

    def _next(self) -> _Work[Any] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._pending or self._closing)
            return self._pending.popleft() if self._pending else None
