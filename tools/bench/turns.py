"""Arms of a comparison take turns: A B A B, prompt by prompt.

A disk's speed varies by a factor of two from minute to minute, so what is compared must be close in
time. Where memory allows it every arm stays open, in its process, while the others answer (an idle
arm does nothing); else each is started anew for every turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from paceline import PacelineError
from pipeline.memory import available_memory
from tools.bench.groups import MemoryGroup, NoGroupError
from tools.bench.page_cache import drop
from tools.bench.prompts import Prompt, TokenPrompt
from tools.bench.protocol import Ask, Baseline, Job, Loaded, Run
from tools.bench.workers import Worker

SLACK = 32 << 20
"""Of a memory group's limit beyond baseline and budget: the link's measurement, Python's moods."""
WARM_UP = Ask("Count from one to ten.", 4)


class Turn(msgspec.Struct, frozen=True):
    """What each arm answered to one prompt; arms that have failed are missing."""

    repeat: int
    prompt: Prompt | TokenPrompt
    runs: Mapping[str, Run]


class Arm:
    """One arm over its whole comparison: its process (or processes), and what became of it."""

    def __init__(
        self, job: Job, baseline: Baseline, paths: Sequence[str], *, required: bool
    ) -> None:
        """`paths` are the weight files that it will read. If `required`, its failure is raised."""
        self.job, self.baseline, self.required = job, baseline, required
        self.loaded: Loaded | None = None
        self.failed: str | None = None
        self.group_peak: int | None = None
        self.group_kind: str | None = None
        self.notes: set[str] = set()
        self._paths = paths
        self._worker: Worker | None = None
        self._last: str | None = None

    @property
    def limit(self) -> int:
        """Bytes that its process may hold: the budget, above what a one-layer model leaves held,
        and the host memory of a simulated accelerator.

        The pages of libraries do not count: the benchmark itself has touched them first.
        """
        settings = self.job.settings
        assert settings.memory is not None
        return self.baseline.anonymous + settings.memory + (settings.host_memory or 0) + SLACK

    def start(self) -> None:
        """Start the process, without waiting for it."""
        if self.failed is not None or self._worker is not None:
            return
        if not drop(self._paths):
            self.notes.add("page cache not dropped: the kernel takes no such advice")
        group = None
        try:
            group = MemoryGroup(self.limit)
            self.group_kind = group.name
        except NoGroupError as error:
            self.notes.add(f"memory not limited by the kernel: {error}")
        self.loaded = None
        self._worker = Worker(self.job, group)

    def answer(self, prompt: Prompt | TokenPrompt, max_tokens: int) -> Run | None:
        """One answer, by a process that is warm and whose last prompt was another; or None."""
        if self.failed is not None:
            return None
        assert self._worker is not None
        try:
            if self.loaded is None:
                self.loaded = self._worker.hear(Loaded)
                self._last = prompt.id
            if self._last == prompt.id:
                self._worker.ask(WARM_UP)
            self._last = prompt.id
            return self._worker.ask(Ask(prompt.prompt, max_tokens))
        except PacelineError as error:
            self.failed = str(error)
            if self.required:
                raise
            self.stop()
            return None

    def stop(self) -> None:
        """End the process. May be called again, and `start` after it."""
        if self._worker is not None:
            peak = self._worker.group_peak()
            if peak is not None:
                self.group_peak = max(peak, self.group_peak or 0)
            self._worker.close()
            self._worker = None


def take_turns(
    arms: Mapping[str, Arm],
    prompts: Sequence[Prompt | TokenPrompt],
    repeats: int,
    max_tokens: int,
    tell: Callable[[str], None],
) -> list[Turn]:
    """Every arm answers every prompt `repeats` times. `tell` is called before each answer.

    Repeats begin at different prompts. Raises what a required arm raises; no process is left.
    """
    needed = sum(arm.limit for arm in arms.values())
    together = needed <= available_memory().available
    turns = []
    try:
        if together:
            for arm in arms.values():
                arm.start()
        for repeat in range(repeats):
            for prompt in _rotated(prompts, repeat):
                runs = {}
                for name, arm in arms.items():
                    tell(f"{name}: {prompt.id}")
                    arm.start()
                    run = arm.answer(prompt, max_tokens)
                    if run is not None:
                        runs[name] = run
                    if not together:
                        arm.stop()
                turns.append(Turn(repeat, prompt, runs))
    finally:
        for arm in arms.values():
            arm.stop()
    return turns


def _rotated(prompts: Sequence[Prompt | TokenPrompt], by: int) -> list[Prompt | TokenPrompt]:
    by %= len(prompts)
    return [*prompts[by:], *prompts[:by]]
