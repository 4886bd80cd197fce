"""From settings to a loaded runtime: find the model, look at the machine, plan, load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import NamedTuple

import anyio

from pipeline.calibration import calibrated
from pipeline.claims import Allowances
from pipeline.memory import available_memory
from pipeline.planner import Plan, plan
from pipeline.runtime import Runtime
from pipeline.sensitivities import Sensitivities
from pipeline.settings import Settings
from routing.errors import ModelFormatError, OptionError, PacelineError
from stages.device import CpuDevice, Device
from stages.formats import FORMATS
from stages.link import measure_link
from stages.loading import OpenedModel
from stages.progress import Progress
from stages.simulated import SimulatedAccelerator
from stages.sources import resolve
from stages.streams import Event, Stream
from stages.tokenizer import Tokenizer, stop_ids

SHARE = 0.8
"""Of the memory that is free, what an engine takes when no budget is named."""
LINK_SAMPLE = 128 << 20
SIMULATED_GBPS = 8.0

Check = Callable[[Tokenizer | None, Plan, int], None]
"""Called before weights are loaded, with the number of tokens in the vocabulary last; what it
raises ends the preparation."""


class Prepared(NamedTuple):
    """A model ready to run. Whoever gets it closes `runtime`.

    `link_gbps` is what the plan took for the link's bandwidth, measured or simulated (None: the
    preparation was not told).
    """

    runtime: Runtime
    plan: Plan
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]
    link_gbps: float | None = None


class Interrupted(Exception):
    """The caller has gone while a model was being prepared."""


class _Interruptible:
    """Progress that ends the work once `gone` is set."""

    def __init__(self, progress: Progress, gone: threading.Event) -> None:
        self._progress, self._gone = progress, gone

    def step(self, what: str, done: int, total: int) -> None:
        """See Progress."""
        if self._gone.is_set():
            raise Interrupted
        self._progress.step(what, done, total)


async def prepare(settings: Settings, progress: Progress, *checks: Check) -> Prepared:
    """Everything before the first request. Raises UsageError, LinkError, DeviceMemoryError.

    Cancelling it ends the work at its next step of progress and leaves nothing.
    """
    gone = threading.Event()
    worker = Stream("prepare")
    work = worker.launch(_prepare, settings, _Interruptible(progress, gone), *checks)
    try:
        await _ended(work)
        return work.wait()
    except asyncio.CancelledError:
        gone.set()
        with anyio.CancelScope(shield=True), suppress(asyncio.CancelledError):
            await work.ended()
        # It may have come to its end all the same, and nobody else will close what it made.
        with suppress(Exception):
            work.wait().runtime.close()
        raise
    finally:
        worker.close()


async def _ended(work: Event[Prepared]) -> None:
    """Wait for the end of the work, but, unlike `await work`, not once this is cancelled."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop was closed by force
            loop.call_soon_threadsafe(ended.set)

    work.when_done(tell)
    await ended.wait()


def _prepare(settings: Settings, progress: Progress, *checks: Check) -> Prepared:
    opened, chosen, link_gbps, known = _look(settings, progress)
    try:
        _check_parts(chosen)
        tokenizer = Tokenizer.load(opened.directory)
        stops = stop_ids(opened.directory, opened.config)
        for check in checks:
            check(tokenizer, chosen, opened.shape.vocab)
        device = _device(settings, chosen)
    except BaseException:
        opened.close()
        raise
    runtime = Runtime(
        opened,
        chosen,
        device,
        progress,
        embedding_rows=chosen.embedding_rows,
        link_gbps=settings.link_gbps if device.name == "cpu" else None,
        measure=known.wanted,
    )
    if runtime.sensitivity is not None:
        known.keep(runtime.sensitivity)
    return Prepared(runtime, chosen, tokenizer, stops, link_gbps)


def look(settings: Settings, progress: Progress) -> tuple[OpenedModel, Plan]:
    """Find the model and plan for it, without loading weights. The caller closes the model.

    Raises UsageError, LinkError.
    """
    opened, chosen, _, _ = _look(settings, progress)
    return opened, chosen


def _look(settings: Settings, progress: Progress) -> tuple[OpenedModel, Plan, float, Sensitivities]:
    """Also the link's bandwidth, and what is known of layers' sensitivity."""
    if settings.device != "simulated":
        settings.refuse_host_memory("cpu")
    opened = find(settings, progress)
    try:
        context = settings.context_for(opened.shape.max_positions)
        progress.step("measuring the link", 0, 0)
        link_gbps = settings.link_gbps or measure_link(opened.paths, LINK_SAMPLE)
        compute = calibrated(opened.shape, str(opened.dtype), _measurable(), progress)
        progress.step("planning", 0, 0)
        known = Sensitivities(opened)
        chosen = plan(
            opened.shape,
            budget(settings),
            link_gbps,
            compute,
            context=context,
            sessions=settings.sessions,
            substitute=settings.substitute,
            allowances=_allowances(settings),
            sensitivity=known.layers,
        )
    except BaseException:
        opened.close()
        raise
    return opened, chosen, link_gbps, known


def _measurable() -> list[str]:
    """Formats that can be made here."""
    return [form for form in FORMATS if form != "nf4" or find_spec("bitsandbytes") is not None]


def _allowances(settings: Settings) -> Allowances:
    if not settings.overlap:
        return Allowances(ahead_rows=0, slots=(1,))
    return Allowances() if settings.draft_ahead else Allowances(ahead_rows=0)


def find(settings: Settings, progress: Progress) -> OpenedModel:
    """The model that is asked for, its sizes read and nothing else. The caller closes it.

    Raises UsageError.
    """
    progress.step("finding the model", 0, 0)
    directory = resolve(settings.model, progress)
    try:
        return OpenedModel(directory)
    except (PacelineError, OSError):
        raise
    except Exception as error:  # transformers' classes take what they like out of a config
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        path = str(directory / "config.json")
        raise ModelFormatError(path, f"no model can be built from it ({said})") from error


def budget(settings: Settings) -> int:
    """Bytes for the device tier: what was asked for, or a share of what is free.

    Raises OptionError when more is asked for than the machine or its container allows.
    """
    memory = available_memory()
    if settings.memory is None:
        return int(memory.available * SHARE)
    if settings.device != "simulated" and settings.memory > memory.available:
        expected = f"at most {memory.available >> 20} MiB, what is free here ({memory.source})"
        raise OptionError("--memory", f"{settings.memory >> 20} MiB", expected)
    return settings.memory


def _check_parts(chosen: Plan) -> None:
    if chosen.placement.substitute == "nf4" and find_spec("bitsandbytes") is None:
        expected = "int4 or int8, as bitsandbytes is not installed (pip install bitsandbytes)"
        raise OptionError("--substitute", "nf4", expected)


def _device(settings: Settings, chosen: Plan) -> Device:
    if settings.device == "simulated":
        gbps = settings.link_gbps or SIMULATED_GBPS
        return SimulatedAccelerator(chosen.budget, gbps, host_bytes=settings.host_memory or 0)
    return CpuDevice(chosen.budget)
