"""`links`: ours and plain streaming behind links from a slow disk's speed to a fast bus's.

The device is the simulated accelerator, with all that streams kept in host memory once it was read:
so no disk of this machine bounds what a link is said to do. The copies are real, so a link that is
faster than this machine's memory is as fast as that; `plain_sweep_gbps` tells what was reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.memory import available_memory
from routing.errors import OptionError
from tools.bench.arena import Arena
from tools.bench.duels import Duel, duels_result, measure_duel
from tools.bench.results import Options, Result
from tools.bench.shown import Shown
from tools.bench.sizing import sized

_SPARE = 64 << 20
"""Of host memory: pieces are read in whole blocks."""
NOTES = (
    "every link is simulated: a bus of that speed to host memory that has all that streams, read"
    " from the disk once, before what is timed",
    "copies over that bus are real ones: a link faster than this machine's memory (memory_gbps of"
    " machine) is not reached, and takes from computing what it does take",
    "peak memory includes the host memory that stands behind the link",
)


def read_links(text: str) -> tuple[float, ...]:
    """Of --gbps, in GB/s: rising, each once. Raises OptionError."""
    try:
        speeds = sorted({float(part) for part in text.split(",")})
    except ValueError:
        speeds = [0.0]
    if not all(math.isfinite(speed) and 1e-6 <= speed <= 100_000 for speed in speeds):
        raise OptionError("--gbps", text, "bandwidths from 1e-6 to 100000 GB/s, as 0.5,8")
    return tuple(speeds)


def measure_links(options: Options, speeds: Sequence[float], shown: Shown) -> Result:
    """At one budget, link after link.

    Raises UsageError for what is wrong with the options, ArmError if ours fails everywhere.
    """
    options = sized(options, shown)
    settings = msgspec.structs.replace(
        options.settings, device="simulated", link_gbps=speeds[0], host_memory=None
    )
    duels: dict[str, Duel] = {}
    with Arena(settings, shown) as arena:
        host = _host_memory(arena.paths, settings.memory or 0)
        for speed in speeds:

            def tell(what: str, speed: float = speed) -> None:
                shown.tell(f"{speed:g} GB/s: {what}")

            at = msgspec.structs.replace(arena.settings, link_gbps=speed, host_memory=host)
            duels[f"{speed:g}"] = duel = measure_duel(arena, at, options, tell)
            plan = duel.plan("plain")
            if plan is not None and plan.step == "resident":
                expected = "a budget that the model does not fit: nothing crosses a link"
                raise OptionError("--memory", settings.memory, expected)
        result, figures = duels_result("links", options, arena.settings.model or "", duels)
    for key, duel in duels.items():
        plan = duel.plan("paceline")
        shape = {} if plan is None else {"width": plan.width, "depth": plan.depth}
        figures[key] |= {"gbps": float(key), **shape}
    result["notes"] += NOTES
    return result | {"links": figures}


def _host_memory(paths: Sequence[str], budget: int) -> int:
    """Bytes for all weights. Raises OptionError if they do not fit here beside `budget`."""
    host = sum(Path(path).stat().st_size for path in paths) + _SPARE
    free = available_memory().available
    if host + budget > free:
        expected = f"a model of less than the {free >> 20} MiB that are free here, budget included"
        raise OptionError("--model", f"{host >> 20} MiB of weights", expected)
    return host
