"""Whatever a user calls a model becomes a directory, or one line that says why not."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from routing.errors import DiskFullError, ModelFormatError, ModelNotFoundError
from stages import gguf_convert, hub, sources
from stages.default_model import DEFAULT
from stages.progress import Progress, SilentProgress
from stages.sources import resolve
from tests.made import make_model
from tests.stages.made_gguf import MadeGguf

SILENT = SilentProgress()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, in use."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory. Not to be changed."""
    return make_model(tmp_path_factory.mktemp("made") / "model", "llama", layers=1)


def test_a_directory_is_taken_as_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(model, SILENT) == model
    assert resolve(str(model), SILENT) == model
    monkeypatch.chdir(model.parent)
    assert resolve("model", SILENT) == Path("model")
    monkeypatch.setenv("HOME", str(model.parent))
    assert resolve("~/model", SILENT) == model


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        resolve(tmp_path, SILENT)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelFormatError, match=r"but a\.gguf; give that file's own path"):
        resolve(tmp_path, SILENT)


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("", "Give a directory"),
        ("a\0b", "Give a directory"),
        ("./missing", "no such directory or file"),
        ("/missing/model", "no such directory or file"),
        ("missing.gguf", "no such directory or file"),
        (Path("missing"), "no such directory or file"),
        ("two words", "neither a directory"),
        ("a/b/c", "neither a directory"),
        ("-bad-", "neither a directory"),
        ("x" * 300, "neither a directory"),
        ("owner/name", "could not be reached"),
    ],
)
def test_what_is_nothing_is_told_in_one_line(
    model: str | Path, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelNotFoundError, match=hint) as caught:
        resolve(model, SILENT)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_is_converted_once_wherever_it_lies(cached: Path, tmp_path: Path) -> None:
    path = MadeGguf(tmp_path, "llama", layers=1).write(tmp_path / "My model.gguf")
    directory = resolve(path, SILENT)
    assert directory.parent == cached / "converted"
    assert directory.name.startswith("My-model-")
    before = (directory / "config.json").stat()
    moved = shutil.copy(path, tmp_path / "elsewhere")
    (tmp_path / "deeper").mkdir()
    again = shutil.copy(path, tmp_path / "deeper" / path.name)
    assert resolve(str(again), SILENT) == directory
    assert (directory / "config.json").stat() == before
    assert resolve(moved, SILENT).name.removeprefix("elsewhere") in directory.name
    (directory / "model.safetensors").unlink()  # somebody tidied up
    assert resolve(path, SILENT) == directory
    assert (directory / "model.safetensors").exists()


def test_files_that_are_no_gguf_are_refused(cached: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ModelNotFoundError, match="Give the directory that holds it"):
        resolve(tmp_path / "model.safetensors", SILENT)
    (tmp_path / "model.bin").write_bytes(bytes(100))
    with pytest.raises(ModelFormatError, match="does not begin as GGUF files do"):
        resolve(tmp_path / "model.bin", SILENT)
    assert not (cached / "converted").exists()


@pytest.mark.parametrize("name", [None, "smollm2"])
def test_the_default_model_is_fetched_and_converted_once(
    name: str | None, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    calls: list[str] = []

    def fetch(progress: Progress) -> Path:
        calls.append("fetch")
        return tmp_path / "default.gguf"

    def convert(path: Path, out: Path, progress: Progress) -> None:
        calls.append(path.name)
        shutil.copytree(model, out)

    monkeypatch.setattr(sources, "default_gguf", fetch)
    monkeypatch.setattr(gguf_convert, "convert", convert)
    directory = resolve(name, SILENT)
    assert DEFAULT.sha256[:16] in directory.name
    assert resolve(name, SILENT) == directory
    assert calls == ["fetch", "default.gguf"]


# --- Hugging Face ids. The hub's cache is made by hand; the network is never asked. ---

REVISION = "0123456789abcdef0123456789abcdef01234567"


def fill_hub(hub_cache: Path, model: Path, name: str = "made/tiny") -> Path:
    """Lay ``model`` out as huggingface_hub does: blobs, links from the snapshot, a ref."""
    folder = hub_cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / REVISION
    for new in (folder / "blobs", folder / "refs", snapshot):
        new.mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, folder / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """huggingface_hub's cache, empty, and offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_an_id_is_found_in_the_hubs_cache(hub_cache: Path, model: Path) -> None:
    snapshot = fill_hub(hub_cache, model)
    assert resolve("made/tiny", SILENT) == snapshot


def test_a_cache_can_be_named(tmp_path: Path, model: Path) -> None:
    snapshot = fill_hub(tmp_path / "other", model)
    assert hub.fetch("made/tiny", SILENT, cache_dir=tmp_path / "other") == snapshot


def test_an_unfinished_download_is_not_a_model(hub_cache: Path, model: Path) -> None:
    snapshot = fill_hub(hub_cache, model)
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelNotFoundError, match="no weights in the safetensors format"):
        resolve("made/tiny", SILENT)


def hub_error(kind: str) -> Exception:
    """One of huggingface_hub's errors, without the response that it would come from."""
    error_type: type[Exception] = getattr(huggingface_hub.errors, kind)
    error = error_type.__new__(error_type)
    error.args = ("several\nlines",)
    return error


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (hub_error("RepositoryNotFoundError"), "no such model on Hugging Face"),
        (hub_error("GatedRepoError"), "accept its terms"),
        (hub_error("LocalEntryNotFoundError"), "could not be reached"),
        (ConnectionResetError("a\nb"), r"did not answer \(a b\)"),
        (RuntimeError(), r"did not answer \(RuntimeError\)"),
    ],
)
def test_the_hubs_errors_become_one_line(
    error: Exception, hint: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=hint) as caught:
        resolve("made/tiny", SILENT)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_told_as_such(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    hub_cache.mkdir()
    with pytest.raises(DiskFullError):
        resolve("made/tiny", SILENT)


def test_only_what_is_needed_is_asked_for_and_progress_is_told(
    hub_cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for the download drives the bars as huggingface_hub does."""
    snapshot = fill_hub(hub_cache, model)
    steps: list[tuple[str, int, int]] = []

    class Seen:
        def step(self, what: str, done: int, total: int) -> None:
            steps.append((what, done, total))

    def download(name: str, **options: Any) -> str:
        files = "config.json model.safetensors tokenizer.model pytorch_model.bin a.gguf README.md "
        files += "onnx/model.onnx original/x.safetensors consolidated.safetensors merges.txt"
        patterns = {key: options[f"{key}_patterns"] for key in ("allow", "ignore")}
        wanted = huggingface_hub.utils.filter_repo_objects(  # type: ignore[attr-defined]
            files.split(), allow_patterns=patterns["allow"], ignore_patterns=patterns["ignore"]
        )
        assert set(wanted) == {
            "config.json",
            "model.safetensors",
            "tokenizer.model",
            "merges.txt",
        }
        bars = options["tqdm_class"]
        written = bars(total=0, unit="B", name="huggingface_hub.snapshot_download", desc="x")
        received = bars(total=0, unit="B", name="huggingface_hub.snapshot_download.transfer")
        files_bar = bars(total=3, desc="Fetching 3 files")
        written.total += 10
        for _ in range(2):
            received.update(5)
            written.update(5)
            written.refresh()
        files_bar.update()
        written.set_description("done")
        for bar in (written, received, files_bar):
            bar.close()
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("made/tiny", Seen()) == snapshot
    assert steps == [("fetching made/tiny", 5, 10), ("fetching made/tiny", 10, 10)]
    assert "".join(capfd.readouterr()) == ""


def test_the_index_is_part_of_what_was_resolved(hub_cache: Path, model: Path) -> None:
    directory = resolve(str(fill_hub(hub_cache, model)), SILENT)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert all((directory / shard).exists() for shard in index["weight_map"].values())
