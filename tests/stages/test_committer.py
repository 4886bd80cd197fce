"""From verdicts to batches: where an answer ends, in the order of its tokens, and what is freed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest
import torch

from routing.errors import PacelineError
from routing.mailboxes import Mailbox
from routing.messages import (
    Batch,
    DraftOrder,
    Failed,
    Refill,
    Request,
    Sampling,
    ToCommitter,
    TokenLogprob,
    Verdict,
)
from routing.sessions import Session, SessionTable
from routing.trace import Trace
from stages.committer import Committer
from stages.device import CpuDevice
from stages.kv import KVStore
from stages.streams import Stream
from stages.tokenizer import Decoder, Tokenizer
from tests.made import BYTES, make_model, make_tokenizer
from tests.routing.made import drafter_mail
from tests.stages.made_stages import made_shape

PROMPT = (1, 2, 3)
END = BYTES
"""The made tokenizer's token that ends a text; those below it are single bytes."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("made") / "model"
    make_tokenizer(make_model(path, "llama", layers=1, dtype=torch.float32))
    loaded = Tokenizer.load(path)
    assert loaded is not None
    return loaded


class Office:
    """A committer at work, with the verifier's and the drafter's ends in the test's hands."""

    def __init__(self, tokenizer: Tokenizer | None, context: int, switch_at: int | None) -> None:
        self.table = SessionTable(2, 8)
        self._mailbox, self._orders, self._drafter = drafter_mail(2)
        mailbox = Mailbox[ToCommitter]("committer", 2)
        self.verdicts, inbox = mailbox.sender(), mailbox.receiver()
        mailbox.seal()
        self.kv = KVStore(
            CpuDevice(), made_shape(layers=1), places=2, capacity=64, dtype=torch.float32
        )
        self._stream = Stream("commit")
        self._sessions: list[Session] = []
        self.committer = Committer(
            inbox, self.table, self.kv, self._stream, tokenizer, context, switch_at, Trace()
        )

    async def live(
        self,
        max_tokens: int = 20,
        *,
        stop_ids: tuple[int, ...] = (),
        stop: tuple[str, ...] = (),
        logprobs: int | None = None,
    ) -> Session:
        """A session that has its place and whose prompt is not computed yet."""
        request = Request(
            len(self._sessions), PROMPT, max_tokens, Sampling(), stop_ids, stop, logprobs
        )
        session = self.table.open(request)
        self._sessions.append(session)
        assert await self.table.admit(session, self._orders) is not None
        return session

    async def tell(
        self, session: Session, tokens: Sequence[int], logprobs: tuple[TokenLogprob, ...] = ()
    ) -> DraftOrder | Refill | None:
        """A verdict of so many tokens, the last the bonus; the next order, or None at the end."""
        assert session.place is not None
        prompt = not session.answer
        path = tuple(range(len(PROMPT) if prompt else len(tokens)))
        self.verdicts.send_nowait(
            Verdict(session.id, session.place, path, tuple(tokens), 9, prompt, logprobs)
        )
        return await self.next(session)

    async def next(self, session: Session) -> DraftOrder | Refill | None:
        """Wait for the session's next order, or its end."""
        found: list[DraftOrder | Refill] = []
        async with anyio.create_task_group() as group:

            async def order() -> None:
                message = await self._drafter.receive()
                assert isinstance(message, DraftOrder | Refill)
                found.append(message)
                group.cancel_scope.cancel()

            async def end() -> None:
                await session.over.wait()
                group.cancel_scope.cancel()

            group.start_soon(order)
            group.start_soon(end)
        return found[0] if found else None

    def close(self) -> None:
        self.verdicts.close()
        for session in self._sessions:
            session.batches.close()
        self._orders.close()
        self._drafter.close()
        self._stream.close()
        self.kv.close()


@asynccontextmanager
async def office(
    tokenizer: Tokenizer | None = None, context: int = 64, switch_at: int | None = None
) -> AsyncIterator[Office]:
    """Checked at the end, by when the test has ended all its sessions."""
    made = Office(tokenizer, context, switch_at)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(made.committer.run)
            yield made
            made.verdicts.close()
        made.table.check()
        assert made.table.empty and made.kv.rows_held == 0
        assert not made.committer._texts and not made.committer._refilled
    finally:
        made.close()


async def batches(session: Session) -> list[Batch]:
    """What an ended session delivered."""
    return [batch async for batch in session.batches]


def text(parts: Sequence[Batch]) -> str:
    return "".join(batch.text for batch in parts)


async def answered(
    office: Office, session: Session, *blocks: Sequence[int]
) -> tuple[tuple[int, ...], str]:
    """Tokens and text of a session that the last block ends."""
    for block in blocks[:-1]:
        order = await office.tell(session, block)
        assert isinstance(order, DraftOrder)
        position = len(PROMPT) + session.generated - 1
        assert (order.token, order.position) == (block[-1], position)
        assert office.kv.committed(order.place) == position
    assert await office.tell(session, blocks[-1]) is None
    parts = await batches(session)
    tokens = sum((batch.tokens for batch in parts), ())
    assert tuple(session.answer) == tokens and session.generated == len(tokens)
    return tokens, text(parts)


@pytest.mark.parametrize("limit", range(1, 9))
async def test_max_tokens_is_obeyed_inside_a_block(limit: int) -> None:
    async with office() as o:
        session = await o.live(limit)
        blocks: list[list[int]] = [[10], [11, 12, 13, 14], [15, 16, 17]]
        needed = 1 if limit == 1 else 2 if limit <= 5 else 3
        tokens, _ = await answered(o, session, *blocks[:needed])
        assert tokens == tuple(range(10, 10 + limit))
        assert session.finish_reason == "length"


@pytest.mark.parametrize("place", range(4))
async def test_a_stop_token_in_a_block(tokenizer: Tokenizer, place: int) -> None:
    async with office(tokenizer) as o:
        block = tokenizer.encode("abcd")
        block[place] = END
        session = await o.live(stop_ids=(END,))
        tokens, shown = await answered(o, session, tokenizer.encode("x"), block)
        assert tokens == (*tokenizer.encode("x"), *block[: place + 1])
        assert shown == "xabc"[: 1 + place] and session.finish_reason == "stop"
        assert session.accepted == min(3, place + 1)


async def test_a_stop_token_that_has_a_text_does_not_show_it(tokenizer: Tokenizer) -> None:
    async with office(tokenizer) as o:
        session = await o.live(stop_ids=tuple(tokenizer.encode("c")))
        tokens, shown = await answered(o, session, tokenizer.encode("a"), tokenizer.encode("bcd"))
        assert (tokens, shown) == (tuple(tokenizer.encode("abc")), "ab")


@pytest.mark.parametrize(
    ("block", "limit", "tokens", "shown", "reason"),
    [
        ("ab!cd", 20, "ab!", "ab", "stop"),
        ("abEND!", 20, "abEND", "ab", "stop"),
        ("ab!END", 20, "ab!", "ab", "stop"),
        ("abEN!D", 20, "abEN!", "abEN", "stop"),
        ("abEND", 5, "abEND", "ab", "stop"),
        ("abEND", 4, "abEN", "abEN", "length"),
        ("abEN!", 4, "abEN", "abEN", "length"),
        ("ab!END", 3, "ab!", "ab", "stop"),
        ("abcdef", 3, "abc", "abc", "length"),
    ],
)
async def test_what_comes_first_ends_the_answer(
    tokenizer: Tokenizer, block: str, limit: int, tokens: str, shown: str, reason: str
) -> None:
    """A stop token (!), a stop string (END) and the limit, within one accepted block."""
    async with office(tokenizer) as o:
        session = await o.live(limit + 1, stop_ids=tuple(tokenizer.encode("!")), stop=("END",))
        found = await answered(o, session, tokenizer.encode("x"), tokenizer.encode(block))
        assert found == (tuple(tokenizer.encode("x" + tokens)), "x" + shown)
        assert session.finish_reason == reason


async def test_the_context_is_a_length(tokenizer: Tokenizer) -> None:
    async with office(tokenizer, context=6) as o:
        session = await o.live()
        tokens, shown = await answered(o, session, tokenizer.encode("a"), tokenizer.encode("bcd"))
        assert (tokens, shown) == (tuple(tokenizer.encode("abc")), "abc")
        assert session.finish_reason == "length"


async def test_a_stop_string_over_blocks_and_batches_without_text(tokenizer: Tokenizer) -> None:
    async with office(tokenizer) as o:
        session = await o.live(stop=("STOP",))
        await o.tell(session, tokenizer.encode("a"))
        await o.tell(session, tokenizer.encode("ST"))
        await o.tell(session, tokenizer.encode("OST"))
        assert await o.tell(session, tokenizer.encode("OP?")) is None
        parts = await batches(session)
        assert [batch.text for batch in parts] == ["a", "", "STO", ""]
        assert sum((batch.tokens for batch in parts), ()) == tuple(tokenizer.encode("aSTOSTOP"))
        assert session.finish_reason == "stop"


@pytest.mark.parametrize(("limit", "last"), [(5, "😀"), (4, "\N{REPLACEMENT CHARACTER}")])
async def test_the_last_batch_brings_what_was_held_back(
    tokenizer: Tokenizer, limit: int, last: str
) -> None:
    async with office(tokenizer) as o:
        session = await o.live(limit)
        await o.tell(session, tokenizer.encode("a"))
        await o.tell(session, tokenizer.encode("😀")[:2])
        assert await o.tell(session, tokenizer.encode("😀")[2:]) is None
        assert [batch.text for batch in await batches(session)] == ["a", "", last]


async def test_log_probabilities_of_tokens_that_are_dropped_are_dropped(
    tokenizer: Tokenizer,
) -> None:
    async with office(tokenizer) as o:
        session = await o.live(3, logprobs=1)
        given = [TokenLogprob(token, -0.5, ((token, -0.5),)) for token in tokenizer.encode("abcde")]
        await o.tell(session, tokenizer.encode("a"), tuple(given[:1]))
        assert await o.tell(session, tokenizer.encode("bcde"), tuple(given[1:])) is None
        parts = await batches(session)
        assert [batch.logprobs for batch in parts] == [tuple(given[:1]), tuple(given[1:3])]
        assert all(len(batch.tokens) == len(batch.logprobs) for batch in parts)


async def test_a_model_without_a_tokenizer() -> None:
    async with office() as o:
        session = await o.live(3, stop_ids=(5,))
        assert await answered(o, session, [9], [8, 5, 6]) == ((9, 8, 5), "")
        assert session.finish_reason == "stop"


@pytest.mark.parametrize("where", ["add", "flush"])
async def test_a_decoder_that_raises_fails_its_own_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    add, flush = Decoder.add, Decoder.flush
    first, culprit, *rest = tokenizer.encode("aBcd")

    def bad_add(self: Decoder, tokens: Sequence[int]) -> str:
        if culprit in tokens and where == "add":
            raise ValueError("no such\nbyte")
        return add(self, tokens)

    def bad_flush(self: Decoder) -> str:
        if culprit in self._window:
            raise ValueError("no such\nbyte")
        return flush(self)

    monkeypatch.setattr(Decoder, "add", bad_add)
    monkeypatch.setattr(Decoder, "flush", bad_flush)
    async with office(tokenizer) as o:
        bad, good = await o.live(3), await o.live(3)
        await o.tell(bad, [first])
        await o.tell(good, [first])
        assert await o.tell(bad, [rest[0], culprit]) is None
        assert bad.finish_reason == "error" and isinstance(bad.error, PacelineError)
        assert "no such byte" in str(bad.error) and isinstance(bad.error.__cause__, ValueError)
        assert await answered(o, good, rest) == ((first, *rest), "acd")


@pytest.mark.parametrize("way", ["cancelled", "failed", "left"])
async def test_every_end_frees_what_was_kept(tokenizer: Tokenizer, way: str) -> None:
    async with office(tokenizer, switch_at=len(PROMPT)) as o:
        session = await o.live(stop=("ab",))
        assert isinstance(await o.tell(session, tokenizer.encode("a")), Refill)
        assert o.committer._texts and o.committer._refilled
        assert session.place is not None
        if way == "cancelled":
            o.table.cancel(session.id)
        if way == "left":
            session.batches.close()
        if way == "failed":
            o.verdicts.send_nowait(Failed(session.id, session.place, "verifier", "made up"))
            assert await o.next(session) is None
        else:
            rows = tuple(range(len(PROMPT) + 1))
            o.verdicts.send_nowait(Verdict(session.id, session.place, rows, (5,), 0))
            assert await o.next(session) is None
        assert session.finish_reason == ("error" if way == "failed" else "cancelled")
