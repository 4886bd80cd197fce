"""The drafter: an order to draft becomes a tree.

It also hands prompts on to the verifier: its mailbox is where a session enters the loop. Without
a draft model (no substitutes, or speculation does not pay) a tree is what can be looked up in the
session's own text, or, where the plan has no rows for that, its root alone.

Drafting ahead is a state and no message: while nothing waits for it, the drafter goes on growing
the tree that it sent last, one step at a time, so that whatever comes waits for one step at most.
The draft scratch holds one session's tree; another session's order takes it over.
"""

from __future__ import annotations

import time

from anyio import WouldBlock

from routing.actor import Actor
from routing.log import log
from routing.mailboxes import EndOfMail, Receiver, Sender
from routing.messages import (
    DraftOrder,
    Failed,
    Prefill,
    Refill,
    ToDrafter,
    ToVerifier,
    Tree,
)
from routing.sessions import Session, SessionTable
from routing.trace import Trace
from stages.copying import Copying, RoundTimes
from stages.cores import Cores
from stages.drafting import DraftModel
from stages.growth import Limits
from stages.pace import Rate, StepTimes, SweepPace
from stages.sampling import Scorer
from stages.sharpening import Sharpening
from stages.speculation import Speculation
from stages.streams import Stream
from stages.trial import Trial

IDLE_ROUNDS = 8
KEPT_SHARE = 0.5
"""Of what is drafted ahead, about so much is kept."""
VAIN_NODES, VAIN_SHARE = 256, 0.05
"""When a session is told of: so many rounds on end without a draft; or so many nodes sent, and less
than this share of a token accepted a round."""
WIDTHS = (1, 2, 4, 8)
"""Nodes that a step may run, up to a route's own width."""


class _Work:
    """What the drafter knows of one live session."""

    def __init__(self, speculation: Speculation, scorer: Scorer) -> None:
        self.speculation, self.scorer = speculation, scorer
        self.drafting_s = 0.0
        """What the last round's drafting took."""
        self.began: float | None = None
        """When its last round began."""
        self.ahead = False
        """Whether that round is drafted ahead of."""
        self.position = 0
        self.warned = False
        self.problem: str | None = None
        """What went wrong while it was drafted ahead for: told when its next order comes."""


class Drafter(Actor):
    """Takes routed requests and draft orders, gives prompts and trees to the verifier."""

    name = "drafter"

    def __init__(
        self,
        inbox: Receiver[ToDrafter],
        verifier: Sender[ToVerifier],
        sessions: SessionTable,
        model: DraftModel | None,
        stream: Stream,
        cores: Cores,
        context: int,
        switch_at: int | None,
        nodes: int,
        logit_rows: int,
        ahead: bool,
        in_turn: bool,
        trace: Trace,
    ) -> None:
        """`switch_at`: the context length beyond which rotary frequencies change (longrope);
        `nodes`: the most that a tree may be sent with, its root not counted; `logit_rows`: see
        Placement; `ahead`: whether to draft while a tree is being verified; `in_turn`: whether
        weights arrive only while nothing is computed."""
        self._inbox, self._verifier, self._sessions = inbox, verifier, sessions
        self._model, self._stream, self._cores = model, stream, cores
        self._context, self._switch_at = context, switch_at
        self._nodes, self._logit_rows = nodes, logit_rows
        self._ahead, self._trace = ahead, trace
        self._steps, self._sweeps, self._rate = StepTimes(), SweepPace(in_turn), Rate()
        forms = {} if model is None else dict.fromkeys((False, True), model.form)
        self._sharpening = {sampled: Sharpening(form) for sampled, form in forms.items()}
        self._work: dict[int, _Work] = {}
        self._copying: dict[int, Copying] = {}
        """In place of `_work` where there is no draft model."""
        self._times = RoundTimes()
        self._trial = Trial()
        """Of drafting ahead."""
        self._holder: int | None = None
        """The session whose tree stands in the draft scratch."""

    async def run(self) -> None:
        """See Actor."""
        with self._inbox, self._verifier:
            try:
                while True:
                    # There is always room: a session has at most one message in the loop.
                    self._verifier.send_nowait(await self._answer(await self._next()))
            except EndOfMail:
                pass

    async def _next(self) -> ToDrafter:
        while True:
            try:
                return self._inbox.receive_nowait()
            except WouldBlock:
                if not await self._draft_ahead():
                    return await self._inbox.receive()

    async def _answer(self, message: ToDrafter) -> ToVerifier:
        if isinstance(message, DraftOrder):
            return await self._draft(message)
        if isinstance(message, Refill):
            self._forget(message.session)
            return message
        return Prefill(
            message.session,
            message.place,
            self._sessions.get(message.session).request.prompt,
        )

    async def _draft(self, order: DraftOrder) -> Tree | Failed:
        model = self._model
        if model is None:
            return self._copied(order)
        session = self._sessions.get(order.session)
        began = time.perf_counter()
        if order.sweep is not None:
            self._sweeps.see(order.sweep)
        work = self._work_of(session)
        self._see_round(work, began, order.position)
        try:
            if work.problem is not None:
                return Failed(order.session, order.place, self.name, work.problem)
            with self._cores.busy(self._stream.name):
                steps = await self._grow(model, session, work, order)
            tokens, parents = work.speculation.tree()
            self._warn(session, work)
        except Exception as error:
            self._forget(session.id)
            return Failed(order.session, order.place, self.name, _said(error))
        spent = work.drafting_s = time.perf_counter() - began
        work.ahead = self._goes_ahead(work)
        # The root is what was ordered, whatever the tree says: a draft error commits nothing.
        tokens = (order.token, *tokens[1:])
        return Tree(order.session, order.place, order.position, tokens, parents, spent, steps)

    def _copied(self, order: DraftOrder) -> Tree:
        """The tree that is made without a draft model, on the spot."""
        session, began = self._sessions.get(order.session), time.perf_counter()
        tokens: tuple[int, ...] = (order.token,)
        parents: tuple[int, ...] = (-1,)
        if self._nodes:
            self._copying = {s: one for s, one in self._copying.items() if self._live(s)}
            copying = self._copying.setdefault(session.id, Copying(self._times))
            text, limits = [*session.request.prompt, *session.answer], self._limits(session, order)
            tokens, parents = copying.draft(text, order.position, limits, began)
        spent = time.perf_counter() - began
        return Tree(order.session, order.place, order.position, tokens, parents, spent, 0)

    async def _grow(
        self, model: DraftModel, session: Session, work: _Work, order: DraftOrder
    ) -> int:
        """Grow the session's tree for as long as it pays; how many steps that took."""
        speculation, text = work.speculation, [*session.request.prompt, *session.answer]
        if self._holder != session.id:
            speculation.forget()
        ahead = speculation.drafts_ahead
        kept = speculation.begin(text, order.position, self._limits(session, order))
        session.drafted_ahead += ahead
        if kept is not None:
            session.kept_ahead += ahead
            with self._trace.span("draft", "keep", session.id, rows=speculation.kept_ahead):
                await self._stream.run(model.keep, kept)
        self._holder, steps = session.id, 0
        while not session.cancelled and (nodes := speculation.next()):
            with self._trace.span("draft", "step", session.id, rows=len(nodes)):
                await self._run(model, session, work, order.place, nodes)
            self._steps.see(len(nodes), model.step_s)
            steps += 1
        return steps

    async def _run(
        self, model: DraftModel, session: Session, work: _Work, place: int, nodes: list[int]
    ) -> None:
        growth = work.speculation.growth
        assert growth is not None
        history: tuple[int, ...] = ()
        if session.request.sampling.looks_back:
            text = (*session.request.prompt, *session.answer)
            history = text[: growth.position + 1]
        temperature = work.speculation.sharpening.temperature
        await self._stream.run(model.run, place, growth, nodes, work.scorer, history, temperature)

    async def _draft_ahead(self) -> bool:
        """Grow the tree sent last by one step; False when there is nothing to do."""
        model, holder = self._model, self._holder
        work = self._work.get(-1 if holder is None else holder)
        session = self._live(holder)
        if model is None or work is None or session is None or not work.ahead:
            return False
        nodes = work.speculation.ahead()
        if not nodes or session.cancelled or work.problem is not None:
            return False
        assert session.place is not None
        work.speculation.drafts_ahead = True
        try:
            with (
                self._cores.busy(self._stream.name),
                self._trace.span("draft", "ahead", session.id, rows=len(nodes)),
            ):
                await self._run(model, session, work, session.place, nodes)
        except Exception as error:
            work.speculation.forget()
            work.problem = _said(error)
        return True

    def _goes_ahead(self, work: _Work) -> bool:
        """Drafting ahead takes a core from the sweep, and saves a share of the drafting."""
        if not self._ahead or not self._trial.on:
            return False
        return self._sweeps.longer(self._cores.total) <= KEPT_SHARE * work.drafting_s

    def _limits(self, session: Session, order: DraftOrder) -> Limits:
        route, model = session.route, self._model
        assert route is not None
        # Deeper than the answer can still get, or than the context reaches, is wasted. The
        # bonus token comes on top of what is drafted.
        left = session.request.max_tokens - session.generated - 1
        room = self._context - order.position - 1
        if self._switch_at is not None and order.position < self._switch_at:
            room = min(room, self._switch_at - order.position - 1)
        # A route may ask for more than the plan has rows for.
        nodes = min(route.budget, self._nodes)
        if session.request.whole_rows:
            nodes = min(nodes, self._logit_rows - 1)
        depth = max(0, min(route.depth, left, room))
        rows = 0 if model is None else model.rows
        return Limits(depth, nodes if depth else 0, rows if depth and nodes else 0)

    def _work_of(self, session: Session) -> _Work:
        """What is known of a session; what was known of those that ended is dropped."""
        self._work = {s: work for s, work in self._work.items() if self._live(s) is not None}
        work = self._work.get(session.id)
        if work is None:
            assert session.route is not None and self._model is not None
            most, request = session.route.width, session.request
            widths = sorted({*(w for w in WIDTHS if w < most), most})
            sharpening = self._sharpening[request.sampling.temperature > 0]
            rate = Rate(self._rate)
            speculation = Speculation(widths, self._steps, rate, sharpening, self._sweeps)
            scorer = self._model.scorer(request.sampling, len(request.prompt))
            work = self._work[session.id] = _Work(speculation, scorer)
        return work

    def _see_round(self, work: _Work, now: float, position: int) -> None:
        if work.began is not None and position > work.position:
            for rate in (self._rate, work.speculation.rate):
                rate.see(now - work.began, position - work.position)
            # Trees are smaller where the next one is drafted ahead.
            self._trial.see(work.ahead, (now - work.began) / work.speculation.expected)
        work.began, work.position = now, position

    def _warn(self, session: Session, work: _Work) -> None:
        """Say once if speculation is of no use to a session, lest it is slow in silence."""
        idle = work.speculation.idle_rounds >= IDLE_ROUNDS
        vain = session.drafted >= VAIN_NODES and session.accepted < VAIN_SHARE * session.rounds
        if work.warned or not (idle or vain):
            return
        work.warned = True
        seconds = round(self._steps.of(1), 4)
        if vain:
            event = "hardly any draft is accepted: are the substitutes of another model, or broken?"
        else:
            event = "speculation does not pay here and is off"
        log.warning(event, session=session.id, rounds=session.rounds, draft_step_s=seconds)

    def _forget(self, session: int) -> None:
        if session in self._work:
            self._work[session].speculation.forget()
        if session in self._copying:
            self._copying[session].forget()

    def _live(self, session: int | None) -> Session | None:
        try:
            found = None if session is None else self._sessions.get(session)
        except KeyError:
            return None
        return found if found is not None and found.state == "live" else None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
