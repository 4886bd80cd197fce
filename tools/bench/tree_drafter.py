"""The drafter of one format over a target's rows: steps timed in the format, trees replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median

import torch

from routing.messages import Sampling
from stages.draft_stack import DraftStack
from stages.drafting import DraftModel
from stages.growth import Growth, Limits
from stages.kv import DraftScratch, KVStore
from stages.noise import Noise
from stages.pace import StepTimes
from stages.placement import Placement
from stages.progress import Progress
from stages.sampling import SHORTLIST, Scorer
from stages.substitutes import Substitute
from stages.weights import Weights
from tools.bench.target_rows import TargetRows

TIMED_ROWS = (1, 2, 4, 6, 8)
"""Rows of the steps that are timed; others' times lie between these."""


class Silence(Noise):
    """No noise at all, whatever was asked for: a drafter that does not know the target's."""

    def row(self, seed: int, position: int, vocab: int) -> torch.Tensor:
        """See Noise."""
        return torch.zeros(vocab)


class TreeDrafter:
    """A draft model whose every matrix is a substitute in `form`. `close` it before its target."""

    def __init__(
        self, target: TargetRows, form: str, nodes: int, rows: int, progress: Progress
    ) -> None:
        """`nodes`: the most that a tree is sent with, `rows`: the most of it that are run."""
        self.form = form
        self._target = target
        opened, shape = target.opened, target.shape
        with ExitStack() as undo:
            placement = Placement((), form, 0, 0, shape.vocab, target.kv.capacity, 1, nodes, 1)
            weights = Weights.load(target.device, opened, placement, progress)
            undo.callback(weights.close)
            self._scratch = DraftScratch(target.device, shape, rows=rows, dtype=opened.dtype)
            undo.callback(self._scratch.close)
            self._weights = weights
            self.model = self.reading(target.kv)
            self._undo = undo.pop_all()

    def reading(self, kv: KVStore) -> DraftModel:
        """A model of the same substitutes that looks at rows of `kv`, which stays the caller's.

        All of them have the one scratch: a tree of one of them voids those of the others.
        """
        target = self._target
        return DraftModel(
            target.opened.skeleton(),
            self._weights,
            target.shape,
            target.opened.rope,
            target.embedding,
            kv,
            self._scratch,
            target.noise,
        )

    def stack(self, kv: KVStore, scratch: DraftScratch) -> DraftStack:
        """Its layers alone, over a store and a scratch that stay the caller's."""
        opened, resident = self._target.opened, self._weights.resident
        skeleton = opened.skeleton()
        skeleton.bind({name: t for name, t in resident.items() if name in skeleton})
        return DraftStack(skeleton, self._weights, opened.shape, opened.rope, kv, scratch)

    @property
    def substitutes(self) -> Mapping[tuple[str, ...], Substitute]:
        """What a step multiplies by, each once, by the names whose rows it joins."""
        return self._weights.substitutes

    def time_steps(self, text: Sequence[int], rows: int) -> tuple[float, float]:
        """Seconds of a step of the root, then of one of `rows` nodes, over the rows of `text`."""
        growth = Growth(text[-1], len(text) - 1, Limits(2, 8, self._scratch.rows))
        scorer = self.model.scorer(Sampling(), len(text))
        with torch.no_grad():
            self.model.run(0, growth, [0], scorer, (), 0.6)
            first = self.model.step_s
            self.model.run(0, growth, growth.likeliest(rows), scorer, (), 0.6)
        return first, self.model.step_s

    def close(self) -> None:
        """Give everything back."""
        self._undo.close()


class Replayer:
    """See Drafts: one model at one place, with the target's noise in its scores or without."""

    def __init__(
        self, model: DraftModel, target: TargetRows, place: int, sampling: Sampling, noisy: bool
    ) -> None:
        self._model, self._place = model, place
        noise = target.noise if noisy else Silence()
        self._scorer = Scorer(sampling, 0, noise, target.shape.vocab, shortlist=SHORTLIST)

    def run(self, growth: Growth, nodes: Sequence[int], temperature: float) -> None:
        """See Drafts."""
        with torch.no_grad():
            self._model.run(self._place, growth, nodes, self._scorer, (), temperature)

    def keep(self, rows: Sequence[int]) -> None:
        """See Drafts."""
        self._model.keep(rows)


def measure_steps(
    drafters: Iterable[TreeDrafter], text: Sequence[int], repeats: int
) -> dict[str, dict[int, float]]:
    """Median seconds of a step by format and number of rows. Formats take turns."""
    drafters = list(drafters)
    found: dict[str, dict[int, list[float]]] = {
        drafter.form: {rows: [] for rows in TIMED_ROWS} for drafter in drafters
    }
    for repeat in range(repeats + 1):
        for rows in TIMED_ROWS[1:]:
            for drafter in drafters:
                first, seconds = drafter.time_steps(text, rows)
                if repeat:  # the first time is slower
                    found[drafter.form][1].append(first)
                    found[drafter.form][rows].append(seconds)
    return {
        form: {rows: median(seconds) for rows, seconds in times.items()}
        for form, times in found.items()
    }


def as_step_times(seconds: Mapping[int, float]) -> StepTimes:
    """Measured medians as what rules ask."""
    times = StepTimes()
    for rows, value in seconds.items():
        times.see(rows, value)
    return times
