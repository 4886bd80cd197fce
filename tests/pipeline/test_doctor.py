"""The doctor's findings: each with what to do where something is amiss."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from pipeline import doctor, shadows
from pipeline.doctor import Finding, examine
from stages import compiled, hardware, link
from stages.hardware import Hardware
from tests.made import make_model
from tests.pipeline.made_cli import Here


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty cache; what takes long to measure is small."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "SCRATCH", 1 << 20)
    monkeypatch.setattr(hardware, "measure_memory", lambda: 9.5)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("made") / "model", "llama", layers=1, dtype=torch.float32
    )


def found(model: Path | None = None) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(None if model is None else str(model))}


def raising(error: Exception) -> object:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


@pytest.mark.usefixtures("cache")
def test_everything_is_looked_at() -> None:
    findings = found()
    assert list(findings) == [
        "system",
        "import names",
        "processor",
        "accelerator",
        "memory",
        "memory bandwidth",
        "disk link",
        "compiled part",
        "spaCy's English model",
        "bitsandbytes, for nf4",
    ]
    assert sys.prefix in findings["system"].found
    assert torch.__version__ in findings["processor"].found
    assert findings["memory bandwidth"].found == "9.5 GB/s, one thread copying"
    version = importlib.metadata.version("bitsandbytes")
    assert findings["bitsandbytes, for nf4"] == Finding(
        "bitsandbytes, for nf4", f"works, {version}"
    )


def test_the_link_is_measured_where_models_are_kept(cache: Path) -> None:
    assert f"GB/s, reading 1 MiB in {cache}" in found()["disk link"].found
    assert list(cache.iterdir()) == [], "nothing was fetched, nothing is left"


@pytest.mark.usefixtures("cache")
def test_the_link_is_measured_by_a_models_files(model: Path) -> None:
    assert str(model) in found(model)["disk link"].found
    shard = sorted(model.glob("*.safetensors"))[0]
    assert str(model) in found(shard)["disk link"].found


def test_a_slow_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "measure_link", lambda paths, nbytes: 0.1)
    advice = found()["disk link"].advice
    assert advice is not None and "faster disk" in advice
    monkeypatch.setattr(link, "measure_link", lambda paths, nbytes: 3.0)
    assert found()["disk link"].advice is None


def test_too_little_to_call_a_disk_slow(
    cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "measure_link", lambda paths, nbytes: 0.1)
    assert found(model)["disk link"].advice is None


def test_a_disk_without_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def full() -> Iterator[list[str]]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield []

    monkeypatch.setattr(doctor, "_scratch_file", full)
    finding = found()["disk link"]
    assert finding.found == "not measured: No space left on device"
    assert finding.advice is not None and "PACELINE_CACHE" in finding.advice


def test_a_cache_that_cannot_be(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "/dev/null/cache")
    finding = found()["disk link"]
    assert finding.found == "not measured"
    assert finding.advice is not None and "PACELINE_CACHE was " in finding.advice


@pytest.mark.usefixtures("cache")
def test_an_accelerator_is_told_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Hardware(4, "AVX2", "2.0", "Made 9000, 24576 MiB")
    monkeypatch.setattr(hardware, "inspect_hardware", lambda: made)
    finding = found()["accelerator"]
    assert finding.found == "Made 9000, 24576 MiB"
    assert finding.advice is not None and "processor" in finding.advice


@pytest.mark.usefixtures("cache")
def test_parts_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENGLISH", ("no_such_module",))
    gone = importlib.metadata.PackageNotFoundError("bitsandbytes")
    monkeypatch.setattr(hardware, "check_nf4", raising(gone))
    findings = found()
    for name in ("spaCy's English model", "bitsandbytes, for nf4"):
        finding = findings[name]
        assert finding.found == "not installed"
        assert finding.advice is not None and f"{sys.executable} -m pip install" in finding.advice


@pytest.mark.usefixtures("cache")
def test_parts_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENGLISH", ("no_such_module", "json"))
    assert found()["spaCy's English model"] == Finding("spaCy's English model", "json")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("built", "instructions", "words", "advice"),
    [
        (True, "AVX2", "in use, with AVX2", None),
        (True, None, "not for this processor", None),
        (False, None, "not built", doctor.COMPILER),
    ],
)
def test_the_compiled_part(
    monkeypatch: pytest.MonkeyPatch,
    built: bool,
    instructions: str | None,
    words: str,
    advice: str | None,
) -> None:
    monkeypatch.setattr(compiled, "BUILT", built)
    monkeypatch.setattr(compiled, "COMPILED", instructions)
    finding = found()["compiled part"]
    assert words in finding.found
    assert finding.advice == advice


@pytest.mark.usefixtures("cache")
def test_a_part_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "check_nf4", raising(RuntimeError("no\nlibrary")))
    finding = found()["bitsandbytes, for nf4"]
    assert finding.found == "does not work: no library"
    assert finding.advice == "use int4 or int8, or install it again"


@pytest.mark.usefixtures("cache")
def test_a_package_that_shadows_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind ours all else is looked at too; before ours nothing of ours may be imported."""
    site = tmp_path / "site-packages"
    (site / "pipeline").mkdir(parents=True)
    (site / "pipeline" / "__init__.py").write_text("")
    root = str(Path(shadows.__file__).parent.parent)
    monkeypatch.setattr(sys, "path", [root, *sys.path, str(site)])
    findings = found()
    assert "is hidden by ours" in findings["import names"].found
    assert "processor" in findings
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    findings = found()
    assert list(findings) == ["system", "import names"]
    assert "is imported in place of ours" in findings["import names"].found
    advice = findings["import names"].advice
    assert advice is not None and "an environment of its own" in advice


# --- The command ---


def test_a_table(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = Here(capsys)("doctor")
    assert done.code == 0 and done.err == ""
    for words in ("what to do", "processor", "disk link"):
        assert words in done.out
    assert "…" not in done.out, "commands are there to be copied"


def test_json(cache: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = Here(capsys)("doctor", "--json", "-m", model)
    assert done.code == 0 and done.err == ""
    findings = json.loads(done.out)["findings"]
    assert {"what", "found", "advice"} == set(findings[0])


@pytest.mark.parametrize("name", ["nowhere", "owner/name", ""])
def test_no_such_model(
    cache: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for given in (name, empty):
        Here(capsys)("doctor", "-m", given).complaint  # noqa: B018


def test_nothing_is_converted(cache: Path, tmp_path: Path, model: Path) -> None:
    gguf = tmp_path / "any.gguf"
    shutil.copy(sorted(model.glob("*.safetensors"))[0], gguf)
    assert str(tmp_path) in found(gguf)["disk link"].found
    assert not cache.exists()
