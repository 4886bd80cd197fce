"""`resident`: the arms of other people, asked here as their processes would be."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pipeline.settings import Settings
from tests.made import make_model, make_prompt, make_tokenizer, reference_generate
from tools.bench import arena, decode, transformers_arm
from tools.bench.cli import run
from tools.bench.prompts import Prompt
from tools.bench.protocol import Ask, Baseline, Job, Loaded, PlanFacts, Run
from tools.bench.resident import ARMS
from tools.bench.turns import Arm, Turn

ARM_KEYS = {"tokens_per_s", "peak_memory_bytes", "energy_j_per_token", "skipped", "failed"}
TOLD = {"speedup_over", "lossless", "differing_prompts", "reference", "roofline"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("resident") / "model"
    return make_tokenizer(make_model(directory, "llama", dtype=torch.bfloat16))


class Talk:
    """A Conversation whose Asks are given and whose replies are kept."""

    def __init__(self, *asks: Ask) -> None:
        self._asks = list(asks)
        self.said: list[Any] = []

    def hear(self, kind: type[Ask]) -> Ask | None:
        return self._asks.pop(0) if self._asks else None

    def say(self, reply: Any) -> None:
        self.said.append(reply)


def job(kind: Any, model: Path, **more: Any) -> Job:
    return Job(kind, Settings(model=str(model), memory=1 << 30, context=512), "/nowhere", **more)


@pytest.mark.parametrize("kind", ["transformers_resident", "transformers_assisted"])
def test_transformers_answers_in_our_dtype_and_tells_when_tokens_came(
    tiny: Path, kind: str
) -> None:
    prompt = tuple(make_prompt(256, 20)) * 2
    talk = Talk(Ask(prompt, 12), Ask("Hello", 3))
    transformers_arm.serve(job(kind, tiny), talk)  # type: ignore[arg-type]
    loaded, first, second = talk.said
    assert isinstance(loaded, Loaded)
    # Its 16-bit weights are computed with in float32, as ours are.
    assert transformers_arm._placement(job(kind, tiny), tiny) == {"dtype": torch.float32}
    assert first.token_ids == tuple(reference_generate(tiny, list(prompt), 12, dtype=torch.float32))
    assert (first.tokens, second.tokens) == (12, 3)
    assert first.ttft_s > 0
    assert first.decode_s > 0
    assert first.tokens_per_s == pytest.approx((12 - first.first_tokens) / first.decode_s)


def test_tokens_that_come_with_the_first_are_not_timed() -> None:
    assert Run(9, (), 1.0, 2.0, 0, first_tokens=5).tokens_per_s == 2.0
    assert Run(5, (), 1.0, 0.0, 0, first_tokens=5).tokens_per_s is None


def test_a_baseline_is_what_is_held_without_the_weights(tiny: Path) -> None:
    talk = Talk()
    transformers_arm.run_baseline(job("transformers_resident", tiny), talk)  # type: ignore[arg-type]
    (baseline,) = talk.said
    assert baseline.anonymous > 1 << 20


class FakeLlama:
    """Has the methods of llama-cpp-python's Llama that the arm uses; answers 5, 6, 7 and so on."""

    log: list[Any]

    def __init__(self, **options: Any) -> None:
        FakeLlama.log = [options]

    def reset(self) -> None:
        self.log.append("reset")

    def generate(self, tokens: list[int], temp: float) -> Any:
        self.log.append((tokens, temp))
        return iter(range(5, 100))


def test_llamacpp_is_asked_by_token_ids_and_stops_where_the_model_does(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("llama_cpp")
    module.Llama = FakeLlama
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.delitem(sys.modules, "tools.bench.llamacpp_arm", raising=False)
    from tools.bench import llamacpp_arm

    monkeypatch.setattr(llamacpp_arm, "stop_ids", lambda *_: (9,))
    talk = Talk(Ask((1, 2, 3), 4), Ask((1, 2), 50))
    llamacpp_arm.serve(job("llamacpp", tiny, gguf="model.gguf"), talk)  # type: ignore[arg-type]
    _, first, second = talk.said
    assert (first.token_ids, second.token_ids) == ((5, 6, 7, 8), (5, 6, 7, 8, 9))
    options, *asked = FakeLlama.log
    assert (options["model_path"], options["n_ctx"]) == ("model.gguf", 512)
    assert asked == ["reset", ([1, 2, 3], 0.0), "reset", ([1, 2], 0.0)]
    monkeypatch.delitem(sys.modules, "tools.bench.llamacpp_arm")


class FakeWorker:
    """Stands in for the process that measures a baseline."""

    def __init__(self, job: Job, group: object = None) -> None:
        assert job.baseline

    def hear(self, kind: type[Baseline]) -> Baseline:
        return Baseline(10)

    def close(self) -> None:
        """Nothing to end."""


def answered(tokens: tuple[int, ...], decode_s: float) -> Run:
    return Run(len(tokens), tokens, 0.1, decode_s, 1 << 20)


@pytest.mark.parametrize(("theirs", "lossless"), [((1, 2, 3), True), ((1, 2, 4), False)])
def test_resident_compares_with_transformers(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    theirs: tuple[int, ...],
    lossless: bool,
) -> None:
    kinds: dict[str, str] = {}

    def take_turns(arms: dict[str, Arm], prompts: list[Prompt], *more: object) -> list[Turn]:
        for name, arm in arms.items():
            kinds[name] = arm.job.kind
            arm.loaded = Loaded("cpu")
        arms["paceline"].loaded = Loaded("cpu", PlanFacts("resident", None, 0, 0, 1, 0, 0, None))
        runs = {"paceline": answered((1, 2, 3), 1.0), "transformers": answered(theirs, 2.0)}
        runs["transformers_assisted"] = answered((1, 2, 3), 0.5)
        return [Turn(0, prompt, runs) for prompt in prompts]

    real = importlib.util.find_spec
    monkeypatch.setattr(arena, "Worker", FakeWorker)
    monkeypatch.setattr(decode, "take_turns", take_turns)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "llama_cpp" else real(name)
    )
    out, gguf = tmp_path / "out.json", tmp_path / "model.gguf"
    gguf.touch()
    options = ["-m", str(tiny), "--memory", "64MiB", "--limit", "1", "--gguf", str(gguf)]
    assert run(["resident", *options, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["what"] == "resident"
    assert kinds == {
        "paceline": "paceline",
        "transformers": "transformers_resident",
        "transformers_assisted": "transformers_assisted",
    }
    assert tuple(result["arms"]) == ARMS
    assert all(arm.keys() >= ARM_KEYS for arm in result["arms"].values())
    assert "not installed" in result["arms"]["llamacpp"]["skipped"]
    assert result.keys() >= TOLD
    assert result["speedup_over"] == {
        "transformers": 2.0,
        "transformers_assisted": 0.5,
        "llamacpp": None,
    }
    assert result["lossless"] is lossless
    said = " ".join(capsys.readouterr().out.split())
    assert ("paceline's tokens are transformers's" in said) is lossless


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "24MiB"], "--memory"),
        (["--arms", "plain"], "--arms"),
        (["--gguf", "no/such.gguf"], "--gguf"),
    ],
)
def test_a_mistake_is_one_line(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(["resident", "-m", str(tiny), *arguments]) == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]
