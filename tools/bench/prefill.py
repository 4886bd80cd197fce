"""`prefill`: the time to the first token of prompts of several lengths, and what it is made of.

All lengths are asked of one engine, whose context is that of the longest. The first repeat takes
them in rising order and gives the peaks of memory: what a process has held by then is what loading
and prompts of up to that length have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from pipeline.preparation import look
from pipeline.settings import Settings
from routing.errors import BudgetError, OptionError
from stages.tokenizer import Tokenizer
from tools.bench.arena import Arena
from tools.bench.figures import figure, ratio
from tools.bench.prompts import cut_prompts
from tools.bench.protocol import Run
from tools.bench.results import Options, Result, begin_result
from tools.bench.shown import Shown
from tools.bench.turns import Arm, take_turns

ARM = "paceline"


def read_lengths(text: str) -> tuple[int, ...]:
    """Of --lengths: rising, each once. Raises OptionError."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 1:
        raise OptionError("--lengths", text, "numbers of tokens above zero, as 32,512")
    return tuple(lengths)


def measure_prefill(options: Options, lengths: Sequence[int], shown: Shown) -> Result:
    """`lengths` are in rising order; those beyond the model's context are skipped.

    Raises UsageError for what is wrong with the options, ArmError if the arm fails.
    """
    most = _longest_context(options.settings, shown)
    fitting = [length for length in lengths if length < most]
    if not fitting:
        expected = f"some below {most} tokens, the model's longest context"
        raise OptionError("--lengths", ",".join(map(str, lengths)), expected)
    context = min(most, fitting[-1] + options.max_tokens)
    with _arena(msgspec.structs.replace(options.settings, context=context), shown) as arena:
        model = arena.settings.model or ""
        text = prompt_tokens(model, options)
        prompts = list(cut_prompts(text, fitting, options.repeats))
        arm = arena.arm("paceline", required=True)
        turns = take_turns({ARM: arm}, prompts, 1, options.max_tokens, shown.tell)
        result = begin_result("prefill", options, model, {ARM: arm}, turns)
    runs: dict[int, list[Run]] = {length: [] for length in fitting}
    for turn in turns:
        runs[len(turn.prompt.prompt)].append(turn.runs[ARM])
    measured = {str(length): length_object(runs[length], arm) for length in fitting}
    skipped = {
        str(length): f"with an answer, beyond the model's context of {most} tokens"
        for length in lengths
        if length not in runs
    }
    result["arms"][ARM] = {**measured, **_facts(arm)}
    return result | {"context": context, "lengths": measured, "skipped_lengths": skipped}


MEASURES: dict[str, Callable[[Run], float | None]] = {
    "ttft_s": lambda run: run.ttft_s,
    "sweeps": lambda run: None if run.prompt_sweeps is None else run.prompt_sweeps.count,
    "compute_s": lambda run: None if run.prompt_sweeps is None else run.prompt_sweeps.compute_s,
    "link_s": lambda run: ratio(run.bytes_per_sweep, run.raw_gbps and run.raw_gbps * 1e9),
    "over_longest": lambda run: over_longest(run),
}
"""Figures of one prompt; `link_s` is what the link alone would take for a sweep's bytes."""


def over_longest(run: Run) -> float | None:
    """The time to the first token over the longer of compute and one sweep's transfer."""
    parts = [part for key in ("compute_s", "link_s") if (part := MEASURES[key](run)) is not None]
    return ratio(run.ttft_s, max(parts, default=None))


def length_object(runs: Sequence[Run], arm: Arm) -> dict[str, object]:
    """The figures of one length: medians with their spread, and the first run's peak."""
    figures = {key: figure(map(measure, runs)) for key, measure in MEASURES.items()}
    return {
        **{key: found and found.median for key, found in figures.items()},
        "peak_memory_bytes": runs[0].peak_bytes - arm.baseline.anonymous,
        "spread": {key: [f.low, f.high] for key, f in figures.items() if f is not None},
        "runs": [{key: measure(run) for key, measure in MEASURES.items()} for run in runs],
    }


def _facts(arm: Arm) -> Mapping[str, object]:
    return {
        "baseline_memory_bytes": arm.baseline.anonymous,
        "memory_limit_bytes": arm.limit if arm.group_kind else None,
        "group_peak_bytes": arm.group_peak,
        "plan": arm.loaded and arm.loaded.plan,
    }


def _arena(settings: Settings, shown: Shown) -> Arena:
    try:
        return Arena(settings, shown)
    except BudgetError as error:
        knob = error.knob.replace("--ctx-size", "the longest of --lengths and its answer")
        raise BudgetError(error.asked, error.smallest, knob) from None


def _longest_context(settings: Settings, shown: Shown) -> int:
    """The model's, in tokens."""
    opened, _ = look(msgspec.structs.replace(settings, context=1), shown)
    opened.close()
    return opened.shape.max_positions


def prompt_tokens(model: str, options: Options) -> list[int]:
    """The texts of all prompts, one after the other, in tokens. Raises OptionError."""
    tokenizer = Tokenizer.load(Path(model))
    if tokenizer is None:
        raise OptionError("--model", model, "a model with a tokenizer, to make prompts with")
    return tokenizer.encode("\n\n".join(prompt.prompt for prompt in options.prompts))
