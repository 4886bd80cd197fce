"""From settings to a loaded model: what is planned for, checked before loading, and given back."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, NoReturn

import anyio
import msgspec
import pytest
import torch

from pipeline import preparation
from pipeline.claims import Allowances
from pipeline.memory import AvailableMemory
from pipeline.planner import Plan, plan
from pipeline.preparation import SHARE, budget, look, prepare
from pipeline.runtime import Runtime
from pipeline.settings import Settings
from routing.errors import BudgetError, ModelFormatError, OptionError
from stages.device import MemoryAccount
from stages.loading import OpenedModel
from stages.progress import SilentProgress
from stages.tokenizer import Tokenizer
from stages.weights import Weights
from tests.made import make_model, make_tokenizer

MIB = 1 << 20


class Heard:
    """Progress that remembers its steps, and may do something at one of them."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.at: dict[str, threading.Event] = {}
        self.go_on = threading.Event()

    def step(self, what: str, done: int, total: int) -> None:
        if what not in self.steps:
            self.steps.append(what)
        if what in self.at:
            self.at[what].set()
            assert self.go_on.wait(30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model"
    return make_tokenizer(make_model(path, "llama", layers=2, dtype=torch.float32))


def made_settings(model: Path, **more: object) -> Settings:
    return Settings.from_environment({}, model=str(model), context=64, memory="64MiB", **more)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    made = AvailableMemory(limit=2000 * MIB, available=1000 * MIB, source="made")
    monkeypatch.setattr(preparation, "available_memory", lambda: made)


# --- The budget ---


@pytest.mark.usefixtures("free")
def test_the_budget_is_what_was_asked_for_or_a_share_of_what_is_free() -> None:
    assert budget(Settings()) == int(1000 * MIB * SHARE)
    assert budget(Settings(memory=1000 * MIB)) == 1000 * MIB


@pytest.mark.usefixtures("free")
def test_a_budget_above_what_is_free() -> None:
    with pytest.raises(OptionError, match=r"'1001 MiB'; expected at most 1000 MiB.*\(made\)"):
        budget(Settings(memory=1001 * MIB))
    assert budget(Settings(memory=1001 * MIB, device="simulated")) == 1001 * MIB


# --- Looking ---


def test_look_opens_and_plans(model: Path) -> None:
    heard = Heard()
    opened, plan = look(made_settings(model), heard)
    try:
        assert plan.budget == 64 * MIB and plan.placement.context == 64
        assert heard.steps == ["finding the model", "measuring the link", "planning"]
    finally:
        opened.close()


def test_a_simulated_link_is_not_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> NoReturn:
        raise AssertionError("the link was measured")

    monkeypatch.setattr(preparation, "measure_link", measure)
    opened, _ = look(made_settings(model, link_gbps=2.0), SilentProgress())
    opened.close()


@pytest.mark.parametrize(
    ("asked", "rows", "slots"),
    [
        ({}, Allowances().ahead_rows, Allowances().slots),
        ({"draft_ahead": False}, 0, Allowances().slots),
        ({"overlap": False}, 0, (1,)),
        ({"overlap": False, "draft_ahead": True}, 0, (1,)),
    ],
)
def test_what_may_overlap_is_planned_for(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, object],
    rows: int,
    slots: tuple[int, ...],
) -> None:
    seen: list[Allowances] = []

    def planned(*given: Any, allowances: Allowances, **more: Any) -> Plan:
        seen.append(allowances)
        return plan(*given, allowances=allowances, **more)

    monkeypatch.setattr(preparation, "plan", planned)
    opened, _ = look(made_settings(model, link_gbps=2.0, **asked), SilentProgress())
    opened.close()
    assert seen == [Allowances(ahead_rows=rows, slots=slots)]


@pytest.mark.parametrize(
    ("more", "error"),
    [({"memory": "1MiB"}, BudgetError), ({"context": 10_000}, OptionError)],
)
def test_what_cannot_be_planned_leaves_no_open_files(
    model: Path, more: dict[str, object], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[OpenedModel] = []
    close = OpenedModel.close
    monkeypatch.setattr(OpenedModel, "close", lambda self: (closed.append(self), close(self)))
    settings = Settings.from_environment({}, model=str(model), **more)
    with pytest.raises(error):
        look(settings, SilentProgress())
    assert len(closed) == 1


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_host_memory_is_refused_before_a_model_is_fetched(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object) -> NoReturn:
        raise AssertionError("a model was looked for")

    monkeypatch.setattr(preparation, "resolve", resolve)
    with pytest.raises(OptionError, match="use --memory"):
        look(Settings(host_memory=MIB, device=device), SilentProgress())  # type: ignore[arg-type]


def test_a_config_that_no_model_can_be_built_from(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(directory: Path) -> NoReturn:
        raise KeyError("swish\nswash")

    monkeypatch.setattr(preparation, "OpenedModel", build)
    with pytest.raises(ModelFormatError, match="no model can be built from it") as caught:
        look(made_settings(model), SilentProgress())
    assert "\n" not in str(caught.value)


# --- Preparing ---


async def test_prepared(model: Path) -> None:
    heard, seen = Heard(), []

    def check(tokenizer: Tokenizer | None, plan: Plan, vocab: int) -> None:
        seen.append((tokenizer, plan))
        assert heard.steps[-1] == "planning", "before weights are loaded"

    prepared = await prepare(made_settings(model, link_gbps=4.0), heard, check)
    try:
        assert heard.steps[-1].lower() == "loading weights"
        assert seen == [(prepared.tokenizer, prepared.plan)]
        assert prepared.tokenizer is not None and prepared.link_gbps == 4.0
        assert prepared.runtime.device.name == "cpu"
    finally:
        prepared.runtime.close()
    assert prepared.runtime.device.memory.held == 0


async def test_prepared_for_the_simulated_accelerator(model: Path) -> None:
    settings = made_settings(model, device="simulated", host_memory="1MiB", link_gbps=4.0)
    prepared = await prepare(settings, SilentProgress())
    assert prepared.runtime.device.name == "simulated"
    prepared.runtime.close()


async def test_a_check_that_refuses(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(tokenizer: Tokenizer | None, plan: Plan, vocab: int) -> NoReturn:
        raise OptionError("PROMPT", "this", "another")

    def load(*_: object) -> NoReturn:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Weights, "load", load)
    with pytest.raises(OptionError, match="another"):
        await prepare(made_settings(model), SilentProgress(), check)
    assert "prepare" not in [thread.name for thread in threading.enumerate()]


async def test_nf4_without_bitsandbytes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_nf4(*args: object, **kwargs: object) -> Plan:
        made = plan(*args, **kwargs)  # type: ignore[arg-type]
        placement = msgspec.structs.replace(made.placement, substitute="nf4")
        return msgspec.structs.replace(made, placement=placement)

    monkeypatch.setattr(preparation, "plan", plan_nf4)
    monkeypatch.setattr(preparation, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="bitsandbytes is not installed"):
        await prepare(made_settings(model), SilentProgress())


async def cancel_by_task(task: asyncio.Task[object], scope: anyio.CancelScope) -> None:
    task.cancel()


async def cancel_by_scope(task: asyncio.Task[object], scope: anyio.CancelScope) -> None:
    scope.cancel()


async def cancel_twice(task: asyncio.Task[object], scope: anyio.CancelScope) -> None:
    """Ctrl-C by somebody who has no patience."""
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()


CANCELS = [cancel_by_task, cancel_by_scope, cancel_twice]


@pytest.mark.parametrize("cancel", CANCELS)
@pytest.mark.parametrize("step", ["finding the model", "planning", "Loading weights"])
async def test_cancelled_at_a_step(
    model: Path, cancel: object, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the next step, all that was opened is closed, and no thread is left."""
    accounts: list[MemoryAccount] = []
    begin = MemoryAccount.__init__

    def count(self: MemoryAccount, limit: int | None = None) -> None:
        begin(self, limit)
        accounts.append(self)

    monkeypatch.setattr(MemoryAccount, "__init__", count)
    heard = Heard()
    heard.at[step] = threading.Event()
    scope = anyio.CancelScope()

    async def prepares() -> None:
        with scope:
            await prepare(made_settings(model, link_gbps=4.0), heard)
            raise AssertionError("it went on to its end")

    task = asyncio.create_task(prepares())
    assert await asyncio.to_thread(heard.at[step].wait, 30)
    await cancel(task, scope)  # type: ignore[operator]
    await asyncio.sleep(0)
    heard.go_on.set()
    await asyncio.wait([task], timeout=30)
    assert task.done()
    if cancel is cancel_by_scope:
        assert task.exception() is None
    else:
        assert task.cancelled()
    assert heard.steps[-1] == step, "the next step is where it ends"
    assert all(account.held == 0 for account in accounts)
    assert "prepare" not in [thread.name for thread in threading.enumerate()]


async def test_cancelled_when_the_work_was_done(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made is closed, since nobody gets it."""
    made: list[Runtime] = []
    loaded, go_on = threading.Event(), threading.Event()
    begin = Runtime.__init__

    def last(self: Runtime, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)  # type: ignore[arg-type]
        made.append(self)
        loaded.set()
        assert go_on.wait(30)

    monkeypatch.setattr(Runtime, "__init__", last)
    task = asyncio.create_task(prepare(made_settings(model, link_gbps=4.0), SilentProgress()))
    assert await asyncio.to_thread(loaded.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()
    assert made[0].device.memory.held == 0
