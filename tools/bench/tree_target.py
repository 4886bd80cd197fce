"""The whole target in memory at full precision: it makes the answers that are replayed.

Its KV store holds the rows of the last answers, one place each, for drafters to read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from routing.messages import Sampling
from stages.head import LogitRows
from stages.loading import OpenedModel
from stages.packs import Rider
from stages.placement import Placement
from stages.progress import Progress
from stages.sweep import Model, Sweep
from stages.weights import Weights
from tools.bench.target_rows import TargetRows

PACK_ROWS = 256


class Target(TargetRows):
    """Owns the weights besides; each place has one answer's rows."""

    def __init__(self, opened: OpenedModel, places: int, capacity: int, progress: Progress) -> None:
        """See TargetRows."""
        super().__init__(opened, places, capacity)
        with self._undo.pop_all() as undo:
            skeleton, shape, dtype = opened.skeleton(), opened.shape, opened.dtype
            names = tuple(matrix.name for matrix in (*shape.matrices(), shape.head))
            placement = Placement(names, None, 0, 0, shape.vocab, capacity, places, 0, PACK_ROWS)
            weights = Weights.load(self.device, opened, placement, progress)
            undo.callback(weights.close)
            skeleton.bind({n: t for n, t in weights.resident.items() if n in skeleton})
            self._head = weights.resident[shape.head.name]
            rows = LogitRows(self.device, sessions=places, each=1, vocab=shape.vocab, dtype=dtype)
            undo.callback(rows.close)
            self._model = Model(
                skeleton, opened.rope, self.embedding, self.kv, PACK_ROWS, rows, self.noise
            )
            self._undo = undo.pop_all()
        self._sessions = 0

    def answer(
        self,
        prompt: Sequence[int],
        samplings: Sequence[Sampling],
        most: int,
        stop_ids: Sequence[int],
    ) -> list[tuple[int, ...]]:
        """The text of prompt and answer for each of `samplings`, at most `most` tokens of answer.

        Answers ride together, one a place; the store then has the rows of all tokens but the last.
        Raises RuntimeError where the model's scores are no numbers.
        """
        texts = [list(prompt) for _ in samplings]
        live = list(range(len(samplings)))
        first, count = self._sessions, len(prompt)
        self._sessions += len(samplings)
        for place in live:
            self.kv.reset(place)
        while live:
            riders = [
                Rider(
                    first + place,
                    place,
                    self.kv.committed(place),
                    tuple(texts[place][self.kv.committed(place) :]),
                    None,
                    samplings[place],
                    prompt=count,
                )
                for place in live
            ]
            for place, token in zip(live, self._sweep(riders), strict=True):
                self.kv.commit(place, range(len(texts[place]) - self.kv.committed(place)))
                texts[place].append(token)
            live = [
                place
                for place in live
                if len(texts[place]) < count + most and texts[place][-1] not in stop_ids
            ]
        return [tuple(text) for text in texts]

    def _sweep(self, riders: Sequence[Rider]) -> list[int]:
        with torch.no_grad():
            sweep = Sweep(self._model, riders)
            for layer in range(len(self.shape.layers)):
                sweep.layer(layer, {})
            sweep.begin_head()
            sweep.head(0, self._head)
            outcomes = sweep.finish()
        tokens = [outcome.tokens[-1] for outcome in outcomes if outcome is not None]
        if len(tokens) < len(riders):
            raise RuntimeError("the model's scores are no numbers")
        return tokens
