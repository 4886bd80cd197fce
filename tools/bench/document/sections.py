"""The sections of a document. Pure: results in, Markdown out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tools.bench.document.benchmarks import BENCHMARKS, WITHOUT_SECTION
from tools.bench.document.markdown import bullets, code, paragraphs, rows_of, table_of
from tools.bench.document.reading import Read, absent_arms

GIB = 1 << 30
HEAD = (
    "# Performance",
    "Written by `python -m tools.bench report` from the results that benchmarks leave with `--json`"
    " or `--out`; what is said here was measured, on the machine below, by the command beside it."
    " Figures are medians, with the least and the most in brackets; `-` was not measured.",
)


def machine_section(reads: Sequence[Read]) -> str:
    """The machine as each result found it, and the versions."""
    rows = [
        [
            f"`{read.shared.what}`",
            read.machine.system,
            str(read.machine.cores),
            f"{read.machine.ram_bytes / GIB:.1f}",
            read.machine.device or "-",
            _link(read),
            _number(read.machine.memory_gbps),
        ]
        for read in reads
    ]
    heads = ["benchmark", "system", "cores", "RAM, GiB", "device", "link, GB/s", "memory, GB/s"]
    right = [False, False, True, True, False, True, True]
    about = (
        "link: plain aligned reads beside the measurements; memory: bytes that one thread copies."
    )
    return paragraphs("## The machine", table_of(heads, rows, right), about, _versions(reads))


def benchmark_section(read: Read, picture: str) -> str:
    """One benchmark: how it was asked, its figures, its picture, what has to be known of them.

    `picture` is where that is, as seen from the document. Raises LookupError, TypeError, ValueError
    or AttributeError where the result is not what its `what` says.
    """
    benchmark, shared = BENCHMARKS[read.shared.what], read.shared
    table = benchmark.table(read.result)
    return paragraphs(
        f"## {benchmark.heading} (`{shared.what}`)",
        benchmark.measures,
        code(command_of(read)),
        f"Model {Path(shared.model).name}. {table.title}.",
        rows_of(table),
        f"![{benchmark.heading}: {benchmark.measures}]({picture})",
        bullets(str(table.caption or "").splitlines()),
    )


def command_of(read: Read) -> str:
    """The command line that a result is from: as it was given, or what the figures tell of it."""
    shared = read.shared
    if shared.command is not None:
        return shared.command
    words = ["python", "-m", "tools.bench", shared.what]
    if shared.memory is not None:
        words += ["--memory", str(shared.memory)]
    words += ["--limit", str(len(shared.prompts)), "--max-tokens", str(shared.max_tokens)]
    words += ["--repeats", str(shared.repeats)]
    simulated = read.result.get("simulated_link_gbps")
    if simulated is not None:
        words += ["--link-gbps", f"{simulated:g}"]
    return shlex.join(words)


def missing_section(reads: Sequence[Read]) -> str:
    """What no result has a figure for, and why."""
    found = {read.shared.what for read in reads}
    lines = [
        f"`{what}`: no result was given. {benchmark.measures}"
        for what, benchmark in BENCHMARKS.items()
        if what not in found
    ]
    for read in reads:
        what = read.shared.what
        lines += [f"`{what}`, arm {name}: {why}" for name, why in absent_arms(read)]
        for key in ("skipped_lengths", "skipped_budgets"):
            lines += [f"`{what}`, {name}: {why}" for name, why in read.result.get(key, {}).items()]
    lines += [
        f"`{what}`: there is no command for it yet. {measures[:1].upper()}{measures[1:]}."
        for what, measures in WITHOUT_SECTION.items()
    ]
    if not any(_has_energy(read) for read in reads):
        lines.append("Energy a token: no counters that could be read.")
    if not any((read.machine.device or "").startswith("cuda") for read in reads):
        lines.append("CUDA: nothing here was computed on a GPU.")
    return paragraphs("## Not measured", bullets(lines))


def _versions(reads: Sequence[Read]) -> str:
    names = dict.fromkeys(name for read in reads for name in read.shared.versions)
    rows = []
    for name in names:
        versions = dict.fromkeys(
            read.shared.versions.get(name) or "not installed" for read in reads
        )
        rows.append([name, ", ".join(versions)])
    return table_of(["package", "version"], rows, [False, False])


def _has_energy(read: Read) -> bool:
    arms = list(read.shared.arms.values())
    nested = [one for arm in arms for one in arm.values() if isinstance(one, dict)]
    return any(one.get("energy_j_per_token") is not None for one in (*arms, *nested))


def _link(read: Read) -> str:
    told = _number(read.machine.link_gbps)
    if read.shared.what == "links":
        return "simulated"
    return told if read.result.get("simulated_link_gbps") is None else f"{told} (simulated)"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
