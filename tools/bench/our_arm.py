"""Our own arms: one engine each, told apart by their settings."""

from __future__ import annotations

import asyncio

import anyio
import anyio.to_thread

from paceline import Answer, Engine
from pipeline.memory import PeakSampler
from tools.bench.baseline import ASK, measure_baseline
from tools.bench.energy import EnergyMeter
from tools.bench.protocol import Ask, Conversation, Job, Loaded, PlanFacts, Run
from tools.bench.rounds import bytes_per_sweep, see_prompt, see_rounds

_SETTLE_S = 0.2
"""After an answer the prefetcher still fills the ring; only then is the link measured."""


def serve(job: Job, conversation: Conversation) -> None:
    """Open the engine, then answer until there are no more Asks."""
    asyncio.run(_serve(job, conversation))


def run_baseline(job: Job, conversation: Conversation) -> None:
    """Run the job's model once and tell what is held when its memory was given back."""
    asyncio.run(_run_baseline(job, conversation))


async def _run_baseline(job: Job, conversation: Conversation) -> None:
    engine = await Engine.open_with(job.settings)
    async with engine:
        await _answer(engine, ASK)
    # `engine` is closed but not yet gone: what it has besides weights, the tokenizer above all, is
    # part of every process that has run a model.
    conversation.say(measure_baseline())


async def _serve(job: Job, conversation: Conversation) -> None:
    with PeakSampler() as sampler:
        engine = await Engine.open_with(job.settings)
    async with engine:
        served = _Served(engine, sampler.peak)
        await served.measure_link()
        conversation.say(Loaded(engine.runtime.device.name, _plan_facts(engine)))
        while (ask := await anyio.to_thread.run_sync(conversation.hear, Ask)) is not None:
            conversation.say(await served.run(ask))


class _Served:
    """An open engine with what has been measured on it so far."""

    def __init__(self, engine: Engine, peak: int) -> None:
        self._engine, self._peak = engine, peak
        self._raw: float | None = None
        self._energy = EnergyMeter()

    async def run(self, ask: Ask) -> Run:
        """Answer one Ask. The link is measured after it, and was before it."""
        engine, before = self._engine, self._raw
        with PeakSampler() as sampler:
            self._energy.start()
            began = engine.trace.clock()
            answer = await _answer(engine, ask)
            ended = engine.trace.clock()
            joules = self._energy.joules()
        self._peak = max(self._peak, sampler.peak)
        after = await self.measure_link()
        spans = engine.trace.spans()
        timings = answer.timings
        return Run(
            tokens=len(answer.token_ids),
            token_ids=answer.token_ids,
            ttft_s=timings.ttft_s,
            decode_s=timings.total_s - timings.ttft_s,
            peak_bytes=self._peak,
            energy_j=joules,
            tau=answer.tau,
            rounds=answer.rounds,
            ahead_kept=answer.ahead_kept,
            spans=see_rounds(spans, began, ended, answer.rounds),
            prompt_sweeps=see_prompt(spans, began, began + timings.ttft_s),
            bytes_per_sweep=bytes_per_sweep(spans),
            raw_gbps=None if before is None or after is None else (before + after) / 2,
        )

    async def measure_link(self) -> float | None:
        """GB/s of plain aligned reads of what sweeps read; None where nothing is streamed.

        None as well of a simulated accelerator, whose link there is nothing to measure of.
        """
        runtime = self._engine.runtime
        link = runtime.link
        if link is None or runtime.device.name == "simulated":
            return None
        await anyio.sleep(_SETTLE_S)
        self._raw = await anyio.to_thread.run_sync(link.measure, runtime.pieces)
        return self._raw


async def _answer(engine: Engine, ask: Ask) -> Answer:
    if isinstance(ask.prompt, str) and engine.has_chat_template:
        messages = [{"role": "user", "content": ask.prompt}]
        return await engine.generate(messages=messages, max_tokens=ask.max_tokens)
    return await engine.generate(ask.prompt, max_tokens=ask.max_tokens)


def _plan_facts(engine: Engine) -> PlanFacts:
    plan, shape, link = engine.plan, engine.runtime.opened.shape, engine.runtime.link
    matrices = [matrix for layer in shape.layers for matrix in layer.matrices] + [shape.head]
    resident = frozenset(plan.placement.resident)
    return PlanFacts(
        step=plan.step,
        substitute=plan.placement.substitute,
        width=plan.width,
        depth=plan.depth,
        resident_bytes=plan.resident_bytes,
        substituted_bytes=plan.substituted_bytes,
        streamed_weights=sum(m.elements for m in matrices if m.name not in resident),
        direct_reads=None if link is None else link.direct,
        tokens_per_s=plan.tokens_per_s,
    )
