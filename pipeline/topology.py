"""Who talks to whom: the five actors, the mailboxes between them, and how they live and die.

    admission -> router -> drafter -> verifier -> committer
                              ^         | ^          |
                              |     freed | ready    |
                              |     prefetcher       |
                              +---- orders ----------+

Loop mailboxes hold as many places as sessions are admitted, and a session has at most one message
in the loop, so a send inside the loop never waits; only admission pushes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import anyio

from pipeline.runtime import Runtime
from routing.actor import Actor
from routing.errors import EngineError
from routing.mailboxes import Mailbox, Sender
from routing.messages import PieceReady, SlotFree, ToCommitter, ToDrafter, ToVerifier
from routing.router import Policy, Router
from routing.sessions import SessionTable
from routing.trace import Trace
from stages.codec import RawCodec
from stages.committer import Committer
from stages.drafter import Drafter
from stages.prefetcher import Prefetcher
from stages.tokenizer import Tokenizer
from stages.verifier import Slots, Verifier

T = TypeVar("T")


class Topology:
    """The actors of one runtime, wired; `admission` takes the ids of queued sessions."""

    def __init__(
        self,
        runtime: Runtime,
        tokenizer: Tokenizer | None,
        sessions: SessionTable,
        policy: Policy,
        trace: Trace,
    ) -> None:
        places = sessions.places
        self.mailboxes: list[Mailbox[object]] = []
        admission = self._mailbox(Mailbox[int]("admission", places + sessions.queue))
        drafter = self._mailbox(Mailbox[ToDrafter]("drafter", places))
        verifier = self._mailbox(Mailbox[ToVerifier]("verifier", places))
        committer = self._mailbox(Mailbox[ToCommitter]("committer", places))
        self.admission: Sender[int] = admission.sender()
        device, opened = runtime.device, runtime.opened
        placement, switch_at = runtime.plan.placement, opened.rope.switch_at
        context = placement.context
        self.actors: list[Actor] = [
            Router(admission.receiver(), drafter.sender(), sessions, policy, trace),
            Drafter(
                drafter.receiver(),
                verifier.sender(),
                sessions,
                runtime.draft_model,
                device.stream("draft"),
                device.cores,
                context,
                switch_at,
                placement.tree_budget,
                placement.logit_rows,
                placement.draft_rows > placement.tree_budget + 1,
                placement.slots == 1,
                trace,
            ),
            Committer(
                committer.receiver(),
                sessions,
                runtime.kv,
                device.stream("commit"),
                tokenizer,
                context,
                switch_at,
                trace,
            ),
        ]
        slots = self._stream_weights(runtime, trace)
        self.actors.append(
            Verifier(
                verifier.receiver(),
                committer.sender(),
                sessions,
                runtime.model,
                runtime.steps,
                runtime.head,
                slots,
                device.stream("verify"),
                device.cores,
                trace,
            )
        )
        for mailbox in self.mailboxes:
            mailbox.seal()

    def _mailbox(self, mailbox: Mailbox[T]) -> Mailbox[T]:
        self.mailboxes.append(mailbox)  # type: ignore[arg-type]
        return mailbox

    def _stream_weights(self, runtime: Runtime, trace: Trace) -> Slots | None:
        """Add the prefetcher, if anything is streamed; the verifier's end of it."""
        if runtime.ring is None or runtime.link is None:
            return None
        ready = self._mailbox(Mailbox[PieceReady]("ready", runtime.ring.slots))
        freed = self._mailbox(Mailbox[SlotFree]("freed", runtime.ring.slots))
        self.actors.append(
            Prefetcher(
                runtime.pieces,
                runtime.ring,
                runtime.link,
                ready.sender(),
                freed.receiver(),
                trace,
            )
        )
        return Slots(runtime.ring, RawCodec(), runtime.decoded, ready.receiver(), freed.sender())

    async def run(self) -> None:
        """Run all actors until admission is closed and no session lives.

        The first actor that dies cancels the others; raises one EngineError that names it.
        """
        await run_actors(self.actors)

    def check(self) -> None:
        """Assert conservation in every mailbox."""
        for mailbox in self.mailboxes:
            mailbox.check()


async def run_actors(actors: Sequence[Actor]) -> None:
    """Run actors in one task group; turn the first death into an EngineError."""
    deaths: list[EngineError] = []
    async with anyio.create_task_group() as group:

        async def live(actor: Actor) -> None:
            try:
                await actor.run()
            except Exception as error:
                deaths.append(EngineError(actor.name, error))
                group.cancel_scope.cancel()

        for actor in actors:
            group.start_soon(live, actor, name=actor.name)
    if deaths:
        raise deaths[0]
