"""The verifier: everything that waits rides in the next sweep.

It owns the sweep. Between steps it waits for the prefetcher's pieces and gives the slots back;
the steps themselves run on its stream. Whatever becomes of the riders, a sweep takes every piece of
its order, so that the ring stays in step with the prefetcher, which knows nothing of sweeps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from anyio import WouldBlock

from routing.actor import Actor
from routing.mailboxes import Receiver, Sender
from routing.messages import (
    Failed,
    PieceReady,
    Prefill,
    Refill,
    SlotFree,
    SweepTimes,
    ToCommitter,
    ToVerifier,
    Tree,
    Verdict,
)
from routing.sessions import SessionTable
from routing.trace import Trace
from stages.codec import Codec
from stages.cores import Cores
from stages.device import Buffer
from stages.outcomes import Outcome
from stages.packs import Rider
from stages.ring import Ring
from stages.schedule import Step
from stages.streams import Stream
from stages.sweep import Model, Sweep


class Slots(NamedTuple):
    """The verifier's end of the ring: pieces come ready in sweep order, slots go back."""

    ring: Ring
    codec: Codec
    decoded: Buffer | None
    ready: Receiver[PieceReady]
    freed: Sender[SlotFree]


class Verifier(Actor):
    """Takes trees and prompts, gives verdicts. `slots` is None when nothing is streamed."""

    name = "verifier"

    def __init__(
        self,
        inbox: Receiver[ToVerifier],
        verdicts: Sender[ToCommitter],
        sessions: SessionTable,
        model: Model,
        steps: Sequence[Step],
        head: torch.Tensor | None,
        slots: Slots | None,
        stream: Stream,
        cores: Cores,
        trace: Trace,
    ) -> None:
        """`head`: the resident head, (vocab, hidden), or None when it is streamed."""
        self._inbox, self._verdicts, self._sessions = inbox, verdicts, sessions
        self._model, self._steps, self._head, self._slots = model, steps, head, slots
        self._stream, self._cores, self._trace = stream, cores, trace
        self._sweeps = 0
        self._computed = self._core_s = self._waited = 0.0

    async def run(self) -> None:
        """See Actor."""
        slots = self._slots
        try:
            with self._inbox, self._verdicts:
                async for message in self._inbox:
                    await self._serve([message, *self._waiting()])
        finally:
            if slots is not None:
                slots.freed.close()
                slots.ready.close()

    def _waiting(self) -> list[ToVerifier]:
        messages: list[ToVerifier] = []
        while True:
            try:
                messages.append(self._inbox.receive_nowait())
            except WouldBlock:
                return messages

    async def _serve(self, messages: Sequence[ToVerifier]) -> None:
        riding: list[Tree | Prefill | Refill] = []
        for message in messages:
            if isinstance(message, Failed):
                self._verdicts.send_nowait(message)
            elif self._sessions.get(message.session).cancelled:
                self._verdicts.send_nowait(_nothing(message))
            else:
                riding.append(message)
        if riding:
            with self._cores.busy(self._stream.name):
                outcomes = await self._sweep([self._rider(message) for message in riding])
            times = self._times(riding)
            for message, outcome in zip(riding, outcomes, strict=True):
                # Where all riders were cancelled on the way, the rest of the sweep was skipped.
                gone = self._sessions.get(message.session).cancelled
                verdict = _nothing(message) if gone else _verdict(message, outcome, times)
                self._verdicts.send_nowait(verdict)

    def _rider(self, message: Tree | Prefill | Refill) -> Rider:
        session = self._sessions.get(message.session)
        request, sampling = session.request, session.request.sampling
        history: tuple[int, ...] = ()
        if isinstance(message, Tree):
            start, parents = message.position, message.parents
            if sampling.looks_back:
                history = (*request.prompt, *session.answer)
                assert history[-1] == message.tokens[0], "the root is the answer's last token"
        else:
            start, parents = 0, None
            if sampling.looks_back:
                history = message.tokens
        rider = Rider(
            message.session,
            message.place,
            start,
            message.tokens,
            parents,
            sampling,
            prompt=len(request.prompt),
            history=history,
            logprobs=request.logprobs,
        )
        rows = self._model.logit_rows.each
        assert not rider.whole or len(rider.asked()) <= rows, "more nodes than rows of logits"
        return rider

    async def _sweep(self, riders: Sequence[Rider]) -> list[Outcome | None]:
        self._sweeps += 1
        self._computed = self._core_s = self._waited = 0.0
        with self._trace.span("verify", "begin", sweep=self._sweeps):
            sweep = await self._stream.run(Sweep, self._model, riders)
        head_begun = False
        for step in self._steps:
            if step.is_head and not head_begun:
                head_begun = True
                await self._stream.run(sweep.begin_head)
            await self._step(sweep, step)
        with self._trace.span("verify", "finish", sweep=self._sweeps):
            return await self._stream.run(sweep.finish)

    async def _step(self, sweep: Sweep, step: Step) -> None:
        layer = step.layers[0] if step.layers else len(self._model.skeleton.layers)
        piece, slots = step.piece, self._slots
        if piece is None:
            with self._trace.span("verify", "resident", sweep=self._sweeps, layer=layer):
                await self._stream.run(self._resident, sweep, step)
            return
        assert slots is not None
        began = time.perf_counter()
        ready = await slots.ready.receive()
        self._waited += time.perf_counter() - began
        assert ready.piece == piece.index, (ready, piece.index)
        buffer = slots.ring.begin_use(ready.slot, piece.index)
        if not self._all_cancelled(sweep):
            with self._trace.span("verify", piece.kind, sweep=self._sweeps, layer=layer):
                await self._stream.run(self._streamed, sweep, step, buffer)
        slots.ring.release(ready.slot)
        slots.freed.send_nowait(SlotFree(ready.slot))

    def _all_cancelled(self, sweep: Sweep) -> bool:
        return all(self._sessions.get(rider.session).cancelled for rider in sweep.riders)

    def _times(self, riding: Sequence[Tree | Prefill | Refill]) -> SweepTimes | None:
        """Of the last sweep, if all its riders are trees."""
        trees = [message for message in riding if isinstance(message, Tree)]
        if len(trees) < len(riding):
            return None
        rows = sum(len(tree.tokens) for tree in trees)
        return SweepTimes(rows, self._computed, self._waited, self._core_s)

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        """On the stream's thread."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self._computed += spent
        self._core_s += spent * torch.get_num_threads()

    def _resident(self, sweep: Sweep, step: Step) -> None:
        with self._clocked():
            if step.is_head:
                assert self._head is not None
                sweep.head(0, self._head)
            for layer in step.layers:
                sweep.layer(layer, {})

    def _streamed(self, sweep: Sweep, step: Step, buffer: Buffer) -> None:
        assert step.piece is not None and self._slots is not None
        dtype = self._model.skeleton.dtype
        with self._clocked():
            tensors = self._slots.codec.decode(step.piece, buffer, dtype, self._slots.decoded)
            if step.is_head:
                (weight,) = tensors.values()
                sweep.head(step.piece.start_row, weight)
            else:
                sweep.layer(step.layers[0], tensors)


def _nothing(message: Tree | Prefill | Refill) -> Verdict:
    """For a session that was cancelled: there is no path to keep, and the committer ends it."""
    return Verdict(message.session, message.place, (), (), 0)


def _verdict(
    message: Tree | Prefill | Refill, outcome: Outcome | None, times: SweepTimes | None
) -> ToCommitter:
    session, place = message.session, message.place
    if outcome is None:
        problem = "the model's scores are not finite numbers (damaged weights?)"
        return Failed(session, place, Verifier.name, problem)
    tree = isinstance(message, Tree)
    return Verdict(
        session,
        place,
        outcome.path,
        outcome.tokens,
        drafted=len(message.tokens) - 1 if tree else 0,
        prompt=not tree,
        logprobs=outcome.logprobs,
        sweep=times,
    )
