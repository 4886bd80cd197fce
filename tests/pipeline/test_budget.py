"""What is really held stays within what the plan claims for it, name by name, and within budget."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pipeline.claims import scoring_bytes
from pipeline.engine import Engine
from pipeline.planner import Plan
from routing.errors import DeviceMemoryError
from routing.messages import Sampling
from stages.device import MemoryAccount
from stages.loading import OpenedModel
from stages.noise import Noise
from stages.sampling import Scorer
from stages.simulated import STAGING, SimulatedAccelerator
from tests import made
from tests.pipeline.made_engine import made_engine, make_plan
from tests.stages.made_stages import made_shape

CLAIMED = {
    "norms": ("small tensors",),
    "resident": ("resident weights",),
    "substitutes": ("substitutes", "low-bit head"),
    "ring": ("ring",),
    "decode buffer": ("decode buffer",),
    "loading": ("ring", "decode buffer"),
    "logit rows": ("logit rows",),
    "kv": ("KV cache", "KV scratch"),
    "draft scratch": ("KV scratch",),
}
"""What a device's account calls a thing, and which claims of the plan pay for it."""

KINDS: list[dict[str, Any]] = [
    {"substitute": "int8"},
    {"substitute": "int4", "sessions": 3, "context": 40},
    {"substitute": "nf4", "context": 200},
    {"substitute": "none"},
    {"substitute": "lookup", "sessions": 2},
    {"substitute": "int8", "spare": 180_000},
    {"substitute": "int8", "spare": 5_000_000},
]
MODELS = ("llama", "gemma2", "half", "rough")


class Ledger:
    """The most that each account ever held under each name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.peaks: dict[MemoryAccount, Counter[str]] = {}
        take = MemoryAccount.take

        def noted(account: MemoryAccount, nbytes: int, what: str) -> None:
            take(account, nbytes, what)
            self.peaks.setdefault(account, Counter())
            self.peaks[account] |= Counter(account.by_name)

        patch.setattr(MemoryAccount, "take", noted)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / request.param
    if request.param == "half":  # decoded from 16 bits
        return made.make_model(directory, "llama", layers=6, dtype=torch.bfloat16)
    if request.param == "rough":  # sizes that nothing divides
        return made.make_model(directory, "qwen2", layers=5, rough=True)
    return made.make_model(directory, request.param)


@pytest.mark.parametrize("shift", [0, 1])
async def test_claims_bound_what_is_held(
    model: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """Every kind of plan, half of them on either device."""
    for number, kind in enumerate(KINDS[shift::2]):
        device = ("cpu", "simulated")[(number + shift + len(model.name)) % 2]
        with monkeypatch.context() as patch:
            ledger = Ledger(patch)
            async with made_engine(model, device=device, **kind) as engine:
                sessions = engine.plan.placement.sessions
                streams = [
                    engine.stream(made.make_prompt(300, 20 + n), max_tokens=4)
                    for n in range(sessions)
                ]
                for stream in streams:
                    await stream.collect()
                _within_claims(engine.plan, ledger.peaks[engine.runtime.device.memory])
                _rows_within_claims(engine)
                memory = engine.runtime.device.memory
                assert memory.limit == engine.plan.budget
                assert memory.peak <= engine.plan.claimed <= engine.plan.budget
                held_back = engine.runtime.device
            if isinstance(held_back, SimulatedAccelerator):
                slots = STAGING * engine.plan.placement.slot_bytes
                assert held_back.host.held == 0 and held_back.host.peak <= slots


def _within_claims(plan: Plan, peaks: Counter[str]) -> None:
    claims = {claim.name: claim.nbytes for claim in plan.claims}
    assert set(peaks) <= set(CLAIMED), "held under a name that no claim stands for"
    for name, nbytes in peaks.items():
        allowed = sum(claims.get(claim, 0) for claim in CLAIMED[name])
        assert nbytes <= allowed, f"{name}: {nbytes} bytes held, {allowed} claimed"
    rows = peaks["kv"] + peaks["draft scratch"]
    assert rows <= claims["KV cache"] + claims["KV scratch"]


def _rows_within_claims(engine: Engine) -> None:
    """The embedding cache is not in the account: it is counted here."""
    claim = next(c.nbytes for c in engine.plan.claims if c.name == "embedding rows")
    rows = engine.runtime.model.embedding._rows.values()
    assert sum(row.untyped_storage().nbytes() for row in rows) <= claim


@pytest.mark.parametrize("device", ["cpu", "simulated"])
async def test_a_device_that_is_smaller_than_the_plan_refuses(
    model: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """To the byte: what was held at most is enough, and one byte less is not."""
    ledger = Ledger(monkeypatch)
    opened = OpenedModel(model)
    chosen = make_plan(opened)
    opened.close()
    async with made_engine(model, device=device, plan=chosen) as engine:
        peak = engine.runtime.device.memory.peak
    enough = msgspec.structs.replace(chosen, budget=peak)
    async with made_engine(model, device=device, plan=enough) as engine:
        await engine.generate(made.make_prompt(300, 9), max_tokens=3)
    short = msgspec.structs.replace(chosen, budget=peak - 1)
    with pytest.raises(DeviceMemoryError) as refused:
        async with made_engine(model, device=device, plan=short):
            pass
    assert refused.value.limit == peak - 1
    assert all(account.held == 0 for account in ledger.peaks)


SCORED = (
    Sampling(0.8, 1),
    Sampling(0.8, 1, top_k=50, top_p=0.9, min_p=0.01),
    Sampling(0.8, 1, typical_p=0.9, repetition_penalty=1.2, presence_penalty=1.0),
    Sampling(0.8, 1, top_p=0.9, typical_p=0.9, repetition_penalty=1.2, logit_bias=((3, 1.0),)),
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scoring_a_row_takes_no_more_than_is_claimed(dtype: torch.dtype) -> None:
    """As torch's allocator counts: what a sort takes beside it, half of what it sorts, is not."""
    vocab = 4096
    shape = msgspec.structs.replace(made_shape(itemsize=dtype.itemsize), vocab=vocab)
    row = (4 * torch.randn(1, vocab)).to(dtype)
    for sampling in SCORED:
        noise = Noise()
        scorer = Scorer(sampling, 2, noise, vocab)
        asked = (row, [[1, 2, 3, 3]], [4])
        scorer.scores(*asked)  # what is kept is claimed by other names
        peak = allocated(lambda scorer=scorer, asked=asked: scorer.scores(*asked))
        sorting = vocab * (max(4, dtype.itemsize) + 8) // 2
        assert 0 < peak <= scoring_bytes(shape) - sorting, sampling


def allocated(work: Callable[[], object]) -> int:
    """The most that torch's allocator held at once for `work`, beyond what it held before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((nbytes for _, nbytes in changes), initial=0))
