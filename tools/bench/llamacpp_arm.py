"""llama.cpp, through llama-cpp-python, with a GGUF file of the model.

It maps the weights, so they count as page cache: only a memory group limits them. Prompts are
tokenized and answers ended as the model's own files say, so that all arms are asked the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from llama_cpp import Llama
from transformers import AutoConfig, AutoTokenizer

from stages.tokenizer import stop_ids
from tools.bench.baseline import ASK, measure_baseline
from tools.bench.machine import cores
from tools.bench.protocol import Ask, Conversation, Job
from tools.bench.their_arm import Answered, encode, serve_model


def serve(job: Job, conversation: Conversation) -> None:
    """Load the model, then answer until there are no more Asks."""
    serve_model(lambda: _Model(job), conversation)


def run_baseline(job: Job, conversation: Conversation) -> None:
    """Tell what is held without any model, as there is no GGUF file of one layer."""
    encode(_tokenizer(job), ASK)
    conversation.say(measure_baseline())


class _Model:
    def __init__(self, job: Job) -> None:
        directory, context = job.settings.model, job.settings.context
        assert directory is not None and context is not None and job.gguf is not None
        self._tokenizer = _tokenizer(job)
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        self._stops = stop_ids(Path(directory), config)
        self._llama: Any = Llama(
            model_path=job.gguf,
            n_ctx=context,
            n_threads=cores(),
            n_threads_batch=cores(),
            use_mmap=True,
            logits_all=False,
            verbose=False,
        )

    def generate(self, ask: Ask) -> Answered:
        """See Model."""
        tokens: list[int] = []
        times: list[float] = []
        ids = encode(self._tokenizer, ask)
        self._llama.reset()  # it would keep what this prompt has in common with the last one
        for token in self._llama.generate(ids, temp=0.0):
            tokens.append(token)
            times.append(time.perf_counter())
            if token in self._stops or len(tokens) == ask.max_tokens:
                break
        return Answered(tuple(tokens), times)


def _tokenizer(job: Job) -> Any:
    return AutoTokenizer.from_pretrained(job.settings.model, local_files_only=True)
