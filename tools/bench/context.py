"""`context`: rounds behind long prompts, drafted over the target's keys and values or its own.

For each length the target answers a prompt of so many tokens (tree_target.py), and our rule's
rounds are replayed over that answer (replay.py) in two arms with the same substitutes: `shared`
looks at the target's committed rows, as the engine's drafter does, `own` at rows that it computed
itself (own_rows.py). A step costs both the same, as they look at equally many rows, so that it is
timed once a length; what differs is what is accepted, and the memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from pipeline.preparation import look
from routing.errors import OptionError
from routing.messages import Sampling
from stages.formats import FORMATS
from stages.loading import OpenedModel
from tools.bench.context_arms import Arm, shared_over_own
from tools.bench.context_prompts import context_prompts
from tools.bench.own_rows import OwnRows
from tools.bench.prefill import read_lengths
from tools.bench.prompts import TokenPrompt
from tools.bench.replay import Recorded, Terms
from tools.bench.results import Options, Result, begin_result
from tools.bench.shown import Shown
from tools.bench.tree import BEYOND, STEP_REPEATS, SWEPT_ANSWERS, make_rule, tree_limits
from tools.bench.tree_drafter import Replayer, TreeDrafter, as_step_times, measure_steps
from tools.bench.tree_sweeps import SweepTimes, measure_sweeps, plan_notes
from tools.bench.tree_target import Target

ARMS = ("shared", "own")
_NOTES = (
    "a prompt is text of the prompts, then one that this leaves out, as it is asked",
    "shared: drafts look at the target's committed keys and values, as in the engine; own: at those"
    " that the drafter's substitutes computed of the same tokens",
    "kv_bytes: committed rows once the prompt is in, of the target and, for own, the drafter's",
    "sweep_s is the same at every length; draft steps were timed over as many rows as the prompt"
    " has, once for both arms, and are counted and not clocked",
    "rounds are replayed over the target's own greedy answers, which go on past its stop tokens,"
    " after one replay of the length's first prompt that is not counted, as in an engine that has"
    " answered before",
    "own drafts get the rows of accepted tokens for nothing: the tokens of a tree that were not run"
    " would have to be; rows_s: what the prompt's and the answer's took",
)


class ContextChoice(msgspec.Struct, frozen=True):
    """What `context` is told beside the common options. `sweep_s` None: timed."""

    lengths: tuple[int, ...]
    form: str
    nodes: int
    sweep_s: float | None

    @classmethod
    def read(cls, lengths: str, form: str, nodes: int, sweep_s: float | None) -> ContextChoice:
        """From the command line. Raises OptionError."""
        if form not in FORMATS:
            raise OptionError("--substitute", form, f"one of {', '.join(FORMATS)}")
        if sweep_s is not None and not 0 < sweep_s < math.inf:
            raise OptionError("--sweep", sweep_s, "seconds above zero")
        return cls(read_lengths(lengths), form, nodes, sweep_s)


class _Bench:
    """A target, a drafter and its own rows, while prompts are replayed one by one."""

    def __init__(
        self,
        choice: ContextChoice,
        target: Target,
        drafter: TreeDrafter,
        own: OwnRows,
        sweep_s: float,
        max_tokens: int,
        shown: Shown,
    ) -> None:
        self._choice, self._target, self._drafter, self._own = choice, target, drafter, own
        self._sweep_s, self._max_tokens, self._shown = sweep_s, max_tokens, shown
        self.steps: dict[int, dict[int, float]] = {}
        self.arms: dict[int, dict[str, Arm]] = {}

    def replay(self, prompt: TokenPrompt) -> None:
        """One prompt in both arms."""
        tell, length = self._shown.tell, len(prompt.prompt)
        tell(f"{prompt.id}: the target's answer")
        most = self._max_tokens
        (text,) = self._target.answer(prompt.prompt, [Sampling()], most + BEYOND, ())
        tell(f"{prompt.id}: the drafter's own rows")
        rows_s = self._own.compute(text[:-1])
        first = length not in self.arms
        if first:
            tell(f"{prompt.id}: timing draft steps")
            self._prepare(text[: length + 1])
        recorded = Recorded(prompt.id, text, length, length + most)
        for name, arm in self.arms[length].items():
            tell(f"{prompt.id}: {name}")
            model = self._own.model if name == "own" else self._drafter.model
            drafts = Replayer(model, self._target, 0, Sampling(), True)
            arm.replay(drafts, recorded, rows_s if name == "own" else 0.0, warm_up=first)

    def _prepare(self, text: Sequence[int]) -> None:
        """Time steps over the rows of all tokens of `text` but the last; make a length's arms."""
        length = len(text) - 1
        seconds = measure_steps([self._drafter], text, STEP_REPEATS)[self._drafter.form]
        steps, self.steps[length] = as_step_times(seconds), seconds
        terms = Terms(math.inf, self._sweep_s, steps, tree_limits(self._choice.nodes))
        row = _row_bytes(self._target)
        self.arms[length] = {
            name: Arm(make_rule("paced", steps, self._drafter.form), terms, stores * length * row)
            for name, stores in zip(ARMS, (1, 2), strict=True)
        }


def measure_context(options: Options, choice: ContextChoice, shown: Shown) -> Result:
    """Lengths that leave the model no room for an answer are skipped.

    Raises UsageError, EngineError.
    """
    opened, _ = look(msgspec.structs.replace(options.settings, context=1), shown)
    with ExitStack() as stack:
        stack.callback(opened.close)
        beside = options.max_tokens + BEYOND
        fitting, skipped = _split(choice.lengths, opened.shape.max_positions, beside)
        prompts, text = context_prompts(opened, options, fitting)
        sweeps = _sweeps(opened, options, choice, shown)
        sweep_s = choice.sweep_s or sweeps[choice.form].sweep_s.median
        capacity = fitting[-1] + beside
        target = stack.enter_context(Target(opened, 1, capacity, shown))
        rows = tree_limits(choice.nodes).rows
        drafter = TreeDrafter(target, choice.form, choice.nodes, rows, shown)
        stack.callback(drafter.close)
        own = OwnRows(target, drafter, capacity)
        stack.callback(own.close)
        bench = _Bench(choice, target, drafter, own, sweep_s, options.max_tokens, shown)
        for prompt in prompts:
            bench.replay(prompt)
        result = begin_result("context", options, str(opened.directory), {}, [])
        device = target.device.name
    raw = next((one.raw_gbps for one in sweeps.values()), None)
    result["machine"] |= {"device": device, "link_gbps": raw}
    result["notes"] += _notes(choice, sweeps, text, fitting[-1])
    facts = {"substitute": choice.form, "nodes": choice.nodes, "sweep_s": sweep_s, "sweeps": sweeps}
    return result | facts | {"skipped_lengths": skipped} | _figures(bench)


def _figures(bench: _Bench) -> dict[str, Any]:
    of = {str(length): arms for length, arms in bench.arms.items()}
    lengths = {key: {name: arm.object() for name, arm in arms.items()} for key, arms in of.items()}
    return {
        "arms": {name: {key: lengths[key][name] for key in lengths} for name in ARMS},
        "lengths": lengths,
        "step_times_s": {str(length): times for length, times in bench.steps.items()},
        "shared_over_own": {key: shared_over_own(arms) for key, arms in lengths.items()},
    }


def _split(lengths: Sequence[int], most: int, beside: int) -> tuple[list[int], dict[str, str]]:
    """The lengths that fit, rising, and why the others are skipped. Raises OptionError."""
    fitting = [length for length in lengths if length + beside <= most]
    if not fitting:
        expected = f"some of at most {most - beside} tokens, which with an answer is all that the"
        expected += " model's context has"
        raise OptionError("--lengths", ",".join(map(str, lengths)), expected)
    why = f"with the {beside} tokens of an answer, beyond the model's context of {most} tokens"
    return fitting, {str(length): why for length in lengths if length not in fitting}


def _sweeps(
    opened: OpenedModel, options: Options, choice: ContextChoice, shown: Shown
) -> dict[str, SweepTimes]:
    """By format; none where their time was given."""
    if choice.sweep_s is not None:
        return {}
    settings = msgspec.structs.replace(options.settings, model=str(opened.directory.resolve()))
    answers = SWEPT_ANSWERS * options.repeats
    return measure_sweeps(settings, (choice.form,), options.prompts, answers, shown.tell)


def _row_bytes(target: Target) -> int:
    """Keys and values of one token in every layer."""
    block = target.kv.block(0)
    return block.nbytes // block.shape[3]


def _notes(
    choice: ContextChoice, sweeps: Mapping[str, SweepTimes], text: int, longest: int
) -> list[str]:
    notes = [*_NOTES, *plan_notes(sweeps)]
    if choice.sweep_s is not None:
        notes.append(f"sweep_s was given: {choice.sweep_s:g} s")
    if longest > text:
        notes.append(f"the prompts' texts are {text} tokens long, and longer prompts repeat them")
    return notes
