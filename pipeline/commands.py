"""What `paceline generate` and `paceline plan` do once their arguments are read."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rich.console import Console

from pipeline.answers import Answer
from pipeline.bars import shown_progress
from pipeline.engine import Engine
from pipeline.options import RequestOptions, named_by_flags
from pipeline.planner import Plan
from pipeline.preparation import Prepared, look, prepare
from pipeline.report import (
    answer_table,
    link_use,
    plan_notes,
    plan_table,
    prediction_table,
    print_json,
    stage_table,
)
from pipeline.requests import check_options, make_request
from pipeline.settings import Settings
from pipeline.tracing import summarize, write_chrome_trace
from routing.errors import OptionError
from stages.tokenizer import Tokenizer

PATIENCE_S = 2.0
"""After Ctrl-C: how long the sweep under way may take to its end before it is broken off."""


class Question:
    """What is asked, and the prompt's token ids as soon as there is a tokenizer."""

    def __init__(self, settings: Settings, text: str, options: RequestOptions, *, raw: bool):
        """Raises OptionError for what is wrong whatever the model."""
        self._settings, self._text, self._raw = settings, text, raw
        self.options = options
        self.tokens: tuple[int, ...] = ()
        with named_by_flags():
            check_options(options, settings)

    def read(self, tokenizer: Tokenizer | None, plan: Plan, vocab: int) -> None:
        """A preparation's check: what cannot be answered need not wait for the weights.

        Raises OptionError, ContextLengthError.
        """
        if tokenizer is None:
            expected = "one with tokenizer.json, to read the prompt with"
            raise OptionError("--model", "one without a tokenizer", expected)
        plain = self._raw or not tokenizer.has_chat_template
        with named_by_flags():
            request = make_request(
                0,
                self._text if plain else None,
                None if plain else [{"role": "user", "content": self._text}],
                self.options,
                settings=self._settings,
                tokenizer=tokenizer,
                vocab=vocab,
                context=plan.placement.context,
                stop_ids=(),
            )
        self.tokens = request.prompt


async def run_generate(
    settings: Settings,
    prompt: str,
    options: RequestOptions,
    *,
    raw: bool,
    as_json: bool,
    trace: Path | None,
) -> None:
    """Answer, streaming the text; then the tables, or instead of both one JSON object."""
    if trace is not None:
        refuse_unwritable(trace)
    console = Console(stderr=True)
    question = Question(settings, prompt, options, raw=raw)
    with shown_progress(console, as_json) as progress:
        prepared = await prepare(settings, progress, question.read)
    async with _opened(settings, prepared) as engine:
        began = engine.trace.clock()
        answer = await _answer(engine, question, show=not as_json)
        wall = engine.trace.clock() - began
        spans = engine.trace.spans()
        if trace is not None:
            write_chrome_trace(trace, spans)
        stages = summarize(spans, wall)
        reads = engine.runtime.link
        link = link_use(stages, prepared.link_gbps, None if reads is None else reads.direct)
    if as_json:
        print_json({"answer": answer, "plan": engine.plan, "stages": stages, "link": link})
        return
    console.print(plan_table(engine.plan, engine.runtime.opened.shape))
    console.print(plan_notes(engine.plan), highlight=False)
    console.print(answer_table(answer, engine.plan, link))
    console.print(stage_table(stages, wall))


@asynccontextmanager
async def _opened(settings: Settings, prepared: Prepared) -> AsyncIterator[Engine]:
    """An engine; closed at the end, and with no more than PATIENCE_S to spare after Ctrl-C."""
    engine = Engine(settings, prepared)
    try:
        yield engine
    except asyncio.CancelledError:
        with suppress(TimeoutError):
            await asyncio.wait_for(engine.close(), PATIENCE_S)
        raise
    except BaseException:
        await engine.close()
        raise
    else:
        await engine.close()


async def _answer(engine: Engine, question: Question, *, show: bool) -> Answer:
    """The answer; its text is written as it comes if `show`."""
    async with engine.stream(question.tokens, **question.options) as stream:
        try:
            async for delta in stream:
                if show:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        finally:
            if show:
                sys.stdout.write("\n")
                sys.stdout.flush()
        return stream.answer()


def run_plan(settings: Settings, *, as_json: bool) -> None:
    """Print the plan."""
    with shown_progress(Console(stderr=True), as_json) as progress:
        opened, plan = look(settings, progress)
        opened.close()
    if as_json:
        print_json(plan)
        return
    console = Console()
    console.print(plan_table(plan, opened.shape))
    console.print(plan_notes(plan), highlight=False)
    console.print(prediction_table(plan))


def refuse_unwritable(path: Path) -> None:
    """Raise OptionError if a trace could not be written to `path`, before it is worked for.

    Nothing but a regular file may be there: it will be replaced, and a device must not be.
    """
    try:
        if path.exists() and not path.is_file():
            raise OptionError("--trace", str(path), "a file, and what is there is none")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OptionError("--trace", str(path), f"a file that can be written ({why})") from error
