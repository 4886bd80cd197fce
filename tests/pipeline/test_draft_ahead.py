"""Drafting ahead of verdicts changes no token, and whatever comes meanwhile is served.

How much is drafted while a sweep is under way would depend on the machine. Here each step of a
sweep waits until the drafter has made one more step, or has nothing left to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.engine import Engine
from routing.errors import EngineClosedError, PacelineError
from routing.messages import DraftOrder, Failed, Refill, Sampling, SweepTimes, ToDrafter, Tree
from stages.drafter import KEPT_SHARE, Drafter
from stages.drafting import DraftModel
from stages.growth import Growth, Limits
from stages.kv import DraftScratch
from stages.pace import SweepPace
from stages.trial import TRIED, Trial
from stages.verifier import Verifier
from tests import made
from tests.pipeline.made_engine import FreeSweeps, made_engine
from tests.pipeline.made_requests import Told, ask, generated, told
from tests.pipeline.moments import idle, nothing_held

ARCHITECTURES = ("llama", "qwen2", "gemma2", "phi3", "granite")
TOKENS = 16
IDS = made.make_prompt(320, 13, seed=61)
OTHER = made.make_prompt(320, 9, seed=62)
BIAS = ((7, 6.0), (9, -8.0), (300, 3.5))
SAMPLINGS = [
    Sampling(0.0),
    Sampling(0.0, repetition_penalty=1.4, banned=tuple(range(0, 320, 5))),
    Sampling(0.7, 1),
    Sampling(0.7, 2, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    Sampling(1.0, 3),
    Sampling(1.0, 4, typical_p=0.8, presence_penalty=0.5, frequency_penalty=0.7),
    Sampling(2.0, 5),
    Sampling(2.0, 6, top_k=30, logit_bias=BIAS, allowed=tuple(range(200))),
]
"""Temperatures 0, 0.7, 1 and 2, without options and with some."""


class Ahead:
    """Lets a sweep go on step by step with what is drafted ahead of its verdict."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """For one engine at a time, made on the event loop that it lives on."""
        self.steps = 0
        """Steps that were made ahead."""
        self.holders: list[int | None] = []
        """Whose tree stood in the scratch, one after the other."""
        self._strike: tuple[int, Callable[[], object]] | None = None
        self._nothing_to_do = True
        self._drafting = False
        self._changed = anyio.Event()
        self._loop = asyncio.get_running_loop()
        self._patch(patch)

    def strike(self, after: int, call: Callable[[], object]) -> None:
        """Call `call` on the event loop within a step made ahead, once `after` were begun.

        What it raises, the step raises.
        """
        self._strike = after, call

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        answer, draft_ahead = Drafter._answer, Drafter._draft_ahead
        step, run = Verifier._step, DraftModel.run

        async def answers(drafter: Drafter, message: ToDrafter) -> Any:
            self._nothing_to_do = False
            sent = await answer(drafter, message)
            if drafter._holder not in self.holders[-1:]:
                self.holders.append(drafter._holder)
            return sent

        async def drafts_ahead(drafter: Drafter) -> bool:
            self._drafting = True
            made_one = await draft_ahead(drafter)
            self._drafting = False
            self.steps += made_one
            self._nothing_to_do = not made_one
            self._changed.set()
            self._changed = anyio.Event()
            return made_one

        async def steps_on(verifier: Verifier, *args: Any) -> None:
            before = self.steps
            while not self._nothing_to_do and self.steps == before:
                await self._changed.wait()
            await step(verifier, *args)

        def runs(draft: DraftModel, *args: Any) -> None:
            if self._drafting and self._strike is not None:
                left, call = self._strike
                self._strike = (left - 1, call) if left else None
                if not left:
                    asyncio.run_coroutine_threadsafe(_call(call), self._loop).result(20)
            run(draft, *args)

        patch.setattr(Drafter, "_answer", answers)
        patch.setattr(Drafter, "_draft_ahead", drafts_ahead)
        patch.setattr(Verifier, "_step", steps_on)
        patch.setattr(Trial, "see", lambda *told: None)  # nothing is tried: it goes on
        patch.setattr(DraftModel, "run", runs)


async def _call(call: Callable[[], object]) -> None:
    call()


@pytest.fixture
async def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    return Ahead(monkeypatch)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / request.param
    return made.make_model(directory, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama", layers=6)


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2"])
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Too large to be resident where two sessions have room, as is `llama`."""
    directory = tmp_path_factory.mktemp("deep") / request.param
    return made.make_model(directory, request.param, layers=6)


async def answers(
    directory: Path, samplings: Sequence[Sampling] = SAMPLINGS, n: int = TOKENS, **kind: Any
) -> list[Told]:
    async with made_engine(directory, **kind) as engine:
        asked = [ask(engine, IDS, sampling, n) for sampling in samplings]
        found = [await told(session) for session in asked]
        nothing_held(engine)
    return found


def tally(found: Sequence[Told]) -> tuple[int, int]:
    """Rounds drafted ahead of, and those of them in which it came true."""
    sessions = [answer.session for answer in found]
    for session in sessions:
        assert 0 <= session.kept_ahead <= session.drafted_ahead <= session.rounds
    return sum(s.drafted_ahead for s in sessions), sum(s.kept_ahead for s in sessions)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
async def test_on_and_off_give_transformers_tokens(model: Path, ahead: Ahead, device: str) -> None:
    seed = ARCHITECTURES.index(model.name)
    for nodes, some in ((0, SAMPLINGS[seed % 4 :: 4]), (9, SAMPLINGS)):
        found = await answers(model, some, device=device, delays=seed, depth=4, ahead=nodes)
        for sampling, answer in zip(some, found, strict=True):
            assert answer.tokens == generated(model, IDS, sampling, TOKENS), sampling
        drafted, kept = tally(found)
        assert (drafted > 0) == (nodes > 0)
        assert (kept > 0) == (nodes > 0), "what is kept must be met"
        assert sum(answer.session.accepted for answer in found) > TOKENS


@pytest.mark.parametrize(
    ("kind", "keeps"),
    [
        ({"substitute": "int8", "width": 2, "depth": 3, "ahead": 30}, True),
        ({"substitute": "int4", "width": 4, "depth": 4, "ahead": 1}, True),
        ({"substitute": "int4", "width": 3, "depth": 3, "ahead": 9, "logit_rows": 3}, True),
        ({"substitute": "int8", "width": 8, "depth": 1, "ahead": 5}, True),
        ({"substitute": "int8", "width": 1, "depth": 1, "ahead": 9}, False),
    ],
    ids=str,
)
async def test_any_tree_and_any_room(
    llama: Path, ahead: Ahead, kind: dict[str, Any], keeps: bool
) -> None:
    found = await answers(llama, **kind)
    for sampling, answer in zip(SAMPLINGS, found, strict=True):
        assert answer.tokens == generated(llama, IDS, sampling, TOKENS), sampling
    assert (min(tally(found)) > 0) == keeps


@pytest.mark.parametrize("device", ["cpu", "simulated"])
async def test_at_whatever_pace(llama: Path, device: str) -> None:
    """Nothing waits for anything here but for a link that takes 20 ms a layer, where there is one.

    One step is always made ahead, since nothing can be waiting right after a tree was sent.
    """
    found = await answers(llama, SAMPLINGS[::2], device=device, link_gbps=0.0125, depth=4)
    for sampling, answer in zip(SAMPLINGS[::2], found, strict=True):
        assert answer.tokens == generated(llama, IDS, sampling, TOKENS), sampling
    assert tally(found)[0] > 0


async def test_answers_tell_what_was_kept(llama: Path, ahead: Ahead) -> None:
    for nodes in (0, 9):
        async with made_engine(llama, depth=4, ahead=nodes) as engine:
            stream = engine.stream(IDS, max_tokens=40)
            session = stream._session
            async for _ in stream:
                pass
            share, spans = stream.answer().ahead_kept, engine.trace.spans()
        rows = {name: sum(s.rows for s in spans if s.name == name) for name in ("ahead", "keep")}
        if nodes:
            assert share == session.kept_ahead / session.drafted_ahead > 0
            assert 0 < rows["keep"] < rows["ahead"]
        else:
            assert share is None
            assert rows["ahead"] == rows["keep"] == 0


async def test_across_the_switch_of_frequencies(
    tmp_path: Path, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is computed anew (longrope): what was drafted ahead by then is of no use."""
    refilled: list[int] = []
    answer = Drafter._answer

    async def noted(drafter: Drafter, message: ToDrafter) -> Any:
        if isinstance(message, Refill):
            refilled.append(message.session)
        return await answer(drafter, message)

    monkeypatch.setattr(Drafter, "_answer", noted)
    switch = 24
    directory = made.make_model(tmp_path / "made", "phi3", **made.longrope(original=switch))
    for length in (switch - 12, switch - 7):
        ids = made.make_prompt(320, length, seed=length)
        right, _ = made.reference_loop(directory, ids, switch - length + 8)
        async with made_engine(directory, delays=length, depth=4) as engine:
            answered = await told(ask(engine, ids, Sampling(0.0), len(right)))
        assert answered.tokens == right
        assert answered.session.drafted_ahead > 0
    assert len(refilled) == 2


# Two at a time


async def test_the_scratch_is_handed_over(deep: Path, ahead: Ahead) -> None:
    """Two sessions live and take turns at drafting: each finds the other's rows in the scratch."""
    async with made_engine(deep, sessions=2, depth=4, delays=3) as engine:
        asked = [
            (ids, sampling, ask(engine, ids, sampling, TOKENS))
            for sampling in SAMPLINGS[::3]
            for ids in (IDS, OTHER)
        ]
        for ids, sampling, session in asked:
            answer = await told(session)
            assert answer.tokens == generated(deep, ids, sampling, TOKENS), (sampling, ids[0])
            tally([answer])
        nothing_held(engine)
    assert len(ahead.holders) > len(asked) + 4, "the same session held it twice"


@pytest.mark.parametrize("when", [0, 1, 4, 9])
async def test_one_that_comes_while_another_is_drafted_ahead_for(
    llama: Path, ahead: Ahead, when: int
) -> None:
    came: list[Any] = []
    async with made_engine(llama, sessions=2, depth=4) as engine:
        ahead.strike(when, lambda: came.append(ask(engine, OTHER, SAMPLINGS[4], TOKENS)))
        first = await told(ask(engine, IDS, SAMPLINGS[2], 40))
        second = await told(came[0])
        nothing_held(engine)
    assert first.tokens == generated(llama, IDS, SAMPLINGS[2], 40)
    assert second.tokens == generated(llama, OTHER, SAMPLINGS[4], TOKENS)


# Where the sweep needs the core


class Fixed(FreeSweeps):
    """Whatever is seen, sweeps are longer on fewer cores by what such sweeps would be."""

    def __init__(self, *seen: SweepTimes) -> None:
        super().__init__()
        self.cores: list[int] = []
        for times in seen * 60:
            SweepPace.see(self, times)

    def see(self, times: SweepTimes) -> None:
        pass

    def longer(self, cores: int) -> float:
        self.cores.append(cores)
        return SweepPace.longer(self, cores)


async def paced(directory: Path, pace: SweepPace, cores: int = 2) -> Told:
    """An answer by a drafter that takes sweeps to go at this pace."""
    async with made_engine(directory, depth=4) as engine:
        drafter_of(engine)._sweeps = pace
        engine.runtime.device.cores.total = cores
        return await told(ask(engine, IDS, Sampling(), TOKENS))


def drafter_of(engine: Engine) -> Drafter:
    (drafter,) = (actor for actor in engine.topology.actors if isinstance(actor, Drafter))
    return drafter


COMPUTING = SweepTimes(4, 100.0, 0.0, 200.0)
"""On both of two cores; with one less they would take longer, however many there are."""
WAITING = SweepTimes(4, 100.0, 200.0, 200.0)
"""Weights arrive in 300 s, so one core will do."""


@pytest.mark.parametrize(
    ("seen", "cores", "drafts"),
    [
        ((COMPUTING,), 2, False),
        ((WAITING,), 2, True),
        ((WAITING,), 1, False),
        ((), 2, False),
    ],
    ids=["computing", "waiting", "one core", "nothing seen"],
)
async def test_no_core_is_taken_from_a_sweep_that_needs_it(
    llama: Path, ahead: Ahead, seen: tuple[SweepTimes, ...], cores: int, drafts: bool
) -> None:
    pace = Fixed(*seen)
    answer = await paced(llama, pace, cores)
    assert answer.tokens == generated(llama, IDS, Sampling(), TOKENS)
    assert (answer.session.drafted_ahead > 0) == (ahead.steps > 0) == drafts
    assert answer.session.accepted > 0, "it is drafted for all the same"
    assert {*pace.cores} == {cores}


@pytest.mark.parametrize(("share", "drafts"), [(0.99, True), (1.01, False)])
async def test_a_core_is_taken_for_as_much_drafting_as_it_saves(
    llama: Path, ahead: Ahead, share: float, drafts: bool
) -> None:
    class Near(FreeSweeps):
        def longer(self, cores: int) -> float:
            (work,) = drafter._work.values()
            return share * KEPT_SHARE * work.drafting_s

    async with made_engine(llama, depth=4) as engine:
        drafter = drafter_of(engine)
        drafter._sweeps = Near()
        await told(ask(engine, IDS, Sampling(), TOKENS))
    assert (ahead.steps > 0) == drafts


class Tried(Trial):
    """Rounds that are drafted ahead of take longer than others."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[bool] = []

    def see(self, on: bool, seconds: float) -> None:
        assert seconds > 0
        self.gone.append(on)
        SEE(self, on, 2.0 if on else 1.0)


SEE = Trial.see


async def test_where_rounds_take_longer_for_it_nothing_is_drafted_ahead(
    llama: Path, ahead: Ahead
) -> None:
    trial = Tried()
    async with made_engine(llama, depth=4) as engine:
        drafter_of(engine)._trial = trial
        steps, answered = [], 0
        while len(trial.gone) < 3 * TRIED:
            answer = await told(ask(engine, IDS, SAMPLINGS[answered], TOKENS))
            assert answer.tokens == generated(llama, IDS, SAMPLINGS[answered], TOKENS)
            answered += 1
            steps.append(ahead.steps)
    assert trial.gone[: 3 * TRIED] == [True] * TRIED + [False] * 2 * TRIED
    assert steps[0] > 0
    assert steps[-1] == steps[-2], "the last answer is without"


# Left, closed, and failing meanwhile


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("when", [0, 1, 5])
async def test_cancelled_while_it_is_drafted_ahead_for(
    llama: Path, ahead: Ahead, when: int, device: str
) -> None:
    right = generated(llama, IDS, SAMPLINGS[2], 40)
    async with made_engine(llama, sessions=2, depth=4, device=device, delays=when) as engine:
        gone = ask(engine, IDS, SAMPLINGS[2], 40)
        ahead.strike(when, lambda: engine.sessions.cancel(gone.id))
        left = await told(gone)
        assert gone.finish_reason == "cancelled"
        assert left.tokens == right[: len(left.tokens)] and len(left.tokens) < 40
        nothing_held(engine)
        begun = ahead.steps
        # Whoever comes next gets the place and the scratch.
        assert (await told(ask(engine, IDS, SAMPLINGS[2], 40))).tokens == right
        assert ahead.steps > begun
        nothing_held(engine)


async def test_a_neighbor_stays_when_one_leaves(llama: Path, ahead: Ahead) -> None:
    async with made_engine(llama, sessions=2, depth=4) as engine:
        gone, stays = ask(engine, IDS, SAMPLINGS[2], 40), ask(engine, OTHER, SAMPLINGS[3], TOKENS)
        ahead.strike(2, lambda: engine.sessions.cancel(gone.id))
        assert (await told(stays)).tokens == generated(llama, OTHER, SAMPLINGS[3], TOKENS)
        await told(gone)
        assert gone.finish_reason == "cancelled"
        nothing_held(engine)


@pytest.mark.parametrize("when", [0, 3, 8])
async def test_closed_while_drafting_ahead(llama: Path, ahead: Ahead, when: int) -> None:
    closing: list[asyncio.Task[None]] = []
    async with made_engine(llama, depth=4) as engine:
        live, queued = ask(engine, IDS, SAMPLINGS[2], 60), ask(engine, IDS, SAMPLINGS[2], 60)
        ahead.strike(when, lambda: closing.append(asyncio.ensure_future(engine.close())))
        await told(live)
        await told(queued)
        await closing[0]
        assert live.finish_reason == queued.finish_reason == "cancelled"
        assert live.generated < 60 and queued.generated == 0
        nothing_held(engine)
        assert engine.runtime.device.memory.held == 0
        with pytest.raises(EngineClosedError):
            engine.stream(IDS)


def fail() -> None:
    raise RuntimeError("made to fail")


@pytest.mark.parametrize("when", [0, 1, 5])
async def test_a_failure_ahead_fails_its_request_and_no_other(
    llama: Path, ahead: Ahead, when: int
) -> None:
    right = generated(llama, IDS, SAMPLINGS[2], 40)
    async with made_engine(llama, depth=4) as engine:
        ahead.strike(when, fail)
        broken = ask(engine, IDS, SAMPLINGS[2], 40)
        with pytest.raises(PacelineError, match=r"drafter failed: RuntimeError: made to fail"):
            await told(broken)
        assert broken.finish_reason == "error"
        # The tree that was under way was sound: its tokens were delivered before.
        assert broken.answer == right[: broken.generated] and broken.generated > 1
        nothing_held(engine)
        assert (await told(ask(engine, IDS, SAMPLINGS[2], 40))).tokens == right
        nothing_held(engine)


async def test_a_failure_ahead_with_a_neighbor(llama: Path, ahead: Ahead) -> None:
    async with made_engine(llama, sessions=2, depth=4, delays=8) as engine:
        ahead.strike(3, fail)
        asked = [ask(engine, IDS, SAMPLINGS[2], 40), ask(engine, OTHER, SAMPLINGS[2], 40)]
        failed = 0
        for ids, session in zip((IDS, OTHER), asked, strict=True):
            with suppress(PacelineError):
                await told(session)
            right = generated(llama, ids, SAMPLINGS[2], 40)
            assert session.answer == right[: session.generated]
            assert (session.generated == 40) == (session.finish_reason == "length")
            failed += session.finish_reason == "error" and "made to fail" in str(session.error)
        assert failed == 1
        nothing_held(engine)


async def test_a_failure_ahead_of_the_last_verdict_is_nobodys(llama: Path, ahead: Ahead) -> None:
    """Where the verdict ends the answer there is no next order, and nothing was lost."""
    right = generated(llama, IDS, SAMPLINGS[0], 12)
    ends: list[str | None] = []
    async with made_engine(llama, depth=4) as engine:
        for limit in range(4, 13):
            ahead.strike(0, fail)
            session = ask(engine, IDS, SAMPLINGS[0], limit)
            try:
                await told(session)
            except PacelineError:
                assert session.generated < limit
            assert session.answer == right[: session.generated]
            ends.append(session.finish_reason)
            nothing_held(engine)
    assert "length" in ends and "error" in ends, ends


async def test_cancelled_and_failed_ahead_is_cancelled(llama: Path, ahead: Ahead) -> None:
    async with made_engine(llama, depth=4) as engine:
        session = ask(engine, IDS, SAMPLINGS[0], 40)

        def both() -> None:
            engine.sessions.cancel(session.id)
            fail()

        ahead.strike(1, both)
        await told(session)
        assert session.finish_reason == "cancelled"
        await idle(engine)
        nothing_held(engine)


# Whether the above would notice


KEEP, REROOTED = DraftScratch.keep, Growth.rerooted
Plant = Callable[[pytest.MonkeyPatch], None]


def keeps_nothing_in_its_place(patch: pytest.MonkeyPatch) -> None:
    """Rows are not moved: the first ones, of other nodes, are taken for those kept."""
    patch.setattr(DraftScratch, "keep", lambda *_: None)


def keeps_the_rows_before(patch: pytest.MonkeyPatch) -> None:
    def planted(scratch: DraftScratch, rows: Sequence[int]) -> None:
        KEEP(scratch, [max(0, row - 1) for row in rows])

    patch.setattr(DraftScratch, "keep", planted)


def reroots_to_other_tokens(patch: pytest.MonkeyPatch) -> None:
    """All tokens below the new root are off by one."""

    def planted(growth: Growth, node: int, limits: Limits) -> tuple[Growth, list[int]]:
        new, rows = REROOTED(growth, node, limits)
        new.tokens[1:] = [(token + 1) % 320 for token in new.tokens[1:]]
        return new, rows

    patch.setattr(Growth, "rerooted", planted)


def reroots_to_another_place(patch: pytest.MonkeyPatch) -> None:
    """The new root is taken to stand where it does not."""

    def planted(growth: Growth, node: int, limits: Limits) -> tuple[Growth, list[int]]:
        new, rows = REROOTED(growth, node, limits)
        new.position -= 3
        return new, rows

    patch.setattr(Growth, "rerooted", planted)


async def tokens_a_round(directory: Path) -> float:
    """Of greedy and sampled answers, which are all right."""
    found = await answers(directory, SAMPLINGS[::2], 40, depth=4)
    for sampling, answer in zip(SAMPLINGS[::2], found, strict=True):
        assert answer.tokens == generated(directory, IDS, sampling, 40), sampling
    sessions = [answer.session for answer in found]
    assert tally(found)[1] > 0
    return sum(s.accepted for s in sessions) / sum(s.rounds for s in sessions) + 1


PLANTS: list[Plant] = [
    keeps_nothing_in_its_place,
    keeps_the_rows_before,
    reroots_to_other_tokens,
    reroots_to_another_place,
]


async def test_what_is_kept_wrongly_costs_acceptance_and_no_token(
    llama: Path, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = await tokens_a_round(llama)
    for plant in PLANTS:
        with monkeypatch.context() as patch:
            plant(patch)
            wrong = await tokens_a_round(llama)
        assert wrong < 0.93 * right, (plant.__name__, wrong, right)


async def test_a_new_root_of_another_token_changes_no_token(
    llama: Path, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root is committed whatever the verdict, so the tree's word for it is not taken."""

    def planted(growth: Growth, node: int, limits: Limits) -> tuple[Growth, list[int]]:
        new, rows = REROOTED(growth, node, limits)
        new.tokens[0] = (new.tokens[0] + 1) % 320
        return new, rows

    monkeypatch.setattr(Growth, "rerooted", planted)
    await tokens_a_round(llama)


async def test_another_root_in_what_is_sent_is_noticed(
    llama: Path, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one draft error that would be committed: the comparisons above would tell."""
    draft = Drafter._draft

    async def planted(drafter: Drafter, order: DraftOrder) -> Tree | Failed:
        sent = await draft(drafter, order)
        assert isinstance(sent, Tree)
        if not drafter._sessions.get(order.session).kept_ahead:
            return sent
        root = (sent.tokens[0] + 1) % 320
        return msgspec.structs.replace(sent, tokens=(root, *sent.tokens[1:]))

    monkeypatch.setattr(Drafter, "_draft", planted)
    (found,) = await answers(llama, SAMPLINGS[:1], 40, depth=4)
    assert tally([found])[1] > 0
    assert found.tokens != generated(llama, IDS, SAMPLINGS[0], 40)
