"""The command line of the benchmarks.

Exit codes: 0 done, 1 a failure while measuring (an arm that fails beside ours is told in the result
as well), 2 a mistake in what was asked (one line, no traceback), 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from tools.bench.arguments import (
    Gguf,
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
    Substitute,
)
from tools.bench.comparisons import budgets, context, links, report
from tools.bench.prompts import DEFAULT
from tools.bench.running import Outputs, make_options, read_names, run_benchmark

DEFAULT_MEMORY = "200MiB"
PREFILL_MEMORY = "700MiB"
"""What a context of 8,000 tokens and its KV take with the default model."""
RESIDENT_MEMORY = "2GiB"
INTERRUPTED = 130

app = typer.Typer(
    name="tools.bench",
    help="Measure Paceline. Each benchmark prints a table; with --json FILE it writes one JSON"
    " object, with --out DIR that and a picture. Other work on the machine shows in the figures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def link(
    context: typer.Context,
    model: Model = None,
    memory: Memory = DEFAULT_MEMORY,
    prompts: Prompts = DEFAULT,
    limit: Limit = 5,
    max_tokens: MaxTokens = 24,
    seed: Seed = 0,
    repeats: Repeats = 1,
    json: JsonFile = None,
    out: Out = None,
    link_gbps: LinkGbps = None,
) -> None:
    """The slow link's own bandwidth against what sweeps reach."""
    from tools.bench.link import measure_link
    from tools.bench.report import link_table

    options = make_options(model, memory, prompts, limit, max_tokens, seed, repeats, link_gbps)
    run_benchmark(partial(measure_link, options), link_table, Outputs.of(context, json, out))


@app.command()
def decode(
    context: typer.Context,
    model: Model = None,
    memory: Memory = DEFAULT_MEMORY,
    prompts: Prompts = DEFAULT,
    limit: Limit = 10,
    max_tokens: MaxTokens = 96,
    seed: Seed = 0,
    repeats: Repeats = 1,
    json: JsonFile = None,
    out: Out = None,
    link_gbps: LinkGbps = None,
    arms: Annotated[
        str | None,
        typer.Option("--arms", help="Some of paceline,sequential,plain,transformers,llamacpp."),
    ] = None,
    substitute: Substitute = "auto",
    gguf: Gguf = None,
) -> None:
    """Tokens a second of one session out of core, against other ways in the same memory."""
    from tools.bench.decode import ARMS, measure_decode
    from tools.bench.report import decode_table

    options = make_options(
        model, memory, prompts, limit, max_tokens, seed, repeats, link_gbps, substitute, gguf
    )
    names = read_names(arms, ARMS)
    measure = partial(measure_decode, options, names)
    run_benchmark(measure, decode_table, Outputs.of(context, json, out))


@app.command()
def overlap(
    context: typer.Context,
    model: Model = None,
    memory: Memory = DEFAULT_MEMORY,
    prompts: Prompts = DEFAULT,
    limit: Limit = 5,
    max_tokens: MaxTokens = 96,
    seed: Seed = 0,
    repeats: Repeats = 1,
    json: JsonFile = None,
    out: Out = None,
    link_gbps: LinkGbps = None,
    substitute: Substitute = "auto",
) -> None:
    """A round's time over its longest stage's, and what drafting ahead of verdicts adds."""
    from tools.bench.overlap import measure_overlap
    from tools.bench.overlap_table import overlap_table

    options = make_options(
        model, memory, prompts, limit, max_tokens, seed, repeats, link_gbps, substitute
    )
    run_benchmark(partial(measure_overlap, options), overlap_table, Outputs.of(context, json, out))


@app.command()
def resident(
    context: typer.Context,
    model: Model = None,
    memory: Memory = RESIDENT_MEMORY,
    prompts: Prompts = DEFAULT,
    limit: Limit = 10,
    max_tokens: MaxTokens = 96,
    seed: Seed = 0,
    repeats: Repeats = 1,
    json: JsonFile = None,
    out: Out = None,
    arms: Annotated[
        str | None,
        typer.Option(
            "--arms", help="Some of paceline,transformers,transformers_assisted,llamacpp."
        ),
    ] = None,
    gguf: Gguf = None,
) -> None:
    """Tokens a second where everything fits, against transformers and llama.cpp."""
    from tools.bench.report import decode_table
    from tools.bench.resident import ARMS, measure_resident

    options = make_options(model, memory, prompts, limit, max_tokens, seed, repeats, gguf=gguf)
    names = read_names(arms, ARMS)
    measure = partial(measure_resident, options, names)
    run_benchmark(measure, decode_table, Outputs.of(context, json, out))


@app.command()
def prefill(
    context: typer.Context,
    model: Model = None,
    memory: Memory = PREFILL_MEMORY,
    prompts: Prompts = DEFAULT,
    limit: Limit = 10,
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", min=1, help="Longest answer: the first will do.")
    ] = 1,
    seed: Seed = 0,
    repeats: PerLength = 3,
    json: JsonFile = None,
    out: Out = None,
    link_gbps: LinkGbps = None,
    lengths: Annotated[
        str, typer.Option("--lengths", help="Of prompts, in tokens; the longest sets the context.")
    ] = "32,512,2048,8000",
) -> None:
    """The time to the first token and the sweeps that prompts of several lengths take."""
    from tools.bench.prefill import measure_prefill, read_lengths
    from tools.bench.prefill_table import prefill_table

    options = make_options(model, memory, prompts, limit, max_tokens, seed, repeats, link_gbps)
    asked = read_lengths(lengths)
    measure = partial(measure_prefill, options, asked)
    run_benchmark(measure, prefill_table, Outputs.of(context, json, out))


@app.command()
def tree(
    context: typer.Context,
    model: Model = None,
    memory: Memory = DEFAULT_MEMORY,
    prompts: Prompts = DEFAULT,
    limit: Limit = 10,
    max_tokens: MaxTokens = 64,
    seed: Seed = 0,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Times that sweeps are timed for each.")
    ] = 1,
    json: JsonFile = None,
    out: Out = None,
    link_gbps: LinkGbps = None,
    formats: Annotated[
        str, typer.Option("--formats", help="Substitutes: some of int4,int8,nf4,int6,int3,int2.")
    ] = "int4,int8,nf4",
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="As 0,0.7,1: each has answers of its own.")
    ] = "0,1",
    nodes: Nodes = 128,
) -> None:
    """Tokens a round of tree rules at equal draft time: chain, SubSpec's, ours."""
    from tools.bench.tree import TreeChoice, measure_tree
    from tools.bench.tree_table import tree_table

    options = make_options(model, memory, prompts, limit, max_tokens, seed, repeats, link_gbps)
    choice = TreeChoice.read(formats, temperatures, nodes)
    measure = partial(measure_tree, options, choice)
    run_benchmark(measure, tree_table, Outputs.of(context, json, out))


for _command in (budgets, links, context, report):
    app.command()(_command)


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    from routing.errors import PacelineError, UsageError

    try:
        found: Any = get_command(app)(list(arguments), "tools.bench", standalone_mode=False)
    except TyperException as error:
        return _complain(f"{error.format_message()} See `python -m tools.bench --help`.", 2)
    except PacelineError as error:
        return _complain(str(error), 2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    if found == INTERRUPTED:  # how typer tells of Ctrl-C
        return _complain("interrupted", INTERRUPTED)
    return found if isinstance(found, int) else 0


def _complain(message: str, code: int) -> int:
    print(f"tools.bench: {' '.join(message.split())}", file=sys.stderr)
    return code


def main() -> None:
    """`python -m tools.bench`. Told to stop, it tidies up as after Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))
