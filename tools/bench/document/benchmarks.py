"""The benchmarks that a document has a section for, in its order, and those that it may miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rich.table import Table

from tools.bench.context_table import context_table
from tools.bench.duels_table import budgets_table, links_table
from tools.bench.overlap_table import overlap_table
from tools.bench.prefill_table import prefill_table
from tools.bench.report import decode_table, link_table
from tools.bench.results import Result
from tools.bench.tree_table import tree_table


class Benchmark(NamedTuple):
    """What a section is called, what it measures, and its table."""

    heading: str
    measures: str
    table: Callable[[Result], Table]


BENCHMARKS = {
    "link": Benchmark(
        "The link",
        "The slow link's own bandwidth, by plain aligned reads of the same bytes, against what"
        " sweeps of plain streaming reach.",
        link_table,
    ),
    "decode": Benchmark(
        "One session out of core",
        "Tokens a second where the model does not fit the budget, against other ways to do the same"
        " in the same memory.",
        decode_table,
    ),
    "overlap": Benchmark(
        "Overlap",
        "What a round takes over the longest of its stages, and what drafting ahead adds.",
        overlap_table,
    ),
    "budgets": Benchmark(
        "Budgets",
        "Ours and plain streaming at several memory budgets, beside what the plans predicted.",
        budgets_table,
    ),
    "links": Benchmark(
        "Links",
        "Where speculation pays: ours and plain streaming in one budget behind simulated links.",
        links_table,
    ),
    "prefill": Benchmark(
        "The first token",
        "Time to the first token and sweeps by the length of the prompt, over the longer of compute"
        " and one sweep's transfer.",
        prefill_table,
    ),
    "resident": Benchmark(
        "Where everything fits",
        "Tokens a second with all of the model in memory, against transformers and llama.cpp.",
        decode_table,
    ),
    "tree": Benchmark(
        "Draft trees",
        "Tokens a round of tree rules at equal draft time, by format and temperature.",
        tree_table,
    ),
    "context": Benchmark(
        "Long contexts",
        "Tau, tokens a second and bytes of keys and values by the length of the prompt, with drafts"
        " over the target's keys and values and over those that the drafter keeps itself.",
        context_table,
    ),
}
"""By `what`."""

WITHOUT_SECTION = {
    "sessions": "aggregate tokens a second at 1, 2, 4 and 8 sessions",
    "route": "routing of a labelled prompt file",
    "quant": "formats: error, tau, tokens a second, bytes",
    "codec": "nested coding of each substitute format",
    "eval": "task accuracy",
}
"""Benchmarks of the plan for measuring that this tool has no command for yet."""
