"""What can be written on the command line. Reading it imports nothing heavy and runs nothing."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from pipeline import flags
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
    prompt: flags.Prompt,
    model: flags.Model = None,
    memory: flags.Memory = None,
    host_memory: flags.HostMemory = None,
    max_tokens: flags.MaxTokens = None,
    context: flags.Context = None,
    seed: flags.Seed = None,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    typical_p: flags.TypicalP = None,
    repeat_penalty: flags.RepeatPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    logit_bias: flags.LogitBias = None,
    stop: flags.Stop = None,
    logprobs: flags.Logprobs = None,
    device: flags.Device = None,
    substitute: flags.Substitute = None,
    draft_ahead: flags.DraftAhead = None,
    overlap: flags.Overlap = None,
    link_gbps: flags.LinkGbps = None,
    raw: flags.Raw = False,
    json: flags.Json = False,
    trace: flags.Trace = None,
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
    model: flags.Model = None,
    memory: flags.Memory = None,
    host_memory: flags.HostMemory = None,
    context: flags.Context = None,
    sessions: flags.Sessions = None,
    device: flags.Device = None,
    substitute: flags.Substitute = None,
    draft_ahead: flags.DraftAhead = None,
    overlap: flags.Overlap = None,
    link_gbps: flags.LinkGbps = None,
    json: flags.Json = False,
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
def doctor(model: flags.Model = None, json: flags.Json = False) -> Work:
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
