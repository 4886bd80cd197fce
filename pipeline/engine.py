"""The engine: what a program embeds.

    async with Engine.open(model, memory="200MiB") as engine:
        async for delta in engine.stream("Once upon a time", max_tokens=64):
            print(delta.text, end="")
        answer = await engine.generate(messages=[{"role": "user", "content": "Hello"}])

An engine lives on the event loop that opened it. One task of its own hosts the actors, so it may be
opened in one task and closed in another.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from pipeline.answers import Answer
from pipeline.options import NAMES, RequestOptions
from pipeline.preparation import Prepared, prepare
from pipeline.requests import make_request
from pipeline.settings import Settings
from pipeline.stream import TokenStream
from pipeline.topology import Topology
from routing.errors import EngineClosedError, EngineError, OptionError
from routing.log import log
from routing.messages import Route
from routing.router import FixedPolicy
from routing.sessions import SessionTable
from routing.trace import Trace
from stages.progress import Progress, SilentProgress
from stages.tokenizer import Message


class Engine:
    """A loaded model that answers. Make it with `Engine.open`."""

    def __init__(self, settings: Settings, prepared: Prepared) -> None:
        """Use `Engine.open`. Must run on the event loop."""
        self.settings = settings
        self.plan = prepared.plan
        self.trace = Trace()
        self.runtime = prepared.runtime
        self._prepared = prepared
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        placement = self.plan.placement
        self.sessions = SessionTable(placement.sessions, settings.queue)
        # As deep as its nodes go: what a level is worth, the drafter finds out.
        nodes = placement.tree_budget
        route = Route(width=self.plan.width, depth=nodes, budget=nodes)
        self.topology = Topology(
            self.runtime, prepared.tokenizer, self.sessions, FixedPolicy(route), self.trace
        )
        if placement.slots and self.plan.step != "substitutes":
            self._warn(settings.substitute)
        # The host outlives any one caller's task; `close` awaits it.
        self._host = asyncio.create_task(self._run(), name="paceline")
        self._closing: asyncio.Task[None] | None = None

    @staticmethod
    def open(
        model: str | Path | None = None, *, progress: Progress | None = None, **settings: Any
    ) -> Opening:
        """Open a model: a directory, a GGUF file, a Hugging Face id, or None for the default.

        `settings` are the fields of Settings (memory="200MiB", context=…, sessions=…); what is
        not given comes from PACELINE_* variables. Use the result with `async with`, or await it
        and call `close` yourself. Raises UsageError when it cannot be opened as asked.
        """
        if model is not None:
            settings["model"] = str(model)
        return Opening(Settings.from_environment(**settings), progress or SilentProgress())

    @staticmethod
    def open_with(settings: Settings, progress: Progress | None = None) -> Opening:
        """As `open`, with settings already made."""
        return Opening(settings, progress or SilentProgress())

    def _warn(self, asked: str) -> None:
        """Say what was not asked for, lest it is slow in silence."""
        why = " | ".join(self.plan.reasons)
        if self.plan.step == "lookup" and asked != "lookup":
            log.warning("no substitutes: drafts are looked up in the text alone", why=why)
        elif self.plan.step == "plain" and asked != "none":
            log.warning("speculation is off: one token a sweep", why=why)

    async def _run(self) -> None:
        try:
            await self.topology.run()
        except EngineError as error:
            self.sessions.fail_all(error)
        finally:
            self.sessions.fail_all(EngineClosedError())

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[RequestOptions],
    ) -> TokenStream:
        """Ask for an answer and return its stream at once.

        prompt: text, or token ids, continued as it is; messages: a conversation, put through the
        model's chat template. Exactly one of them. `options` are those of RequestOptions; the seed
        in use is `stream.seed`. Raises OptionError, ContextLengthError, BusyError,
        EngineClosedError, or the EngineError that closed the engine; RuntimeError on another event
        loop than the engine's.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("An engine answers on the event loop that opened it, and no other.")
        request = make_request(
            next(self._ids),
            prompt,
            messages,
            options,
            settings=self.settings,
            tokenizer=self._prepared.tokenizer,
            vocab=self.runtime.opened.shape.vocab,
            context=self.plan.placement.context,
            stop_ids=self._prepared.stop_ids,
        )
        session = self.sessions.open(request)
        stream = TokenStream(session, self.sessions)
        with suppress(anyio.WouldBlock):
            # The table is the queue and the mailbox only its bell: a full one rings all the same.
            self.topology.admission.send_nowait(session.id)
        return stream

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """The whole answer; see `stream`. Cancelling it ends the request."""
        async with self.stream(prompt, messages=messages, **options) as stream:
            return await stream.collect()

    @property
    def has_chat_template(self) -> bool:
        """Whether `messages` can be used."""
        tokenizer = self._prepared.tokenizer
        return tokenizer is not None and tokenizer.has_chat_template

    def check(self) -> None:
        """Assert conservation in every mailbox, store and table."""
        self.sessions.check()
        self.topology.check()
        self.runtime.check()
        if self.sessions.empty and not self._host.done():
            assert not self.runtime.kv.rows_held, "rows without a session"

    async def close(self) -> None:
        """End all requests, stop the actors, free everything. Calling it again does nothing.

        Takes at most about one sweep. Whoever still holds a stream finds it cancelled; whoever
        closes a second time waits for the first.
        """
        if self._closing is None:
            # A task of its own: the cancellation of whoever closes must not stop it half-way.
            self._closing = asyncio.create_task(self._close(), name="paceline closing")
        await finished(self._closing)

    async def _close(self) -> None:
        self.sessions.close()
        self.sessions.cancel_all()
        self.topology.admission.close()
        await asyncio.wait([self._host])
        await anyio.to_thread.run_sync(self.runtime.close)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def finished(task: asyncio.Task[None]) -> None:
    """Wait for a task to its end, and let a cancellation of the waiting through only then."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
    await anyio.lowlevel.checkpoint_if_cancelled()


class Opening:
    """An engine that is about to be opened: `async with` it, or await it."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self._engine: Engine | None = None

    async def _open(self) -> Engine:
        prepared = await prepare(self._settings, self._progress)
        return Engine(self._settings, prepared)

    def __await__(self) -> Any:
        return self._open().__await__()

    async def __aenter__(self) -> Engine:
        self._engine = await self._open()
        return self._engine

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._engine is not None
        await self._engine.close()


def generate(
    prompt: str | Sequence[int] | None = None,
    *,
    model: str | Path | None = None,
    messages: Sequence[Message] | None = None,
    **given: Any,
) -> Answer:
    """Open a model, answer once, close it: for programs without an event loop.

    `given` are options of the request and settings of the engine: see Engine.stream and
    Engine.open. Raises RuntimeError where an event loop runs already: await Engine.generate there.
    """
    known = dict.fromkeys((*NAMES, *Settings.__struct_fields__))
    for name in given:
        if name not in known:
            raise OptionError(name, given[name], f"one of {', '.join(known)}")
    options = cast(RequestOptions, {name: given.pop(name) for name in NAMES if name in given})

    async def once() -> Answer:
        async with Engine.open(model, **given) as engine:
            return await engine.generate(prompt, messages=messages, **options)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(once())
    raise RuntimeError("An event loop runs here: use Engine.open and await engine.generate.")
