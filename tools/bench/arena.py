"""Where arms meet: the model found, its one-layer cut, baselines measured, temporary files."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import TracebackType

import msgspec

from pipeline.preparation import look
from pipeline.settings import Settings
from tools.bench.cut import write_cut
from tools.bench.protocol import Baseline, Job, Kind
from tools.bench.shown import Shown
from tools.bench.turns import Arm
from tools.bench.workers import Worker

_OURS: dict[Kind, dict[str, object]] = {
    "paceline": {},
    "sequential": {"overlap": False},
    "no_ahead": {"draft_ahead": False},
    "plain": {"substitute": "none"},
}
"""Our own kinds, and the settings that make them what they are."""
_BASELINES: dict[Kind, Kind] = {
    **dict.fromkeys(_OURS, "paceline"),
    "transformers_assisted": "transformers_resident",
}
"""Kinds that run the same code, so that their baseline is that of another."""


class Arena:
    """Makes the arms of one comparison. A context manager: it owns a temporary directory."""

    def __init__(self, settings: Settings, shown: Shown, gguf: Path | None = None) -> None:
        """Finds (and if need be prepares) the model and plans for it, so that a mistake in the
        settings is raised here, before anything is measured. `gguf` is for llama.cpp.

        `plan` is what was planned here; each arm plans for itself, on the link as it finds it."""
        opened, self.plan = look(settings, shown)
        try:
            context = self.plan.placement.context
            self.settings = msgspec.structs.replace(
                settings, model=str(opened.directory.resolve()), context=context
            )
            self.paths = opened.paths
            self._gguf = None if gguf is None else str(gguf.resolve())
            self._shown = shown
            self._files = tempfile.TemporaryDirectory(prefix="paceline-bench-")
            self._baselines: dict[str, Baseline] = {}
            self._cut = Path(self._files.name) / "one-layer"
            self._cut.mkdir()
            write_cut(opened, self._cut)
        finally:
            opened.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._files.cleanup()

    def missing(self, kind: Kind) -> str | None:
        """Why an arm cannot run here, or None if it can."""
        if kind in _OURS:
            return None
        if self.settings.link_gbps is not None:
            return "the link is simulated, and only our own arms can be slowed down to it"
        if kind == "transformers" and importlib.util.find_spec("accelerate") is None:
            return "accelerate is not installed (pip install accelerate)"
        if kind == "llamacpp" and self._gguf is None:
            return "no F16 GGUF file of the model is named (--gguf FILE)"
        if kind == "llamacpp" and importlib.util.find_spec("llama_cpp") is None:
            return "llama-cpp-python is not installed (pip install llama-cpp-python)"
        return None

    def arm(self, kind: Kind, *, required: bool = False, settings: Settings | None = None) -> Arm:
        """An arm that is not started yet. Measures the baseline of its kind if that is new.

        `settings` are the arena's own, changed in what a baseline does not depend on: the budget
        and the link. Raises ArmError or UsageError if the baseline cannot be had.
        """
        changed = _OURS.get(kind, {})
        settings = msgspec.structs.replace(settings or self.settings, **changed)
        paths = [self._gguf] if kind == "llamacpp" and self._gguf else self.paths
        return Arm(self._job(kind, settings), self._baseline(kind), paths, required=required)

    def _job(self, kind: Kind, settings: Settings, *, baseline: bool = False) -> Job:
        scratch = tempfile.mkdtemp(prefix=f"{kind}-", dir=self._files.name)
        return Job(kind, settings, scratch, baseline, self._gguf)

    def _baseline(self, kind: Kind) -> Baseline:
        code = _BASELINES.get(kind, kind)
        if code not in self._baselines:
            self._shown.tell(f"memory of a one-layer model: {code}")
            # Without substitutes: what quantizing leaves behind in the heap is the budget's.
            settings = msgspec.structs.replace(
                self.settings, model=str(self._cut), substitute="none"
            )
            worker = Worker(self._job(code, settings, baseline=True))
            try:
                self._baselines[code] = worker.hear(Baseline)
            finally:
                worker.close()
        return self._baselines[code]
