"""What can be written on the command line. Reading it imports nothing heavy and runs nothing."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from pipeline.options import RequestOptions
from pipeline.settings import Settings
from routing.errors import OptionError, UsageError

Work = Callable[[], None]
"""A command with its arguments: calling it does what was asked."""

LONGEST_INPUT = 1 << 24
"""Characters taken from standard input: more than any context, and an end to endless input."""

app = typer.Typer(
    name="paceline",
    help="Answer with language models larger than the memory they are given, losslessly.",
    epilog="Settings also come from PACELINE_MODEL, PACELINE_MEMORY, PACELINE_CTX_SIZE and so on;"
    " the command line wins.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="A directory, a GGUF file or a Hugging Face id. [default: SmolLM2-135M]",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Budget of the device, as 200MiB or 1.5GB."),
]
HostMemory = Annotated[
    str | None,
    typer.Option("--host-memory", metavar="SIZE", help="Budget for staging beside an accelerator."),
]
Context = Annotated[
    int | None, typer.Option("-c", "--ctx-size", help="Tokens of context, the answer included.")
]
Sessions = Annotated[int | None, typer.Option("--sessions", help="Requests answered at once.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or simulated.")]
Substitute = Annotated[
    str | None,
    typer.Option("--substitute", help="auto, int4, int8, nf4, int6, int3, int2, lookup or none."),
]
DraftAhead = Annotated[
    bool | None,
    typer.Option(
        "--draft-ahead/--no-draft-ahead",
        help="Draft on while a tree is being verified. [default: draft-ahead]",
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Read, draft and compute at once; without, one after the other. [default: overlap]",
    ),
]
LinkGbps = Annotated[
    float | None, typer.Option("--link-gbps", help="Simulate a link of so many GB/s.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.callback(invoke_without_command=True)
def paceline(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(f"paceline {_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to answer; - reads standard input.")
    ],
    model: Model = None,
    memory: Memory = None,
    host_memory: HostMemory = None,
    max_tokens: Annotated[
        int | None, typer.Option("-n", "--max-tokens", help="Longest answer, in tokens.")
    ] = None,
    context: Context = None,
    seed: Annotated[
        int | None, typer.Option("-s", "--seed", help="Makes a sampled answer repeatable.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temp", help="0 is greedy; above it, sampled.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Sample from the K likeliest tokens; 0 is off.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="From the likeliest that make up this share.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", help="From those this likely beside the likeliest.")
    ] = None,
    typical_p: Annotated[
        float | None, typer.Option("--typical-p", help="From the typical that make up this share.")
    ] = None,
    repeat_penalty: Annotated[
        float | None,
        typer.Option("--repeat-penalty", help="Above 1: against tokens of prompt and answer."),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option("--presence-penalty", help="Against tokens of the answer, -2 to 2."),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option("--frequency-penalty", help="The same, each time they occur."),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias",
            metavar="TOKEN=BIAS",
            help="Add BIAS, -100 to 100, to the score of token id TOKEN; may be repeated.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated."),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", help="With --json: log-probabilities, and those of the N likeliest."
        ),
    ] = None,
    device: Device = None,
    substitute: Substitute = None,
    draft_ahead: DraftAhead = None,
    overlap: Overlap = None,
    link_gbps: LinkGbps = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")
    ] = False,
    json: Json = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a Chrome/Perfetto trace to this file.")
    ] = None,
) -> Work:
    """Answer PROMPT."""
    settings = Settings.from_environment(
        model=model,
        memory=memory,
        host_memory=host_memory,
        max_tokens=max_tokens,
        context=context,
        seed=seed,
        temperature=temperature,
        device=device,
        substitute=substitute,
        draft_ahead=draft_ahead,
        overlap=overlap,
        link_gbps=link_gbps,
    )
    options: RequestOptions = {
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repeat_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": dict(_bias(pair) for pair in logit_bias or ()),
        "stop": stop,
        "logprobs": logprobs,
    }
    text = _standard_input() if prompt == "-" else prompt
    if not text.strip():
        raise OptionError("PROMPT", text, "a text to answer")

    def work() -> None:
        from pipeline.commands import run_generate

        asyncio.run(run_generate(settings, text, options, raw=raw, as_json=json, trace=trace))

    return work


@app.command()
def plan(
    model: Model = None,
    memory: Memory = None,
    host_memory: HostMemory = None,
    context: Context = None,
    sessions: Sessions = None,
    device: Device = None,
    substitute: Substitute = None,
    draft_ahead: DraftAhead = None,
    overlap: Overlap = None,
    link_gbps: LinkGbps = None,
    json: Json = False,
) -> Work:
    """Plan without loading weights: what would live where, and how fast it should be."""
    settings = Settings.from_environment(
        model=model,
        memory=memory,
        host_memory=host_memory,
        context=context,
        sessions=sessions,
        device=device,
        substitute=substitute,
        draft_ahead=draft_ahead,
        overlap=overlap,
        link_gbps=link_gbps,
    )

    def work() -> None:
        from pipeline.commands import run_plan

        run_plan(settings, as_json=json)

    return work


@app.command()
def doctor(model: Model = None, json: Json = False) -> Work:
    """Look at hardware, links and optional parts: what is there, and what to do about the rest."""

    def work() -> None:
        from pipeline.doctor import run_doctor

        run_doctor(Settings.from_environment(model=model).model, as_json=json)

    return work


def read(arguments: Sequence[str]) -> Work | int:
    """What the arguments ask for; the exit code where that was help or the version.

    Raises UsageError.
    """
    try:
        found: Any = get_command(app)(list(arguments), "paceline", standalone_mode=False)
    except TyperException as error:
        problem = error.format_message().rstrip(".")
        raise UsageError(f"{problem}. See `paceline --help`.") from error
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    if found == 130:  # how typer tells of Ctrl-C
        raise KeyboardInterrupt
    work: Work | int = found
    return work


def _version() -> str:
    try:
        return importlib.metadata.version("paceline")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from its source)"


def _bias(pair: str) -> tuple[int, float]:
    token, _, bias = pair.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        expected = "TOKEN=BIAS, a token id and a number from -100 to 100"
        raise OptionError("--logit-bias", pair, expected) from error


def _standard_input() -> str:
    expected = "a text in UTF-8 on standard input"
    if sys.stdin is None:
        raise OptionError("PROMPT", "-", expected)
    try:
        text = sys.stdin.read(LONGEST_INPUT + 1)
    except UnicodeDecodeError as error:
        raise OptionError("PROMPT", "-", expected) from error
    if len(text) > LONGEST_INPUT:
        raise OptionError("PROMPT", "-", f"at most {LONGEST_INPUT} characters")
    return text
