"""One pass of all layers over everything that waits: trees to verify, prompts to prefill.

The state of a sweep and the work of its steps, run on the verifier's stream one after the other;
moving weights and messages is the verifier's (verifier.py). Rows are packed: linear layers see the
rows of several riders at once, at most `pack_rows` a call, so that a long prompt needs bounded
workspace and still passes a layer whole before the next layer is fetched (layer-major prefill).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from stages.attention import ChunkMask, PromptMask, Span, SweepRiders, TreeMask
from stages.embedding import Embedding
from stages.head import HeadScan, LogitRows, Whole
from stages.heap import give_back
from stages.kv import KVStore
from stages.noise import Noise
from stages.outcomes import Outcome, WholeRows, largest, outcome
from stages.packs import Chunk, Rider, cut_packs
from stages.rope import Rope
from stages.sampling import Scorer
from stages.skeleton import Rotary, Skeleton, turn
from stages.tree import ancestor_mask

ROW_MULTIPLE = 4
"""Packs are padded to it: MKL rounds products of 1 to 3 rows otherwise than those of 4 and more."""


class Model:
    """What a sweep computes with: shared by all sweeps, used by one at a time."""

    def __init__(
        self,
        skeleton: Skeleton,
        rope: Rope,
        embedding: Embedding,
        kv: KVStore,
        pack_rows: int,
        logit_rows: LogitRows,
        noise: Noise,
    ) -> None:
        self.skeleton, self.rope, self.embedding = skeleton, rope, embedding
        self.kv, self.pack_rows = kv, pack_rows
        self.logit_rows, self.noise = logit_rows, noise
        self._scorers: dict[int, tuple[int, Scorer]] = {}

    def scorer(self, rider: Rider) -> Scorer:
        """The rider's own: made once a session, forgotten when another takes its place."""
        session, scorer = self._scorers.get(rider.place, (None, None))
        if session != rider.session or scorer is None:
            vocab = self.skeleton.config.vocab_size
            scorer = Scorer(rider.sampling, rider.prompt, self.noise, vocab)
            self._scorers[rider.place] = (rider.session, scorer)
        return scorer


class _Pack:
    """Rows that go through a layer in one call: hidden is (1, rows + padding, hidden)."""

    def __init__(
        self, hidden: torch.Tensor, riders: SweepRiders, rotary: Mapping[str, Rotary]
    ) -> None:
        self.hidden, self.riders, self.rotary = hidden, riders, rotary


class Sweep:
    """A sweep under way: `layer` for each layer in order, `begin_head`, `head`, `finish`."""

    def __init__(self, model: Model, riders: Sequence[Rider]) -> None:
        """Embeds the riders' tokens. Raises LinkError when embeddings cannot be read."""
        self.riders = tuple(riders)
        self.rows = sum(len(rider.tokens) for rider in riders)
        self._model = model
        self._positions = [rider.positions() for rider in riders]
        self._masks = [self._mask(index) for index in range(len(riders))]
        chunks = cut_packs(riders, model.pack_rows)
        asked = [set(rider.asked()) for rider in riders]
        self._homes = {
            (chunk.rider, row): (number, begin + row - chunk.start)
            for number, pack in enumerate(chunks)
            for chunk, begin in zip(pack, _begins(pack), strict=True)
            for row in range(chunk.start, chunk.stop)
            if row in asked[chunk.rider]
        }
        self._packs = [self._pack(pack) for pack in chunks]
        self._scan: HeadScan | None = None
        self._asked: list[tuple[int, int]] = []
        self._logits: dict[int, torch.Tensor] = {}

    def _mask(self, index: int) -> TreeMask | PromptMask:
        rider = self.riders[index]
        committed = self._model.kv.committed(rider.place)
        assert committed == rider.position, (committed, rider)
        if rider.parents is None:
            rows = len(rider.tokens)
            return PromptMask(min(rows, self._model.pack_rows), committed + rows)
        positions = torch.tensor(self._positions[index])
        return TreeMask(committed, positions, ancestor_mask(rider.parents))

    def _chunk_mask(self, chunk: Chunk) -> TreeMask | ChunkMask:
        mask = self._masks[chunk.rider]
        if isinstance(mask, TreeMask):
            return mask
        before = self.riders[chunk.rider].position + chunk.start
        return mask.chunk(chunk.stop - chunk.start, before)

    def _pack(self, chunks: Sequence[Chunk]) -> _Pack:
        model = self._model
        tokens: list[int] = []
        spans: list[Span] = []
        turns: list[Mapping[str, Rotary]] = []
        for chunk in chunks:
            rider, positions = self.riders[chunk.rider], self._positions[chunk.rider]
            begin = len(tokens)
            tokens += rider.tokens[chunk.start : chunk.stop]
            mask = self._chunk_mask(chunk)
            spans.append(Span(rider.place, begin, len(tokens), chunk.start, mask))
            where = torch.tensor(positions[chunk.start : chunk.stop])
            turns.append(turn(model.rope, where, max(positions) + 1, model.skeleton.dtype))
        padding = -len(tokens) % ROW_MULTIPLE
        hidden = functional.pad(model.embedding.rows(tokens), (0, 0, 0, padding))
        rotary = {kind: _join([turn[kind] for turn in turns], padding) for kind in turns[0]}
        return _Pack(hidden[None], SweepRiders(model.kv, spans), rotary)

    def layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Run every row through layer `index`, with `tensors` as its streamed matrices."""
        skeleton = self._model.skeleton
        skeleton.bind(tensors)
        try:
            for pack in self._packs:
                pack.hidden = skeleton.run_layer(index, pack.hidden, pack.riders, pack.rotary)
        finally:
            skeleton.release(tensors)

    def begin_head(self) -> None:
        """After the last layer: gather the rows whose next token is wanted."""
        model = self._model
        rows: list[torch.Tensor] = []
        whole: list[Whole] = []
        filled = 0
        for index, rider in enumerate(self.riders):
            start = len(rows)
            for row in rider.asked():
                pack, place = self._homes[index, row]
                rows.append(self._packs[pack].hidden[0, place])
            stop = len(rows)
            self._asked.append((start, stop))
            if rider.whole:
                logits = model.logit_rows.view(filled, filled + stop - start)
                self._logits[index] = logits
                whole.append(Whole(start, stop, logits))
                filled += stop - start
        padding = -len(rows) % ROW_MULTIPLE
        hidden = functional.pad(torch.stack(rows), (0, 0, 0, padding))
        self._packs.clear()
        self._scan = HeadScan(model.skeleton, model.skeleton.finish(hidden), whole)

    def head(self, start: int, weight: torch.Tensor) -> None:
        """Score vocabulary rows from `start` on; weight is (rows, hidden)."""
        assert self._scan is not None
        self._scan.see(start, weight)

    def finish(self) -> list[Outcome | None]:
        """What becomes of each rider; None where its scores are no numbers.

        Options are applied here, to the rows on the accepted path and no others.
        """
        assert self._scan is not None
        tokens = self._scan.chosen()
        outcomes = [
            self._outcome(index, tokens[start:stop])
            for index, (start, stop) in enumerate(self._asked)
        ]
        give_back()
        return outcomes

    def _outcome(self, index: int, tokens: Sequence[int | None]) -> Outcome | None:
        rider = self.riders[index]
        if any(token is None for token in tokens):
            return None
        if not rider.whole:
            return outcome(rider, largest(tokens))
        positions = [self._positions[index][row] + 1 for row in rider.asked()]
        rows = WholeRows(rider, self._logits[index], self._model.scorer(rider), positions)
        return outcome(rider, rows.choose)


def _begins(pack: Sequence[Chunk]) -> list[int]:
    begins, total = [], 0
    for chunk in pack:
        begins.append(total)
        total += chunk.stop - chunk.start
    return begins


def _join(pairs: Sequence[Rotary], padding: int) -> Rotary:
    cos, sin = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
    pad = (0, 0, 0, padding)
    return functional.pad(cos, pad), functional.pad(sin, pad)
