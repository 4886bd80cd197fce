"""One benchmark from what was asked to what is written: measured, told, put into files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

    from tools.bench.results import Options, Result
    from tools.bench.shown import Shown

    Measure = Callable[[Shown], Result]


class Outputs(msgspec.Struct, frozen=True):
    """Where a result goes besides the terminal. `command` is what was asked, without that."""

    command: str
    json: Path | None
    out: Path | None

    @classmethod
    def of(cls, context: typer.Context, json: Path | None, out: Path | None) -> Outputs:
        """Of the command that is being run."""
        return cls(command_line(context), json, out)

    def check(self) -> None:
        """Raise UsageError now for what could not be written after the measurements."""
        from tools.bench.needed import need_matplotlib
        from tools.bench.results import check_writable, make_directory

        if self.json is not None:
            check_writable(self.json)
        if self.out is not None:
            need_matplotlib("--out")
            make_directory(self.out, "--out")

    def write(self, result: Result) -> None:
        """Write the result. Raises OptionError."""
        from tools.bench.results import result_bytes, write_file

        if self.json is not None:
            write_file(self.json, result_bytes(result))
        if self.out is not None:
            write_file(self.out / f"{result['what']}.json", result_bytes(result), "--out")

    def draw(self, result: Result) -> None:
        """Write the result's picture, where pictures are wanted. Raises OptionError."""
        if self.out is not None:
            from tools.bench.pictures.drawing import draw, png
            from tools.bench.results import write_file

            write_file(self.out / f"{result['what']}.png", png(draw(result)), "--out")


def command_line(context: typer.Context) -> str:
    """What the user has asked, option by option; where the result goes is left out."""
    words = ["python", "-m", "tools.bench", context.command.name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in ("json", "out") and source is not None and source.name == "COMMANDLINE":
            words += [max(parameter.opts, key=len), str(context.params[name])]
    return shlex.join(words)


def run_benchmark(measure: Measure, table: Callable[[Result], Table], outputs: Outputs) -> None:
    """Measure, write, print, draw; exit with 1 if an arm has failed."""
    from tools.bench.results import as_json
    from tools.bench.shown import Shown

    outputs.check()
    with Shown() as shown:
        result = as_json(measure(shown) | {"command": outputs.command})
    outputs.write(result)
    Console().print(table(result))
    outputs.draw(result)
    if any(_failed(arm) for arm in result["arms"].values()):
        raise typer.Exit(1)


def _failed(arm: Mapping[str, Any]) -> bool:
    """Whether an arm, or at one of its settings, has failed."""
    settings = [one for one in arm.values() if isinstance(one, dict)]
    return any(one.get("failed") for one in (arm, *settings))


def read_names(arms: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """The arms of --arms. Raises OptionError."""
    from routing.errors import OptionError

    names = known if arms is None else tuple(arms.replace(" ", "").split(","))
    if set(names) - set(known):
        raise OptionError("--arms", arms, f"some of {','.join(known)}")
    return names


def make_options(
    model: str | None,
    memory: str | None,
    prompts: Path,
    limit: int,
    max_tokens: int,
    seed: int,
    repeats: int,
    link_gbps: float | None = None,
    substitute: str = "auto",
    gguf: Path | None = None,
) -> Options:
    """What was asked, checked. Greedy, one session and all that overlaps (but for the arms that are
    without), whatever PACELINE_* variables say."""
    from pipeline.settings import Settings
    from tools.bench.prompts import read_prompts
    from tools.bench.results import Options

    settings = Settings.from_environment(
        model=model,
        memory=memory,
        seed=seed,
        max_tokens=max_tokens,
        temperature=0.0,
        sessions=1,
        substitute=substitute,
        draft_ahead=True,
        overlap=True,
        link_gbps=link_gbps,
    )
    return Options(settings, read_prompts(prompts, limit), max_tokens, repeats, gguf)
