"""What a sweep of trees took is measured by the verifier and told to the drafter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.engine import Engine
from routing.mailboxes import Sender
from routing.messages import DraftOrder, Sampling, SweepTimes, Tree, Verdict
from routing.sessions import Session
from stages.outcomes import Outcome
from stages.sweep import Rider
from stages.verifier import Verifier
from tests import made
from tests.pipeline.made_engine import FreeSweeps, made_engine
from tests.pipeline.made_requests import ask, told

IDS = made.make_prompt(320, 11, seed=91)
OTHER = made.make_prompt(320, 7, seed=92)
TOKENS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama", layers=6)


class Swept:
    """One sweep: who rode, how long it took in all, and the verdicts that came of it."""

    def __init__(self, riders: Sequence[Rider]) -> None:
        self.riders, self.wall_s = riders, 0.0
        self.verdicts: list[Verdict] = []

    @property
    def prompt(self) -> bool:
        """Whether a prompt rode along."""
        return any(rider.parents is None for rider in self.riders)


class Watch:
    """Notes every sweep, and every order that follows from it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.swept: list[Swept] = []
        self.ordered: dict[int, list[SweepTimes | None]] = {}
        """By session."""
        self._patch = patch
        sweep, send = Verifier._sweep, Sender.send_nowait

        async def sweeps(verifier: Verifier, riders: Sequence[Rider]) -> list[Outcome | None]:
            self.swept.append(Swept(riders))
            began = time.perf_counter()
            outcomes = await sweep(verifier, riders)
            self.swept[-1].wall_s = time.perf_counter() - began
            return outcomes

        def sends(sender: Sender[Any], item: Any) -> None:
            send(sender, item)
            if isinstance(item, Verdict):
                self.swept[-1].verdicts.append(item)
            elif isinstance(item, DraftOrder):
                self.ordered.setdefault(item.session, []).append(item.sweep)

        patch.setattr(Verifier, "_sweep", sweeps)
        patch.setattr(Sender, "send_nowait", sends)

    def join(self, engine: Engine, prompt: Sequence[int]) -> list[Session]:
        """Let a prompt ride along with the first tree, and its first tree with the next.

        The list will hold its session.
        """
        came: list[Session] = []
        serve, left = Verifier._serve, [2]

        async def serves(verifier: Verifier, messages: Sequence[Any]) -> None:
            if left[0] and isinstance(messages[0], Tree):
                left[0] -= 1
                if not came:
                    came.append(ask(engine, prompt, Sampling(), TOKENS))
                if len(messages) < 2:
                    messages = [*messages, await verifier._inbox.receive()]
            await serve(verifier, messages)

        self._patch.setattr(Verifier, "_serve", serves)
        return came


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def check(watch: Watch) -> list[SweepTimes]:
    """Every verdict tells of its sweep, unless a prompt rode, and its order passes that on."""
    told_of: list[SweepTimes] = []
    verdicts: dict[int, list[SweepTimes | None]] = {}
    for swept in watch.swept:
        assert len(swept.verdicts) == len(swept.riders)
        for verdict in swept.verdicts:
            times = verdict.sweep
            verdicts.setdefault(verdict.session, []).append(times)
            assert (times is None) == swept.prompt
            if times is not None:
                told_of.append(times)
                assert times.rows == sum(len(rider.tokens) for rider in swept.riders)
                assert times.computed > 0 and times.waited >= 0
                assert times.computed + times.waited <= swept.wall_s
                assert times.cores == pytest.approx(times.computed * torch.get_num_threads())
    # The last verdict ends the answer.
    assert watch.ordered == {session: every[:-1] for session, every in verdicts.items()}
    return told_of


@pytest.mark.parametrize("device", ["cpu", "simulated"])
async def test_every_sweep_of_trees_is_told_of(model: Path, watch: Watch, device: str) -> None:
    async with made_engine(model, device=device, depth=4) as engine:
        answer = await engine.generate(IDS, max_tokens=TOKENS)
    assert answer.rounds == len(watch.swept) - 1
    times = check(watch)
    assert len(times) == answer.rounds
    (ordered,) = watch.ordered.values()
    assert ordered[0] is None, "the prompt's own sweep is not one of trees"
    assert max(one.rows for one in times) > 1


async def test_of_a_sweep_that_a_prompt_rode_along_with_nothing_is_told(
    model: Path, watch: Watch
) -> None:
    """And of one with two trees both are told the same."""
    async with made_engine(model, sessions=2, depth=4) as engine:
        came = watch.join(engine, OTHER)
        first = await told(ask(engine, IDS, Sampling(), TOKENS))
        second = await told(came[0])
    check(watch)
    _, joined, both = watch.swept[:3]
    assert len(joined.riders) == 2 and joined.prompt
    assert [verdict.sweep for verdict in joined.verdicts] == [None, None]
    times, same = (verdict.sweep for verdict in both.verdicts)
    assert times is not None and times == same
    assert first.tokens == made.reference_generate(model, IDS, TOKENS)
    assert second.tokens == made.reference_generate(model, OTHER, TOKENS)


async def test_a_slow_link_is_waited_for(model: Path, watch: Watch) -> None:
    """200 ms a layer; made layers are computed in a few, and in 20 to 60 on a busy core."""
    share = 0.0
    async with made_engine(model, device="simulated", link_gbps=0.00125, depth=4) as engine:
        while share <= 0.5:  # the machine may have stalled; the test has its timeout
            watch.swept.clear()
            watch.ordered.clear()
            await engine.generate(IDS, max_tokens=4)
            check(watch)
            trees = [(one.wall_s, one.verdicts[0].sweep) for one in watch.swept if not one.prompt]
            share = max(times.waited / wall_s for wall_s, times in trees if times is not None)


async def test_what_is_resident_is_not_waited_for(model: Path, watch: Watch) -> None:
    kind = {"substitute": "none", "spare": 1 << 30}
    async with made_engine(model, **kind) as engine:
        assert engine.plan.step == "resident"
        await engine.generate(IDS, max_tokens=4)
    times = check(watch)
    assert times and all(one.waited == 0.0 for one in times)


async def test_seconds_count_once_for_each_thread(
    model: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    async with made_engine(model, depth=4) as engine:
        await engine.generate(IDS, max_tokens=4)
    times = check(watch)
    assert times and all(one.cores == pytest.approx(3 * one.computed) for one in times)


async def test_the_drafter_learns_of_each_round_once(model: Path, watch: Watch) -> None:
    class Seen(FreeSweeps):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[SweepTimes] = []

        def see(self, times: SweepTimes) -> None:
            self.times.append(times)

    async with made_engine(model, depth=4) as engine:
        (drafter,) = (actor for actor in engine.topology.actors if actor.name == "drafter")
        seen = drafter._sweeps = Seen()  # type: ignore[attr-defined]
        await engine.generate(IDS, max_tokens=TOKENS)
    assert seen.times
    (ordered,) = watch.ordered.values()
    assert seen.times == [times for times in ordered if times is not None]
