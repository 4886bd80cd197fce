"""What prompts come to in tokens, and the context that they and their answers need.

Peers take memory for keys and values as a text grows. So no arm of ours is asked to hold room for
texts that never come: it would be missing elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeline.preparation import find
from routing.errors import OptionError
from stages.loading import OpenedModel
from stages.progress import Progress
from stages.tokenizer import Tokenizer
from tools.bench.prompts import Prompt
from tools.bench.results import Options

STEP = 64
"""A context is a multiple of it: a few tokens more or less change no plan."""


def sized(options: Options, progress: Progress) -> Options:
    """The same with the context that the longest prompt needs with the longest answer, at most the
    model's. One that was set (PACELINE_CTX_SIZE) stays as it is.

    Raises UsageError.
    """
    settings = options.settings
    if settings.context is not None:
        return options
    opened = find(settings, progress)
    opened.close()
    longest = max(map(len, asked_tokens(opened, options.prompts).values()), default=0)
    context = -(-(longest + options.max_tokens) // STEP) * STEP
    context = min(context, opened.shape.max_positions)
    settings = msgspec.structs.replace(settings, context=context)
    return msgspec.structs.replace(options, settings=settings)


def asked_tokens(opened: OpenedModel, prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Prompts by id as an engine is asked them. Raises OptionError."""
    tokenizer = Tokenizer.load(opened.directory)
    if tokenizer is None:
        raise OptionError("--model", str(opened.directory), "a model with a tokenizer")
    if tokenizer.has_chat_template:
        return {
            one.id: tokenizer.chat([{"role": "user", "content": one.prompt}]) for one in prompts
        }
    return {one.id: tokenizer.encode(one.prompt) for one in prompts}
