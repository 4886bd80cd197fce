"""An actor or a store that fails: one error for every caller, nobody hangs, all is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from pipeline.engine import Engine
from pipeline.stream import TokenStream
from routing.errors import EngineError, LinkError, PacelineError
from routing.router import FixedPolicy
from routing.sessions import Session, SessionTable
from stages.codec import RawCodec
from stages.direct_file import DirectFile
from stages.drafter import Drafter
from stages.drafting import DraftModel
from stages.embedding import Embedding
from stages.head import HeadScan
from stages.kv import KVStore
from stages.link import DiskLink
from stages.outcomes import Outcome
from stages.ring import Ring
from stages.sweep import Sweep
from tests import made
from tests.pipeline.made_engine import made_engine
from tests.pipeline.moments import idle, nothing_held

IDS = made.make_prompt(320, 13, seed=8)
CALLERS = 5
PATIENCE = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama")


class Fault(NamedTuple):
    """`error` is raised by call number `at` of `owner.method`, and by each call after it."""

    stage: str
    owner: type
    method: str
    error: Exception
    at: int

    def __str__(self) -> str:
        return f"{self.stage}-{self.owner.__name__}.{self.method}-{self.at}"

    def plant(self, patch: pytest.MonkeyPatch) -> Callable[[], None]:
        """Returns what arms it: calls count from then on."""
        armed: list[int] = []
        sound = getattr(self.owner, self.method)

        def faulty(*args: Any, **kind: Any) -> Any:
            if armed:
                armed.append(1)
                if len(armed) > self.at:
                    raise self.error
            return sound(*args, **kind)

        faulty.__name__ = self.method
        patch.setattr(self.owner, self.method, faulty)
        return lambda: armed.append(1)


NO_MEMORY = MemoryError("made: no memory")
NO_DISK = LinkError("made.safetensors", "made: the disk is gone")
BROKEN = RuntimeError("made: broken")
FAULTS = [
    Fault("router", SessionTable, "oldest_queued", BROKEN, 1),
    Fault("router", SessionTable, "admit", NO_MEMORY, 2),
    Fault("drafter", Drafter, "_work_of", BROKEN, 1),
    Fault("drafter", Drafter, "_work_of", NO_MEMORY, 4),
    Fault("prefetcher", DiskLink, "fill", NO_DISK, 1),
    Fault("prefetcher", DiskLink, "fill", NO_MEMORY, 9),
    Fault("prefetcher", DirectFile, "read_into", NO_DISK, 12),
    Fault("prefetcher", Ring, "mark_ready", BROKEN, 7),
    Fault("verifier", Embedding, "rows", NO_DISK, 1),
    Fault("verifier", Sweep, "layer", NO_MEMORY, 3),
    Fault("verifier", RawCodec, "decode", NO_MEMORY, 7),
    Fault("verifier", KVStore, "write", NO_MEMORY, 6),
    Fault("verifier", HeadScan, "see", BROKEN, 2),
    Fault("verifier", Sweep, "finish", NO_MEMORY, 1),
    Fault("committer", KVStore, "commit", NO_MEMORY, 2),
    Fault("committer", Session, "deliver", BROKEN, 3),
    Fault("committer", KVStore, "reset", NO_MEMORY, 1),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_a_death_reaches_every_caller(
    model: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """Two requests live, others wait, and one that nobody reads is held."""
    arm = fault.plant(monkeypatch)
    # The committer's last case needs a request that ends; the others could go on for long.
    tokens = 3 if fault.method == "reset" else 40
    told: list[BaseException] = []

    async def caller(engine: Engine) -> None:
        with pytest.raises(EngineError) as raised:
            await engine.generate(IDS, max_tokens=tokens)
        told.append(raised.value)

    device = "simulated" if fault.at % 2 else "cpu"
    with anyio.fail_after(PATIENCE):
        async with made_engine(model, dies=True, sessions=2, device=device, delays=2) as engine:
            arm()
            async with anyio.create_task_group() as group:
                for _ in range(CALLERS):
                    group.start_soon(caller, engine)
                stream = engine.stream(IDS, max_tokens=tokens)
            with pytest.raises(EngineError) as late:
                await stream.collect()
            with pytest.raises(EngineError) as later:
                engine.stream(IDS)
            assert engine.sessions.empty and engine.sessions.free == 2
    for error in (*told, late.value, later.value):
        assert error is told[0], "one error, the same for all"
    assert len(told) == CALLERS
    assert isinstance(told[0], EngineError)
    assert told[0].stage == fault.stage
    assert told[0].cause is fault.error and told[0].__cause__ is fault.error
    assert fault.stage in str(told[0]) and "made" in str(told[0])


@pytest.mark.parametrize("device", ["cpu", "simulated"])
async def test_a_death_with_nobody_there(
    model: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The link fails while nothing is asked for: the next request is told."""
    Fault("prefetcher", DirectFile, "read_into", NO_DISK, 1).plant(monkeypatch)()
    async with made_engine(model, dies=True, device=device) as engine:
        with anyio.fail_after(PATIENCE):
            await asyncio.wait([engine._host])
        with pytest.raises(EngineError) as raised:
            await engine.generate(IDS)
        assert raised.value.stage == "prefetcher" and raised.value.cause is NO_DISK


async def test_a_death_while_it_closes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committer dies of the very cancel that closing sends: closing ends all the same."""
    arm = Fault("committer", KVStore, "reset", BROKEN, 1).plant(monkeypatch)
    async with made_engine(model, dies=True) as engine:
        stream = engine.stream(IDS, max_tokens=60)
        await anext(stream)
        arm()
        with anyio.fail_after(PATIENCE):
            await engine.close()
        with pytest.raises(EngineError) as raised:
            await stream.collect()
        assert raised.value.cause is BROKEN


async def test_tokens_before_a_death_are_right(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = Fault("verifier", Sweep, "finish", BROKEN, 4).plant(monkeypatch)
    tokens: list[int] = []

    async def loop(stream: TokenStream) -> None:
        async for delta in stream:
            tokens.extend(delta.token_ids)

    async with made_engine(model, dies=True) as engine:
        arm()
        stream = engine.stream(IDS, max_tokens=40)
        with pytest.raises(EngineError):
            await loop(stream)
        assert stream.answer().finish_reason == "error"
        assert [delta async for delta in stream] == []
    assert len(tokens) >= 3
    assert tokens == made.reference_generate(model, IDS, 40)[: len(tokens)]


async def test_loading_that_fails_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.device import CpuDevice
    from stages.weights import Weights

    devices: list[CpuDevice] = []
    make = CpuDevice.__init__

    def noted(device: CpuDevice, *args: Any, **kind: Any) -> None:
        make(device, *args, **kind)
        devices.append(device)

    monkeypatch.setattr(CpuDevice, "__init__", noted)
    for owner, method in ((Weights, "_substitute"), (DiskLink, "__init__"), (KVStore, "__init__")):
        with monkeypatch.context() as patch:
            Fault("", owner, method, NO_MEMORY, 1).plant(patch)()
            with pytest.raises(MemoryError):
                async with made_engine(model):
                    pass
        assert devices[-1].memory.held == 0, (owner, method)
    assert len(devices) == 3


# What concerns one request ends that one


async def both(engine: Engine, error: type[Exception]) -> Exception:
    """A request that goes well beside one (the second to be admitted) that does not."""
    failed: list[Exception] = []

    async def fails() -> None:
        with pytest.raises(error) as raised:
            await engine.generate(IDS[:9], max_tokens=8)
        failed.append(raised.value)

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            well = engine.stream(IDS, max_tokens=12)
            group.start_soon(fails)
            tokens = (await well.collect()).token_ids
        await idle(engine)
    assert list(tokens) == made.reference_generate(model_of(engine), IDS, 12)
    nothing_held(engine)
    return failed[0]


def model_of(engine: Engine) -> Path:
    return engine.runtime.opened.directory


async def test_a_draft_that_fails_ends_its_own_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DraftModel.run

    def faulty(draft: DraftModel, place: int, *args: Any) -> Any:
        if place == 1:
            raise NO_MEMORY
        return run(draft, place, *args)

    with monkeypatch.context() as patch:
        patch.setattr(DraftModel, "run", faulty)
        async with made_engine(model, sessions=2) as engine:
            error = await both(engine, PacelineError)
            assert not isinstance(error, EngineError)
            assert "drafter" in str(error) and "MemoryError" in str(error)
            patch.undo()
            ids = IDS[:9]
            answers = [await engine.generate(ids, max_tokens=4) for _ in range(2)]
            for answer in answers:
                assert list(answer.token_ids) == made.reference_generate(model, ids, 4)
                assert answer.drafted > 0


async def test_scores_that_are_no_numbers_end_their_own_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Sweep.finish

    def faulty(sweep: Sweep) -> list[Outcome | None]:
        told = zip(sweep.riders, finish(sweep), strict=True)
        return [None if rider.place == 1 else outcome for rider, outcome in told]

    monkeypatch.setattr(Sweep, "finish", faulty)
    async with made_engine(model, sessions=2) as engine:
        error = await both(engine, PacelineError)
        assert not isinstance(error, EngineError) and "not finite" in str(error)


async def test_a_policy_that_fails_ends_its_own_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = FixedPolicy.route

    def faulty(policy: FixedPolicy, request: Any) -> Any:
        if len(request.prompt) == 9:
            raise BROKEN
        return route(policy, request)

    monkeypatch.setattr(FixedPolicy, "route", faulty)
    async with made_engine(model, sessions=2) as engine:
        assert await both(engine, RuntimeError) is BROKEN
