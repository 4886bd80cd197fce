"""The model that benchmarks measure in tests."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.planner import smallest_budget
from stages.loading import OpenedModel
from tests.made import make_model, make_tokenizer


def make_tiny(directory: Path) -> tuple[Path, int]:
    """A made model with a tokenizer, and a budget in which it is streamed, with int8 drafts.

    Of 14 MB: smaller ones fit any budget in which there is room for drafts.
    """
    sizes = {"layers": 6, "hidden_size": 256, "intermediate_size": 512}
    model = make_tokenizer(make_model(directory, "llama", dtype=torch.float32, **sizes))
    opened = OpenedModel(model)
    opened.close()
    budget = smallest_budget(opened.shape, context=512, substitute="int8", allow_plain=False)
    return model, budget
