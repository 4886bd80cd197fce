"""The commands that set one benchmark's figures side by side, and the report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.arguments import (
    JsonFile,
    Limit,
    LinkGbps,
    MaxTokens,
    Memory,
    Model,
    Nodes,
    Out,
    PerLength,
    Prompts,
    Repeats,
    Seed,
)
from tools.bench.prompts import DEFAULT
from tools.bench.running import Outputs, make_options, run_benchmark

LINKS_MEMORY = "200MiB"
CONTEXT_MEMORY = "200MiB"
"""Of the engine whose sweeps are timed; answers and drafts are made beside it."""


def budgets(
    context: typer.Context,
    model: Model = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets",
            help="As 140MiB,400MiB. [default: 6, from the smallest of plain streaming to all]",
        ),
    ] = None,
    prompts: Prompts = DEFAULT,
    limit: Limit = 5,
    max_tokens: MaxTokens = 48,
    seed: Seed = 0,
    repeats: Repeats = 1,
    json: JsonFile = None,
    out: Out = None,
    link_gbps: LinkGbps = None,
) -> None:
    """Tokens a second and tau against the memory budget, beside what was predicted."""
    from tools.bench.budgets import measure_budgets, read_budgets
    from tools.bench.duels_table import budgets_table

    asked = read_budgets(budgets)
    options = make_options(model, None, prompts, limit, max_tokens, seed, repeats, link_gbps)
    measure = partial(measure_budgets, options, asked)
    run_benchmark(measure, budgets_table, Outputs.of(context, json, out))


def links(
    context: typer.Context,
    model: Model = None,
    memory: Memory = LINKS_MEMORY,
    prompts: Prompts = DEFAULT,
    limit: Limit = 3,
    max_tokens: MaxTokens = 24,
    seed: Seed = 0,
    repeats: Repeats = 1,
    json: JsonFile = None,
    out: Out = None,
    gbps: Annotated[
        str, typer.Option("--gbps", help="Bandwidths of the simulated links, in GB/s.")
    ] = "0.1,0.5,2,8,50",
) -> None:
    """Where speculation pays: ours against plain streaming behind slower and faster links."""
    from tools.bench.duels_table import links_table
    from tools.bench.links import measure_links, read_links

    speeds = read_links(gbps)
    options = make_options(model, memory, prompts, limit, max_tokens, seed, repeats)
    measure = partial(measure_links, options, speeds)
    run_benchmark(measure, links_table, Outputs.of(context, json, out))


def context(
    context: typer.Context,
    model: Model = None,
    memory: Memory = CONTEXT_MEMORY,
    prompts: Prompts = DEFAULT,
    limit: Limit = 40,
    max_tokens: MaxTokens = 48,
    seed: Seed = 0,
    repeats: PerLength = 1,
    json: JsonFile = None,
    out: Out = None,
    link_gbps: LinkGbps = None,
    lengths: Annotated[
        str, typer.Option("--lengths", help="Of prompts, in tokens: as many rows are looked at.")
    ] = "512,2048,7000",
    substitute: Annotated[
        str, typer.Option("--substitute", help="int4, int8, nf4, int6, int3 or int2.")
    ] = "int4",
    nodes: Nodes = 64,
    sweep: Annotated[
        float | None,
        typer.Option("--sweep", help="Seconds of a sweep. [default: the engine's, timed once]"),
    ] = None,
) -> None:
    """Long contexts: drafts over the target's keys and values against over the drafter's own.

    A length takes about as long as the target takes for its prompt with everything in memory: 17 s
    at 2,048 tokens of SmolLM2-135M on two AVX2 cores, and more than in proportion beyond. --repeats
    takes as many times that.
    """
    from tools.bench.context import ContextChoice, measure_context
    from tools.bench.context_table import context_table

    options = make_options(model, memory, prompts, limit, max_tokens, seed, repeats, link_gbps)
    choice = ContextChoice.read(lengths, substitute, nodes, sweep)
    measure = partial(measure_context, options, choice)
    run_benchmark(measure, context_table, Outputs.of(context, json, out))


def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Results that --json or --out wrote.")
    ],
    to: Annotated[
        Path, typer.Option("--to", help="The document; its pictures go into a folder beside it.")
    ] = Path("docs/performance.md"),
) -> None:
    """Write results into one Markdown document, with the machine described and pictures."""
    from tools.bench.document.writing import write_document

    write_document(files, to)
