"""The examples run as they stand, on a made model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests import made

HERE = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made.make_model(tmp_path / "model", "llama")
    made.make_tokenizer(directory)
    monkeypatch.setenv("PACELINE_MODEL", str(directory))
    monkeypatch.setenv("PACELINE_MEMORY", "64MiB")
    monkeypatch.setenv("PACELINE_LINK_GBPS", "1")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_stream_answer(capsys: pytest.CaptureFixture[str]) -> None:
    await load("stream_answer").main("Hello")
    assert "tokens" in capsys.readouterr().out


async def test_agents() -> None:
    answers = await load("agents").main()
    assert [answer.finish_reason for answer in answers] == ["length"] * 3


async def test_stage_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = tmp_path / "timeline.json"
    await load("stage_times").main(timeline)
    assert json.loads(timeline.read_text())["traceEvents"]
    assert "verify: busy" in capsys.readouterr().out


def test_every_example_is_tested() -> None:
    assert {path.stem for path in HERE.glob("*.py")} == {"stream_answer", "agents", "stage_times"}
