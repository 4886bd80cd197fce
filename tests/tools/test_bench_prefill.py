"""`prefill`: what the figures of a prompt are made of, and once for real on a made model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import BudgetError, OptionError
from pipeline.planner import smallest_budget
from pipeline.settings import Settings
from routing.trace import Span
from stages.loading import OpenedModel
from tests.made import make_model, make_tokenizer
from tools.bench import prefill
from tools.bench.cli import run
from tools.bench.prefill import length_object, over_longest, read_lengths
from tools.bench.prompts import cut_prompts
from tools.bench.protocol import Ask, Baseline, Job, Run
from tools.bench.rounds import PromptSweeps, see_prompt
from tools.bench.shown import Shown
from tools.bench.turns import Arm
from tools.bench.workers import Worker

LENGTH_KEYS = {"ttft_s", "sweeps", "peak_memory_bytes", "compute_s", "link_s", "over_longest"}


def spans_of_a_prompt() -> list[Span]:
    """Two sweeps of a prompt made at 10, with waits between their steps; then a round's sweep."""
    return [
        Span("verify", "begin", 1.0, 2.0, sweep=1),
        Span("verify", "begin", 10.0, 11.0, sweep=2),
        Span("disk", "layer 0", 10.0, 14.0, sweep=1, nbytes=1),
        Span("verify", "layer", 13.0, 14.0, sweep=2),
        Span("verify", "begin", 14.0, 15.0, sweep=3),
        Span("verify", "finish", 16.5, 17.0, sweep=3),
        Span("verify", "begin", 18.0, 19.0, sweep=4),
    ]


def test_a_prompts_sweeps_are_those_before_its_first_token() -> None:
    # The last step of a sweep belongs to it, though the first token is dated before that.
    assert see_prompt(spans_of_a_prompt(), 9.0, 16.0) == PromptSweeps(2, 3.5)
    assert see_prompt(spans_of_a_prompt(), 9.0, 17.5) == PromptSweeps(2, 3.5)
    assert see_prompt(spans_of_a_prompt(), 2.0, 9.0) is None


def answered(ttft_s: float = 3.0, **more: Any) -> Run:
    return Run(1, (7,), ttft_s, 0.0, more.pop("peak_bytes", 100), **more)


def test_the_first_token_is_held_against_the_longer_of_compute_and_transfer() -> None:
    computed = PromptSweeps(1, 2.0)
    # 4 GB over 2 GB/s take as long as the compute, 8 GB twice as long.
    assert over_longest(answered(prompt_sweeps=computed)) == pytest.approx(1.5)
    streamed = answered(prompt_sweeps=computed, bytes_per_sweep=8 * 10**9, raw_gbps=2.0)
    assert over_longest(streamed) == pytest.approx(0.75)
    assert over_longest(answered()) is None


def test_a_lengths_peak_is_that_of_its_first_prompt() -> None:
    job = Job("paceline", Settings(memory=1 << 20), "/nowhere")
    arm = Arm(job, Baseline(10), [], required=True)
    runs = [
        answered(ttft_s, prompt_sweeps=PromptSweeps(1, 2.0), peak_bytes=peak)
        for ttft_s, peak in ((3.0, 100), (2.0, 200), (5.0, 200))
    ]
    made: Any = length_object(runs, arm)
    assert made["peak_memory_bytes"] == 90
    assert (made["ttft_s"], made["spread"]["ttft_s"]) == (3.0, [2.0, 5.0])
    assert (made["sweeps"], made["link_s"]) == (1, None)
    assert [one["over_longest"] for one in made["runs"]] == [1.5, 1.0, 2.5]


def test_prompts_have_exact_lengths_which_rise_at_first_and_all_differ() -> None:
    cut = list(cut_prompts(range(100, 107), (3, 5, 20), 3))
    assert [len(one.prompt) for one in cut] == [3, 5, 20, 5, 20, 3, 20, 3, 5]
    assert len({one.id for one in cut}) == 9
    assert len({one.prompt for one in cut if len(one.prompt) == 20}) == 3
    assert cut[2].prompt[:7] == (*range(101, 107), 100)


def test_lengths_are_read_rising_and_once() -> None:
    assert read_lengths("512, 32,32") == (32, 512)


@pytest.mark.parametrize("text", ["", "0", "32,-1", "32,many", "32;64"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--lengths"):
        read_lengths(text)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A made model with a tokenizer and a context of 512, and a budget in which it is streamed."""
    sizes = {"layers": 6, "hidden_size": 256, "intermediate_size": 512}
    directory = tmp_path_factory.mktemp("prefill") / "model"
    model = make_tokenizer(make_model(directory, "llama", dtype=torch.float32, **sizes))
    opened = OpenedModel(model)
    opened.close()
    assert opened.shape.max_positions == 512
    return model, smallest_budget(opened.shape, context=201, substitute="none")


@pytest.mark.timeout(600)  # two processes that import torch, on a machine that may be busy
def test_prefill_measures_a_made_model(
    tiny: tuple[Path, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, budget = tiny
    asked: list[Ask] = []

    def ask(self: Worker, one: Ask) -> Run:
        asked.append(one)
        return real(self, one)

    real = Worker.ask
    monkeypatch.setattr(Worker, "ask", ask)
    out = tmp_path / "out.json"
    options = ["-m", str(model), "--memory", str(budget), "--limit", "2", "--repeats", "2"]
    lengths = ["--lengths", "8,200,512", "--link-gbps", "2", "--json", str(out)]
    assert run(["prefill", *options, *lengths]) == 0
    result = json.loads(out.read_text())
    assert (result["what"], result["context"]) == ("prefill", 201)
    assert result["lengths"].keys() == {"8", "200"}
    assert result["skipped_lengths"].keys() == {"512"}
    assert [len(one.prompt) for one in asked if not isinstance(one.prompt, str)] == [8, 200, 200, 8]
    for length, figures in result["lengths"].items():
        assert result["arms"]["paceline"][length] == figures
        assert figures.keys() >= LENGTH_KEYS
        assert figures["sweeps"] == 1
        for one in figures["runs"]:
            assert 0 < one["compute_s"] < one["ttft_s"]
            # Some of 14 MB at 2 GB/s, or at what the disk was measured to do where that is less.
            assert one["link_s"] > 1e-4
            longest = max(one["compute_s"], one["link_s"])
            assert one["over_longest"] == pytest.approx(one["ttft_s"] / longest)
        assert 0 < figures["peak_memory_bytes"] <= budget
        assert len(figures["runs"]) == 2
    assert "512 skipped" in " ".join(capsys.readouterr().out.split())


def test_lengths_that_cannot_be_are_a_mistake(
    tiny: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    model, budget = tiny
    options = ["-m", str(model), "--memory", str(budget), "--link-gbps", "2"]
    assert run(["prefill", *options, "--lengths", "512,9999"]) == 2
    assert "some below 512 tokens" in capsys.readouterr().err.splitlines()[-1]
    with Shown() as shown, pytest.raises(BudgetError, match="the longest of --lengths"):
        prefill._arena(Settings(model=str(model), memory=budget, context=512, link_gbps=2), shown)
