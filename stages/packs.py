"""Who rides in a sweep, and which rows go through a layer in one call. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from routing.messages import Sampling
from stages.tree import depths


class Rider(msgspec.Struct, frozen=True):
    """One session's rows in a sweep.

    A tree (`parents` given): node i stands at `position` + its depth, and every node is asked for
    the token after it. A prompt (`parents` None): consecutive rows from `position` on, of which
    only the last is asked. `position` is also the number of rows committed.

    What its options look at: `prompt` tokens of `history` are the prompt's; the history ends with
    the root, or with the last row of a prompt (empty where sampling does not look back).
    `logprobs` is the request's.
    """

    session: int
    place: int
    position: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None
    sampling: Sampling
    prompt: int = 0
    history: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def whole(self) -> bool:
        """Whether the largest logit will not do, so that whole rows of logits are needed."""
        return not self.sampling.plain or self.logprobs is not None

    def positions(self) -> list[int]:
        """Position of each row."""
        if self.parents is None:
            return list(range(self.position, self.position + len(self.tokens)))
        return [self.position + depth for depth in depths(self.parents)]

    def asked(self) -> list[int]:
        """The rows whose next token is wanted."""
        last = len(self.tokens) - 1
        return [last] if self.parents is None else list(range(last + 1))


class Chunk(msgspec.Struct, frozen=True):
    """Rows [start, stop) of the rider with this index."""

    rider: int
    start: int
    stop: int


def cut_packs(riders: Sequence[Rider], pack_rows: int) -> list[list[Chunk]]:
    """Split the riders' rows into packs of at most `pack_rows` rows, in order.

    A tree is never cut, since its nodes see each other; one larger than `pack_rows` gets a pack
    of its own. A prompt is cut where a pack is full; its chunks stay in order, so that within a
    layer each finds the keys of those before it.
    """
    assert pack_rows >= 1, pack_rows
    packs: list[list[Chunk]] = []
    room = 0
    for index, rider in enumerate(riders):
        start, rows = 0, len(rider.tokens)
        while start < rows:
            whole = rider.parents is not None
            if room == 0 or (whole and rows > room):
                packs.append([])
                room = pack_rows
            take = rows if whole else min(rows - start, room)
            packs[-1].append(Chunk(index, start, start + take))
            start += take
            room = max(0, room - take)
    return packs
