"""What a caller may ask, what is refused, and where answers end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
import torch

from paceline import generate
from pipeline.engine import Engine
from routing.errors import (
    BudgetError,
    BusyError,
    ContextLengthError,
    EngineClosedError,
    OptionError,
)
from stages.drafting import DraftModel
from stages.growth import Growth
from stages.loading import OpenedModel
from stages.pace import StepTimes
from tests import made
from tests.pipeline.made_engine import made_engine, make_plan
from tests.pipeline.moments import idle, nothing_held

TOKENS = 16
IDS = made.make_prompt(320, 11, seed=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_model(tmp_path_factory.mktemp("made"), "llama")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template."""
    return made.make_tokenizer(made.make_model(tmp_path_factory.mktemp("chatty"), "qwen3"))


# What is asked for


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": IDS, "messages": [{"role": "user", "content": "hello"}]}, "prompt"),
    ({"prompt": "text, and no tokenizer"}, "prompt"),
    ({"messages": [{"role": "user", "content": "no tokenizer either"}]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, 2, 320]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": ["1"]}, "prompt"),
    ({"prompt": IDS, "max_tokens": 0}, "max_tokens"),
    ({"prompt": IDS, "max_tokens": -3}, "max_tokens"),
    ({"prompt": IDS, "max_tokens": 2.5}, "max_tokens"),
    ({"prompt": IDS, "max_tokens": "2"}, "max_tokens"),
    ({"prompt": IDS, "temperature": -0.1}, "temperature"),
    ({"prompt": IDS, "temperature": float("nan")}, "temperature"),
    ({"prompt": IDS, "temperature": float("inf")}, "temperature"),
    ({"prompt": IDS, "temperature": "1"}, "temperature"),
    ({"prompt": IDS, "temperature": 5e-324}, "temperature"),  # scores divided by it overflow
    ({"prompt": IDS, "temperature": 1.0, "seed": 1.5}, "seed"),
    ({"prompt": IDS, "temperature": 1.0, "seed": "1"}, "seed"),
    ({"prompt": IDS, "temperature": 1.0, "seed": -1}, "seed"),
    ({"prompt": IDS, "top_p": 0}, "top_p"),
    ({"prompt": IDS, "banned_tokens": [320]}, "banned_tokens"),
    ({"prompt": IDS, "stop": "and no tokenizer"}, "stop"),
    ({"prompt": IDS, "top_kk": 3}, "top_kk"),
]


@pytest.mark.parametrize(("asked", "option"), REFUSED, ids=range(len(REFUSED)))
async def test_a_bad_request_is_refused_and_harms_nobody(
    model: Path, asked: dict[str, Any], option: str
) -> None:
    async with made_engine(model) as engine:
        with pytest.raises(OptionError) as refused:
            await engine.generate(**asked)
        assert refused.value.option == option
        nothing_held(engine)
        answer = await engine.generate(IDS, max_tokens=1)
        assert list(answer.token_ids) == made.reference_generate(model, IDS, 1)


async def test_text_and_messages_become_tokens(chatty: Path) -> None:
    async with made_engine(chatty) as engine:
        assert engine.has_chat_template
        plain = await engine.generate("hé", max_tokens=3)
        chat = await engine.generate(messages=[{"role": "user", "content": "hi"}], max_tokens=3)
        with pytest.raises(OptionError):
            engine.stream("")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chatty, local_files_only=True)
    for answer, text in ((plain, "hé"), (chat, "<|user|>hi<|end|><|assistant|>")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert answer.usage.prompt_tokens == len(ids)
        assert list(answer.token_ids) == made.reference_generate(chatty, ids, 3)
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)


async def test_a_prompt_must_leave_room_for_an_answer(model: Path) -> None:
    async with made_engine(model, context=24) as engine:
        for length in (24, 25, 400):
            with pytest.raises(ContextLengthError) as refused:
                engine.stream(made.make_prompt(320, length))
            assert (refused.value.prompt, refused.value.context) == (length, 24)
            assert str(length) in str(refused.value) and "24" in str(refused.value)
        longest = made.make_prompt(320, 23)
        answer = await engine.generate(longest, max_tokens=10)
        nothing_held(engine)
    assert list(answer.token_ids) == made.reference_generate(model, longest, 1)
    assert answer.finish_reason == "length"


async def test_requests_beyond_the_queue_are_refused_at_once(model: Path) -> None:
    async with made_engine(model, queue=2) as engine:
        streams = [engine.stream(IDS, max_tokens=2) for _ in range(3)]
        with pytest.raises(BusyError) as refused:
            engine.stream(IDS)
        assert (refused.value.waiting, refused.value.limit) == (2, 2)
        answers = [await stream.collect() for stream in streams]
        assert len({answer.token_ids for answer in answers}) == 1
        await engine.generate(IDS, max_tokens=1)


async def test_a_closed_engine_refuses(model: Path) -> None:
    async with made_engine(model) as engine:
        await engine.close()
        with pytest.raises(EngineClosedError):
            await engine.generate(IDS)
        await engine.close()


async def test_an_engine_answers_on_its_own_loop_only(model: Path) -> None:
    async def elsewhere() -> None:
        engine.stream(IDS, max_tokens=1)

    async with made_engine(model) as engine:
        with pytest.raises(RuntimeError):
            await anyio.to_thread.run_sync(engine.stream, IDS)
        with pytest.raises(RuntimeError):
            await anyio.to_thread.run_sync(asyncio.run, elsewhere())
        nothing_held(engine)


# Where answers end


async def test_max_tokens_is_exact(model: Path) -> None:
    right = made.reference_generate(model, IDS, 10)
    async with made_engine(model) as engine:
        for limit in range(1, 11):
            answer = await engine.generate(IDS, max_tokens=limit)
            assert list(answer.token_ids) == right[:limit]
            assert answer.finish_reason == "length"
            assert answer.usage.completion_tokens == limit
        nothing_held(engine)


async def test_a_stop_token_ends_the_answer_wherever_it_stands(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token that greedy emits is declared to be the end, one after the other."""
    right = made.reference_generate(model, IDS, TOKENS)
    async with made_engine(model, substitute="int8") as engine:
        inside = 0
        for end in dict.fromkeys(right):
            prepared = engine._prepared._replace(stop_ids=(end,))
            monkeypatch.setattr(engine, "_prepared", prepared)
            stream = engine.stream(IDS, max_tokens=TOKENS)
            batches = [delta.token_ids async for delta in stream]
            answer = stream.answer()
            assert list(answer.token_ids) == right[: right.index(end) + 1]
            assert answer.finish_reason == ("stop")
            # The end came out of a block in which more had been accepted or chosen.
            inside += len(batches[-2]) > 1
            assert answer.tau is None or answer.tau <= engine.plan.placement.tree_budget
        assert inside, "no stop token stood in the middle of an accepted block"
        nothing_held(engine)


async def test_a_stop_token_of_the_request_is_added_to_the_models(chatty: Path) -> None:
    right = made.reference_generate(chatty, IDS, TOKENS)
    first, second = [one for one in dict.fromkeys(right[3:]) if one not in right[:3]][:2]
    async with made_engine(chatty, stop_ids=(second,)) as engine:
        answer = await engine.generate(IDS, max_tokens=TOKENS, stop_token_ids=[first])
        assert list(answer.token_ids) == right[: right.index(first) + 1]
        shown = await engine.generate(IDS, max_tokens=right.index(first))
        assert answer.text.startswith(shown.text[:-1]), "and it has no text"
        other = await engine.generate(IDS, max_tokens=TOKENS)
        assert list(other.token_ids) == right[: right.index(second) + 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_stop_strings_end_an_answer_wherever_they_stand(
    chatty: Path, temperature: float
) -> None:
    """One engine speculates and the other does not; texts and tokens are the same."""
    told: list[list[tuple[str, tuple[int, ...]]]] = []
    ask: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 3}
    for kind in ({"substitute": "int8"}, {"substitute": "none"}):
        told.append([])
        async with made_engine(chatty, **kind) as engine:
            whole = await engine.generate(IDS, **ask)
            stops = [whole.text[at : at + 3] for at in range(0, len(whole.text) - 3, 4)]
            assert len(stops) > 3 and (whole.drafted > 0) == (kind["substitute"] != "none")
            for stop in stops:
                stream = engine.stream(IDS, **ask, stop=["never said", stop])
                shown = [delta.text async for delta in stream]
                answer = stream.answer()
                assert answer.text == "".join(shown) == whole.text[: whole.text.index(stop)]
                assert answer.finish_reason == "stop"
                assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
                told[-1].append((answer.text, answer.token_ids))
            nothing_held(engine)
    assert told[0] == told[1]


@pytest.mark.parametrize("length", [10, 17, 22])
async def test_the_context_ends_the_answer(model: Path, length: int) -> None:
    ids = made.make_prompt(320, length, seed=6)
    async with made_engine(model, context=24) as engine:
        answer = await engine.generate(ids, max_tokens=100)
        assert answer.finish_reason == "length"
        assert list(answer.token_ids) == made.reference_generate(model, ids, 24 - length)
        nothing_held(engine)


# Seeds, trees and formats


async def test_seeds_repeat_and_fresh_ones_are_told(model: Path) -> None:
    async with made_engine(model) as engine:
        engine.settings = msgspec.structs.replace(engine.settings, seed=None)
        drawn = await engine.generate(IDS, max_tokens=TOKENS, temperature=1.0)
        again = await engine.generate(IDS, max_tokens=TOKENS, temperature=1.0, seed=drawn.seed)
        fresh = await engine.generate(IDS, max_tokens=TOKENS, temperature=1.0)
        zero = await engine.generate(IDS, max_tokens=TOKENS, temperature=1.0, seed=0)
        assert drawn.token_ids == again.token_ids
        assert zero.seed == 0, "0 is a seed, not the want of one"
        assert len({drawn.seed, fresh.seed, zero.seed}) == 3
        assert len({drawn.token_ids, fresh.token_ids, zero.token_ids}) == 3
        engine.settings = msgspec.structs.replace(engine.settings, seed=drawn.seed)
        assert engine.stream(IDS, temperature=1.0).seed == drawn.seed
        await idle(engine)


TREES: list[dict[str, Any]] = [
    {"substitute": "none"},
    {"substitute": "int8", "width": 1, "depth": 1},
    {"substitute": "int8", "width": 1, "depth": 6},
    {"substitute": "int4", "width": 4, "depth": 3},
    {"substitute": "int8", "width": 7, "depth": 2, "budget": 14},
    {"substitute": "int8", "width": 4, "depth": 5, "budget": 6},
    {"substitute": "nf4", "width": 2, "depth": 4},
    {"substitute": "int3", "width": 4, "depth": 3},
    {"substitute": "int2", "width": 2, "depth": 4},
]


@pytest.mark.parametrize(("temperature", "trees"), [(0.0, TREES), (0.8, TREES[::2])])
async def test_any_tree_gives_the_same_tokens(
    tmp_path: Path, temperature: float, trees: list[dict[str, Any]]
) -> None:
    model = made.make_model(tmp_path / "made", "llama", layers=6)  # wide trees fit no less
    answers = []
    for tree in trees:
        async with made_engine(model, **tree) as engine:
            answer = await engine.generate(IDS, max_tokens=TOKENS, temperature=temperature, seed=11)
            _sane(answer, engine)
            answers.append(answer)
    assert len({answer.token_ids for answer in answers}) == 1
    assert answers[0].drafted == 0 and all(answer.drafted for answer in answers[1:])
    if temperature == 0:
        assert list(answers[0].token_ids) == made.reference_generate(model, IDS, TOKENS)


def _sane(answer: Any, engine: Engine) -> None:
    """What is reported of speculation hangs together."""
    nodes = engine.plan.placement.tree_budget
    assert answer.tau is not None and answer.tokens_per_round == answer.tau + 1
    assert 0 <= answer.tau <= nodes
    accepted = round(answer.tau * answer.rounds)
    assert accepted == pytest.approx(answer.tau * answer.rounds)
    # The prompt gives one token, each round its bonus; the last round may have been cut.
    assert TOKENS - 1 <= accepted + answer.rounds <= TOKENS
    assert answer.drafted <= answer.rounds * nodes
    assert accepted <= answer.drafted


async def test_a_stall_does_not_end_speculation_for_good(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft step that took seconds once, because the machine did something else."""
    run, steps = DraftModel.run, [0]

    def stalled(draft: DraftModel, *args: Any) -> None:
        run(draft, *args)
        steps[0] += 1
        if steps[0] in (6, 7):
            draft.step_s = 60.0

    monkeypatch.setattr(DraftModel, "run", stalled)
    async with made_engine(model, timed=True) as engine:
        while steps[0] < 7:
            await engine.generate(IDS, max_tokens=TOKENS)
        # A few dozen rounds later it is drafting again.
        late = [await engine.generate(IDS, max_tokens=TOKENS) for _ in range(12)]
    assert any(answer.drafted for answer in late)


# The whole way, from a directory


async def test_opened_as_a_program_does(chatty: Path) -> None:
    ids = made.make_prompt(320, 9)
    async with Engine.open(chatty, memory="64MiB", context=64, device="cpu") as engine:
        answer = await engine.generate(ids, max_tokens=5)
        assert answer.rounds > 0
    assert list(answer.token_ids) == made.reference_generate(chatty, ids, 5)
    opened = await Engine.open(
        chatty, memory="64MiB", context=64, device="simulated", link_gbps=2.0
    )
    assert (await opened.generate(ids, max_tokens=5)).token_ids == answer.token_ids
    await opened.close()
    assert opened.runtime.device.memory.held == 0


async def test_opened_with_too_little(chatty: Path) -> None:
    with pytest.raises(BudgetError):
        async with Engine.open(chatty, memory="1MiB", context=64):
            pass


def test_without_an_event_loop(chatty: Path) -> None:
    answer = generate("hi", model=chatty, memory="64MiB", context=64, max_tokens=4)
    assert len(answer.token_ids) == 4


def test_options_and_settings_without_an_event_loop(chatty: Path) -> None:
    settings: dict[str, Any] = {"model": chatty, "memory": "64MiB", "context": 64}
    whole = generate("hi", **settings, max_tokens=8)
    answer = generate("hi", **settings, max_tokens=8, stop=whole.text[-1], top_k=5)
    assert answer.text == whole.text[: whole.text.index(whole.text[-1])]
    with pytest.raises(OptionError, match=r"top_kk was 5; expected one of max_tokens.*memory"):
        generate("hi", **settings, top_kk=5)


async def test_without_an_event_loop_but_in_one(chatty: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Engine\.open"):
        generate("hi", model=chatty)


async def test_opened_in_one_task_and_closed_in_another(model: Path) -> None:
    opened: list[Engine] = []
    done = anyio.Event()

    async def opens() -> None:
        async with made_engine(model) as engine:
            opened.append(engine)
            await done.wait()

    async with anyio.create_task_group() as group:
        group.start_soon(opens)
        while not opened:
            await anyio.lowlevel.checkpoint()
        answer = await opened[0].generate(IDS, max_tokens=2)
        await opened[0].close()
        done.set()
    assert list(answer.token_ids) == made.reference_generate(model, IDS, 2)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
async def test_opened_and_never_used(model: Path, device: str) -> None:
    async with made_engine(model, device=device, delays=1):
        pass


def test_never_closed(chatty: Path) -> None:
    """The loop ends under it: nobody hangs, and nothing is said to live on."""
    held: list[Engine] = []

    async def leave_open() -> Sequence[int]:
        engine = await Engine.open(chatty, memory="64MiB", context=64)
        held.append(engine)
        engine.stream(IDS, max_tokens=40)
        answer = await engine.generate(IDS, max_tokens=2)
        return answer.token_ids

    tokens = asyncio.run(leave_open())
    assert list(tokens) == made.reference_generate(chatty, IDS, 2)
    assert held[0].sessions.empty
    held[0].topology.admission.close()  # or its finalizer warns, as it should
    held[0].runtime.close()


# Speculation is never off in silence


async def test_it_says_so_when_speculation_does_not_pay(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StepTimes, "of", lambda times, rows: 1e6)
    async with made_engine(model, timed=True) as engine:
        await engine.generate(IDS, max_tokens=TOKENS)
    assert [m for m in caplog.messages if "does not pay" in m], "and not once a round"
    assert len(caplog.messages) == 1


async def test_it_says_so_when_no_draft_is_accepted(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(self: object, place: int, growth: Growth, nodes: list[int], *_: object) -> None:
        growth.begin(nodes)
        # Tokens that the model would not choose, however it is made.
        growth.extend(nodes, torch.randn(len(nodes), 320).log_softmax(dim=1))

    monkeypatch.setattr(DraftModel, "run", run)
    async with made_engine(model, width=4, depth=8) as engine:
        answer = await engine.generate(IDS, max_tokens=60)
        assert answer.tau is not None and answer.tau < 0.05
    assert len([m for m in caplog.messages if "hardly any draft is accepted" in m]) == 1


async def test_it_says_so_when_there_is_no_memory_for_substitutes(
    chatty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = OpenedModel(chatty)
    plain = make_plan(opened, substitute="none")
    opened.close()
    for wanted, said in (("auto", 1), ("none", 0)):
        caplog.clear()
        async with made_engine(chatty, plan=plain, asked=wanted):
            pass
        assert len([m for m in caplog.messages if "speculation is off" in m]) == said
