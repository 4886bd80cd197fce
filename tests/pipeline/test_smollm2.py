"""The default model itself, in less memory than it has weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from pipeline.engine import Engine
from stages.progress import SilentProgress
from stages.sources import resolve

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(600)]

MIB = 1 << 20
BUDGET = 200 * MIB
TIE = 2e-3
"""Logits this close are a tie in float32: sums of 1,536 terms in another order differ by that."""
PROMPTS = Path(__file__).parents[2] / "tools" / "prompts.jsonl"


def prompts(count: int) -> list[str]:
    told = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    return told[:: len(told) // count][:count]


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve(None, SilentProgress())


def transformers_scores(directory: Path, ids: list[list[int]]) -> list[torch.Tensor]:
    """transformers' own logits on whole texts: (tokens, vocab) each."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([text])).logits[0] for text in ids]


async def check_lossless(directory: Path, count: int, max_tokens: int) -> None:
    """Every token is what transformers chooses after the same text, or it shows a tie."""
    texts, starts = [], []
    async with Engine.open(directory, memory=BUDGET) as engine:
        assert engine.plan.step == "substitutes"
        assert engine.plan.claimed <= BUDGET
        for prompt in prompts(count):
            messages = [{"role": "user", "content": prompt}]
            stream = engine.stream(messages=messages, max_tokens=max_tokens)
            answer = await stream.collect()
            assert answer.drafted > 0 and answer.tau is not None and answer.tau > 1
            starts.append(answer.usage.prompt_tokens)
            texts.append([*stream.request.prompt, *answer.token_ids])
        engine.check()
    scores = await anyio.to_thread.run_sync(transformers_scores, directory, texts)
    for ids, start, logits in zip(texts, starts, scores, strict=True):
        best = logits[start - 1 : -1].max(dim=1).values
        ours = logits[start - 1 : -1].gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
        gaps = best - ours
        assert (gaps <= TIE).all(), f"token {int(gaps.argmax())} is {gaps.max():.4f} below the best"
        assert (gaps == 0).float().mean() > 0.97, "ties are rare"


async def test_the_answers_are_the_full_models(directory: Path) -> None:
    await check_lossless(directory, 3, 32)


@pytest.mark.long
async def test_ten_answers_are_the_full_models(directory: Path) -> None:
    await check_lossless(directory, 10, 96)


def test_it_stays_within_its_budget(directory: Path, tmp_path: Path) -> None:
    """Anonymous memory above that of a process that has run a one-layer model."""
    told = tmp_path / "decode.json"
    command = [sys.executable, "-m", "tools.bench", "decode", "-m", str(directory)]
    options = ["--memory", str(BUDGET), "--limit", "2", "-n", "32", "--arms", "paceline"]
    subprocess.run([*command, *options, "--json", str(told)], check=True, capture_output=True)
    arm = json.loads(told.read_text())["arms"]["paceline"]
    assert 0 < arm["peak_memory_bytes"] <= BUDGET, arm["peak_memory_bytes"] / MIB
