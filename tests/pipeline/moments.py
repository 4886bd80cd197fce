"""Where an engine's work stands, moment by moment, so that tests choose where to strike.

A moment is a message sent in the loop or a piece of work launched by an actor: after each of these
the actor, or the next one, awaits. All of them happen on the event loop, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from pipeline.engine import Engine
from routing.mailboxes import Sender
from stages.streams import Stream

LOOP = ("drafter", "verifier", "committer")
STREAMS = ("draft", "verify", "commit")


class Moments:
    """Counts moments and calls what is due at one of them.

    Named "to drafter Routed" (mailbox and message) or "verify Sweep" (stream and work).
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """For one engine at a time, since it looks at every loop's mailboxes and streams."""
        self.seen: list[str] = []
        self.struck = 0
        """How many had passed, itself included, when something was last called."""
        self._due: list[_Due] = []
        send, launch = Sender.send_nowait, Stream.launch

        def sends(sender: Sender[Any], item: Any) -> None:
            send(sender, item)
            name = sender._counter.name
            if name in LOOP:
                self._pass(f"to {name} {type(item).__name__}")
            elif name.startswith("session"):
                self._pass("to session")

        def launches(stream: Stream, fn: Any, *args: Any, **kind: Any) -> Any:
            event = launch(stream, fn, *args, **kind)
            if stream.name in STREAMS:
                self._pass(f"{stream.name} {fn.__name__}")
            return event

        patch.setattr(Sender, "send_nowait", sends)
        patch.setattr(Stream, "launch", launches)

    def after(self, count: int, call: Callable[[], object], name: str | None = None) -> None:
        """Call `call` at the moment before which `count` more have passed, of that name if any."""
        self._due.append(_Due(count, call, name))

    def forget(self) -> None:
        """Call nothing that has not been called yet."""
        self._due.clear()

    def _pass(self, name: str) -> None:
        self.seen.append(name)
        for due in tuple(self._due):
            if due.name not in (None, name):
                continue
            due.left -= 1
            if due.left < 0:
                self._due.remove(due)
                self.struck = len(self.seen)
                due.call()


@dataclass(eq=False)
class _Due:
    """`left` moments of that name are still to pass."""

    left: int
    call: Callable[[], object]
    name: str | None


async def idle(engine: Engine) -> None:
    """Return when no request is queued or live."""
    table, end = engine.sessions, engine.sessions.end
    if table.empty:
        return
    ended = anyio.Event()

    def ends(*args: Any, **kind: Any) -> None:
        end(*args, **kind)
        if table.empty:
            ended.set()

    table.end = ends  # type: ignore[method-assign]
    try:
        await ended.wait()
    finally:
        del table.end  # type: ignore[method-assign]


def nothing_held(engine: Engine) -> None:
    """Assert that no request has left anything behind."""
    engine.check()
    assert engine.sessions.empty
    assert engine.sessions.free == engine.sessions.places
    assert engine.runtime.kv.rows_held == 0
    loop = [box for box in engine.topology.mailboxes if box.name in LOOP]
    assert len(loop) == len(LOOP) and all(box.waiting == 0 for box in loop)
