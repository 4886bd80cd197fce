"""What other people's arms have in common: one model, asked and timed from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from pipeline.memory import PeakSampler
from tools.bench.energy import EnergyMeter
from tools.bench.protocol import Ask, Conversation, Loaded, Run


class Answered(NamedTuple):
    """The tokens of a greedy answer. `times` (time.perf_counter) are when some of them came,
    `first_tokens` of them at the first."""

    tokens: tuple[int, ...]
    times: list[float]
    first_tokens: int = 1


class Model(Protocol):
    """A loaded model."""

    def generate(self, ask: Ask) -> Answered:
        """Answer one Ask, greedily."""


def serve_model(load: Callable[[], Model], conversation: Conversation) -> None:
    """Load the model, then answer until there are no more Asks."""
    with PeakSampler() as sampler:
        model = load()
    peak = sampler.peak
    conversation.say(Loaded("cpu"))
    energy = EnergyMeter()
    while (ask := conversation.hear(Ask)) is not None:
        with PeakSampler() as sampler:
            energy.start()
            asked = time.perf_counter()
            answer = model.generate(ask)
            joules = energy.joules()
        peak = max(peak, sampler.peak)
        run = Run(
            tokens=len(answer.tokens),
            token_ids=answer.tokens,
            ttft_s=answer.times[0] - asked,
            decode_s=answer.times[-1] - answer.times[0],
            peak_bytes=peak,
            first_tokens=answer.first_tokens,
            energy_j=joules,
        )
        conversation.say(run)


def encode(tokenizer: Any, ask: Ask) -> list[int]:
    """The token ids of an Ask, by a tokenizer of transformers."""
    if not isinstance(ask.prompt, str):
        return list(ask.prompt)
    if not tokenizer.chat_template:
        return list(tokenizer.encode(ask.prompt))
    messages = [{"role": "user", "content": ask.prompt}]
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(made["input_ids"])
