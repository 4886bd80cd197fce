"""The stream a caller holds: what it yields, and all the ways of letting it go."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import anyio
import msgspec
import pytest
from transformers import AutoTokenizer

from pipeline.engine import Engine
from pipeline.stream import TokenStream
from routing.errors import EngineClosedError
from routing.messages import Batch, TokenLogprob
from routing.sessions import Session
from tests import made
from tests.pipeline.made_engine import made_engine
from tests.pipeline.moments import idle, nothing_held

TOKENS = 12
IDS = made.make_prompt(320, 10, seed=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = made.make_model(tmp_path_factory.mktemp("made"), "llama")
    return made.make_tokenizer(directory)


async def test_deltas_add_up_to_the_answer(model: Path) -> None:
    async with made_engine(model) as engine:
        stream = engine.stream(IDS, max_tokens=TOKENS, seed=5)
        deltas = [delta async for delta in stream]
        answer = stream.answer()
        assert answer == await stream.collect(), "collecting a whole stream gives it again"
        assert [delta async for delta in stream] == []
    assert list(answer.token_ids) == made.reference_generate(model, IDS, TOKENS)
    assert sum((delta.token_ids for delta in deltas), ()) == answer.token_ids
    assert "".join(delta.text for delta in deltas) == answer.text
    assert all(delta.token_ids and delta.finish_reason is None for delta in deltas[:-1])
    assert deltas[-1].token_ids == () and deltas[-1].finish_reason == "length"
    assert answer.logprobs is None and not any(delta.logprobs for delta in deltas)
    assert len(deltas) == answer.rounds + 2, "the prompt's token, one batch a round, the end"
    assert answer.usage.prompt_tokens == len(IDS)
    assert answer.usage.completion_tokens == TOKENS
    assert answer.seed == stream.seed == 5
    assert 0 < answer.timings.ttft_s <= answer.timings.total_s
    assert answer.timings.tokens_per_s is not None and answer.timings.tokens_per_s > 0


async def test_text_never_ends_in_the_middle_of_a_character(model: Path) -> None:
    """The made tokenizer's tokens are bytes, and a made model writes any bytes."""
    async with made_engine(model) as engine:
        stream = engine.stream(IDS, max_tokens=60)
        texts = [delta.text async for delta in stream]
        answer = stream.answer()
    assert "".join(texts) == answer.text
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert "\N{REPLACEMENT CHARACTER}" in answer.text, "a test of broken characters needs some"


async def test_log_probabilities_come_with_their_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = Session.deliver

    def with_logprobs(session: Session, batch: Batch) -> bool:
        made_up = tuple(TokenLogprob(token, -float(token)) for token in batch.tokens)
        return deliver(session, msgspec.structs.replace(batch, logprobs=made_up))

    monkeypatch.setattr(Session, "deliver", with_logprobs)
    async with made_engine(model) as engine:
        stream = engine.stream(IDS, max_tokens=TOKENS, logprobs=0)
        deltas = [delta async for delta in stream]
        answer = stream.answer()
    assert answer.logprobs is not None
    assert [one.token for one in answer.logprobs] == list(answer.token_ids)
    assert sum((delta.logprobs for delta in deltas), ()) == answer.logprobs
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


async def test_no_answer_before_the_end(model: Path) -> None:
    async with made_engine(model) as engine, engine.stream(IDS, max_tokens=TOKENS) as stream:
        await anext(stream)
        with pytest.raises(RuntimeError, match="not whole"):
            stream.answer()
        # Nor is it once the request has ended, where it was not taken to its end.
        await idle(engine)
        await stream.aclose()
        with pytest.raises(RuntimeError, match="not whole"):
            stream.answer()


async def leave_by_break(engine: Engine) -> None:
    async for _ in engine.stream(IDS, max_tokens=60):
        break


async def leave_by_break_of_a_held_stream(engine: Engine) -> None:
    async with engine.stream(IDS, max_tokens=60) as stream:
        async for _ in stream:
            break
    nothing_held(engine)


async def leave_by_error(engine: Engine) -> None:
    async def fail() -> None:
        async for delta in engine.stream(IDS, max_tokens=60):
            len(delta.token_ids) / 0

    with pytest.raises(ZeroDivisionError):
        await fail()


async def leave_by_error_in_a_held_stream(engine: Engine) -> None:
    async def fail() -> None:
        async with engine.stream(IDS, max_tokens=60) as stream:
            async for delta in stream:
                len(delta.token_ids) / 0

    with pytest.raises(ZeroDivisionError):
        await fail()
    nothing_held(engine)


async def leave_by_closing_twice(engine: Engine) -> None:
    stream = engine.stream(IDS, max_tokens=60)
    await anext(stream)
    await stream.aclose()
    nothing_held(engine)
    await stream.aclose()
    assert [delta async for delta in stream] == []


async def leave_before_the_first_delta(engine: Engine) -> None:
    await engine.stream(IDS, max_tokens=60).aclose()
    nothing_held(engine)


async def leave_without_a_look(engine: Engine) -> None:
    engine.stream(IDS, max_tokens=60)


async def leave_by_cancelled_close(engine: Engine) -> None:
    stream = engine.stream(IDS, max_tokens=60)
    await anext(stream)
    closing = asyncio.create_task(stream.aclose())
    await anyio.lowlevel.checkpoint()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


async def leave_by_closing_after_a_cancelled_step(engine: Engine) -> None:
    """As a timeout inside `async with` does."""
    async with engine.stream(IDS, max_tokens=60) as stream:
        await anext(stream)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        assert not engine.sessions.empty, "it has not had the time to end"
    nothing_held(engine)


async def leave_by_closing_from_another_task(engine: Engine) -> None:
    stream = engine.stream(IDS, max_tokens=60)
    left: list[object] = []

    async def take() -> None:
        left.extend([delta async for delta in stream])

    async with anyio.create_task_group() as group:
        group.start_soon(take)
        await anyio.lowlevel.checkpoint()
        await stream.aclose()
        nothing_held(engine)
    assert left == [], "the reader is told that there is no more"


async def leave_to_another_thread(engine: Engine) -> None:
    """The collector may run wherever it likes."""
    held = [engine.stream(IDS, max_tokens=60)]
    await anext(held[0])
    dropper = threading.Thread(target=held.clear)
    dropper.start()
    await anyio.to_thread.run_sync(dropper.join)


async def leave_in_a_circle(engine: Engine) -> None:
    """A stream that only the garbage collector can find."""
    circle: list[object] = [engine.stream(IDS, max_tokens=60)]
    circle.append(circle)
    stream = circle[0]
    assert isinstance(stream, TokenStream)
    await anext(stream)
    del circle, stream
    gc.collect()


WAYS = [value for name, value in globals().items() if name.startswith("leave_")]


@pytest.mark.parametrize("leave", WAYS)
async def test_leaving_ends_the_request(model: Path, leave: object) -> None:
    async with made_engine(model) as engine:
        await leave(engine)  # type: ignore[operator]
        await anyio.lowlevel.checkpoint()  # a finalizer posts its cancel to the loop
        assert all(session.cancelled for session in engine.sessions._sessions.values())
        await idle(engine)
        nothing_held(engine)
        answer = await engine.generate(IDS, max_tokens=4)
        assert list(answer.token_ids) == made.reference_generate(model, IDS, 4)


async def test_a_breaking_loop_cancels_nobody_else(model: Path) -> None:
    """An async generator that holds a cancel scope would cancel its caller here."""
    async with made_engine(model) as engine:
        with anyio.CancelScope() as scope:
            async for _ in engine.stream(IDS, max_tokens=60):
                break
            gc.collect()
            await anyio.lowlevel.checkpoint()
        assert not scope.cancel_called
        await idle(engine)


async def test_a_stream_outlives_its_engine(model: Path) -> None:
    async with made_engine(model) as engine:
        stream, other = engine.stream(IDS, max_tokens=60), engine.stream(IDS, max_tokens=60)
        first = await anext(stream)
    # What was delivered is still there to be taken.
    rest = [delta async for delta in stream]
    assert rest[-1].finish_reason == "cancelled"
    tokens = sum((delta.token_ids for delta in rest), first.token_ids)
    assert list(tokens) == made.reference_generate(model, IDS, 60)[: len(tokens)]
    assert stream.answer().finish_reason == "cancelled"
    with pytest.raises(EngineClosedError):
        await other.collect()
    await stream.aclose()


def test_a_stream_outlives_its_event_loop(model: Path) -> None:
    async def leave_behind() -> TokenStream:
        async with made_engine(model) as engine:
            stream = engine.stream(IDS, max_tokens=60)
            await anext(stream)
        return stream

    stream = asyncio.run(leave_behind())
    del stream
    gc.collect()


async def test_two_streams_of_one_task(model: Path) -> None:
    """Taking turns between streams is as good as reading them one after the other."""
    async with made_engine(model, sessions=2) as engine:
        other = made.make_prompt(320, 7, seed=9)
        streams = [engine.stream(ids, max_tokens=TOKENS) for ids in (IDS, other)]
        tokens: list[list[int]] = [[], []]
        unfinished = {0, 1}
        while unfinished:
            for number in sorted(unfinished):
                delta = await anext(streams[number])
                tokens[number] += delta.token_ids
                if delta.finish_reason is not None:
                    unfinished.discard(number)
    assert tokens == [made.reference_generate(model, ids, TOKENS) for ids in (IDS, other)]


async def test_the_engine_closed_from_within_the_loop(model: Path) -> None:
    async with made_engine(model) as engine:
        reasons = []
        async for delta in engine.stream(IDS, max_tokens=60):
            await engine.close()
            reasons.append(delta.finish_reason)
        assert reasons[-1] == "cancelled"
