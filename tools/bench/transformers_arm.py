"""transformers: with accelerate's disk offload, or with all of the model in memory.

accelerate maps the weights that do not fit the budget, so they count as page cache: only a memory
group limits them. A model in memory is copied there, as it would be mapped as well, and computes in
the dtype that ours does, alone or with drafts looked up in the text so far.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from stages.loading import OpenedModel
from tools.bench.baseline import ASK, measure_baseline
from tools.bench.machine import cores
from tools.bench.protocol import Ask, Conversation, Job
from tools.bench.their_arm import Answered, encode, serve_model

LOOKED_UP = 10
"""Tokens of a draft: as many as the inventor of prompt lookup takes."""


def serve(job: Job, conversation: Conversation) -> None:
    """Load the model, then answer until there are no more Asks."""
    serve_model(lambda: _Model(job), conversation)


def run_baseline(job: Job, conversation: Conversation) -> None:
    """Run the job's model once and tell what is held when its weights are gone."""
    model = _Model(job)
    model.generate(ASK)
    model.forget_weights()
    conversation.say(measure_baseline())


class _Model:
    def __init__(self, job: Job) -> None:
        directory = job.settings.model
        assert directory is not None
        torch.set_num_threads(cores())
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, **_placement(job, Path(directory))
        )
        if job.kind != "transformers":
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()
        self._options: dict[str, Any] = {}
        if job.kind == "transformers_assisted":
            self._options["prompt_lookup_num_tokens"] = LOOKED_UP

    def generate(self, ask: Ask) -> Answered:
        """See Model."""
        ids = torch.tensor([encode(self._tokenizer, ask)])
        clock = _Clock()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=ask.max_tokens,
            streamer=clock,
            **self._options,
        )
        return Answered(tuple(out[0, ids.shape[1] :].tolist()), clock.times, clock.first_tokens)

    def forget_weights(self) -> None:
        """Drop the model and keep the tokenizer."""
        del self._model


def _placement(job: Job, directory: Path) -> dict[str, Any]:
    if job.kind == "transformers":
        assert job.settings.memory is not None
        return {
            "dtype": "auto",
            "device_map": "auto",
            "max_memory": {"cpu": job.settings.memory},
            "offload_folder": job.scratch,
        }
    opened = OpenedModel(directory)
    opened.close()
    return {"dtype": opened.dtype}


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens come, which may be several at once. The first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.first_tokens = 0
        self._prompt = True

    def put(self, value: Any) -> None:
        """See BaseStreamer."""
        if not self._prompt:
            self.times.append(time.perf_counter())
            self.first_tokens = self.first_tokens or value.numel()
        self._prompt = False

    def end(self) -> None:
        """See BaseStreamer."""
