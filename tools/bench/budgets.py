"""`budgets`: ours and plain streaming at one budget after the other, and what plans promised."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pipeline.memory import available_memory
from pipeline.planner import smallest_budget
from pipeline.preparation import look
from pipeline.settings import Settings, parse_size
from routing.errors import BudgetError, OptionError
from tools.bench.arena import Arena
from tools.bench.duels import Duel, duels_result, measure_duel
from tools.bench.results import Options, Result
from tools.bench.shown import Shown
from tools.bench.sizing import sized

COUNT = 6
"""Budgets when none are named: each is larger than the one before by the same factor."""
_MIB = 1 << 20
_AMPLE = 1 << 60
NOTES = (
    "predicted: the plan's own tokens_per_s, as the engine had it before the first token",
    "memory is limited for each budget by itself; budgets follow each other, arms take turns",
)


def read_budgets(text: str | None) -> tuple[int, ...] | None:
    """Of --budgets, in bytes: rising, each once; None for the default. Raises OptionError."""
    if text is None:
        return None
    return tuple(sorted({parse_size(part, "--budgets") for part in text.split(",")}))


def measure_budgets(options: Options, asked: Sequence[int] | None, shown: Shown) -> Result:
    """At the budgets asked for, or at COUNT of them from the smallest that plain streaming needs to
    all of the model, less those for which the machine has no memory.

    Raises UsageError for what is wrong with the options, ArmError if ours fails everywhere.
    """
    options = sized(options, shown)
    smallest, everything = extremes(options.settings, shown)
    free = available_memory().available
    budgets = tuple(asked) if asked is not None else spread_budgets(smallest, everything, COUNT)
    if budgets[0] < smallest:
        raise BudgetError(budgets[0], smallest, "--budgets")
    fitting = [budget for budget in budgets if budget <= free]
    skipped = {
        str(budget): f"only {free >> 20} MiB are free here" for budget in budgets if budget > free
    }
    if not fitting:
        raise OptionError("--budgets", budgets[0], f"some of at most {free} bytes, what is free")
    duels: dict[str, Duel] = {}
    settings = msgspec.structs.replace(options.settings, memory=fitting[0])
    with Arena(settings, shown) as arena:
        for budget in fitting:

            def tell(what: str, budget: int = budget) -> None:
                shown.tell(f"{budget / _MIB:.0f} MiB: {what}")

            at = msgspec.structs.replace(arena.settings, memory=budget)
            duels[str(budget)] = measure_duel(arena, at, options, tell)
        result, figures = duels_result("budgets", options, arena.settings.model or "", duels)
    result["notes"] += NOTES
    return result | {
        "memory": None,
        "smallest_budget": smallest,
        "resident_budget": everything,
        "budgets": figures,
        "skipped_budgets": skipped,
    }


def extremes(settings: Settings, shown: Shown) -> tuple[int, int]:
    """Bytes: the smallest budget of plain streaming, and that of a plan that wants for nothing."""
    # A simulated device is not held against the memory that is free here, and nothing is loaded;
    # what all of it needs does not depend on the link.
    ample = msgspec.structs.replace(settings, memory=_AMPLE, device="simulated", link_gbps=1.0)
    opened, plan = look(ample, shown)
    opened.close()
    context = plan.placement.context
    smallest = smallest_budget(
        opened.shape, context=context, sessions=settings.sessions, substitute="none"
    )
    return smallest, max(smallest, plan.claimed)


def spread_budgets(smallest: int, largest: int, count: int) -> tuple[int, ...]:
    """`count` budgets (fewer where they are close) in whole MiB from one to the other, rounded up,
    so that the last one holds what the largest does."""
    factor = (largest / smallest) ** (1 / (count - 1))
    exact = [smallest * factor**step for step in range(count - 1)] + [largest]
    return tuple(sorted({math.ceil(budget / _MIB) * _MIB for budget in exact}))
