"""`tree`: what a round yields by rules of growing trees that are given the same draft time.

First sweeps are timed (tree_sweeps.py), then the target answers every prompt (tree_target.py), then
each rule's rounds are replayed over these answers (replay.py) with a drafter a format whose steps
were timed before (tree_drafter.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from pipeline.preparation import look
from routing.errors import OptionError
from routing.messages import Sampling
from stages.drafter import WIDTHS
from stages.formats import FORMATS
from stages.growth import Limits
from stages.pace import StepTimes
from stages.sharpening import Sharpening
from stages.tokenizer import stop_ids
from tools.bench.replay import Recorded, Replayed, Terms, add, replay
from tools.bench.results import Options, Result, begin_result
from tools.bench.shown import Shown
from tools.bench.sizing import asked_tokens
from tools.bench.tree_drafter import (
    Replayer,
    TreeDrafter,
    as_step_times,
    measure_steps,
)
from tools.bench.tree_rules import (
    SUBSPEC_SHARPENING,
    SUBSPEC_WIDTH,
    BestFirst,
    Levels,
    Paced,
    Rule,
)
from tools.bench.tree_summary import rule_object, summarize
from tools.bench.tree_sweeps import SweepTimes, measure_sweeps, plan_notes
from tools.bench.tree_target import Target

BUDGETS = {"quarter": 0.25, "half": 0.5, "whole": 1.0}
"""Shares of a sweep's time that a round may draft for."""
RULES = ("chain", "subspec", "ours", "ours_no_noise")
BEYOND = 64
"""Tokens of an answer after the last at which a round begins, for it to run into."""
SWEPT_ANSWERS, STEP_REPEATS = 3, 9
_NOTES = (
    "sweep_s: the engine's own sweeps at --memory, in rounds with each format's plan, draft-ahead"
    " off, and the same for every rule, however many nodes it sends; draft_s: draft steps (every"
    " matrix a substitute) as measured at temperature 0, counted and not clocked",
    "rounds are replayed over the target's own answers, whose choices they are held to; rules share"
    " the target's noise, but for ours_no_noise",
    f"ours: the engine's Speculation, up to {WIDTHS[-1]} wide; where its rate would stop a step"
    " early, the rest of the budget goes to the width that gives most a second",
    f"subspec: {SUBSPEC_WIDTH} wide, scores divided by {SUBSPEC_SHARPENING}, as deep as the budget"
    " and the nodes that may be sent allow",
)


class TreeChoice(msgspec.Struct, frozen=True):
    """What `tree` is told beside the common options. `nodes`: the most that a tree may send."""

    forms: tuple[str, ...]
    temperatures: tuple[float, ...]
    nodes: int

    @classmethod
    def read(cls, forms: str, temperatures: str, nodes: int) -> TreeChoice:
        """From lists with commas. Raises OptionError."""
        named = tuple(dict.fromkeys(forms.replace(" ", "").split(",")))
        if set(named) - set(FORMATS):
            raise OptionError("--formats", forms, f"some of {','.join(FORMATS)}")
        expected = "0 or numbers from 0.01 to 100, with commas"
        try:
            heats = tuple(dict.fromkeys(float(part) for part in temperatures.split(",")))
        except ValueError as error:
            raise OptionError("--temperatures", temperatures, expected) from error
        if not all(heat == 0 or 0.01 <= heat <= 100 for heat in heats):
            raise OptionError("--temperatures", temperatures, expected)
        return cls(named, heats, nodes)


class _Arm:
    """One rule at one format, temperature and budget, over all prompts."""

    def __init__(self, rule: Rule, terms: Terms, noisy: bool) -> None:
        self.rule, self.terms, self.noisy = rule, terms, noisy
        self.of: dict[str, Replayed] = {}

    def object(self) -> dict[str, object]:
        """Its figures."""
        total = Replayed()
        for one in self.of.values():
            total = add(total, one)
        return rule_object(total, self.of, self.terms, self.rule.temperature)


class _Bench:
    """A target, its drafters and all arms, while prompts are replayed one by one."""

    def __init__(
        self,
        choice: TreeChoice,
        target: Target,
        drafters: Sequence[TreeDrafter],
        sweeps: Mapping[str, SweepTimes],
        shown: Shown,
    ) -> None:
        self._choice, self._target, self._shown = choice, target, shown
        self._drafters = {drafter.form: drafter for drafter in drafters}
        self._sweeps = sweeps
        self.steps: dict[str, dict[int, float]] = {}
        self._arms: dict[tuple[str, float, str, str], _Arm] = {}

    def prepare(self, text: Sequence[int]) -> None:
        """Time steps over the rows of `text`, which stand at place 0; make the arms."""
        self._shown.tell("timing draft steps")
        self.steps = measure_steps(self._drafters.values(), text, STEP_REPEATS)
        for form in self._drafters:
            times, sweep_s = as_step_times(self.steps[form]), self._sweeps[form].sweep_s.median
            for heat in self._choice.temperatures:
                for budget, share in BUDGETS.items():
                    terms = Terms(share * sweep_s, sweep_s, times, tree_limits(self._choice.nodes))
                    for name in RULES:
                        if heat or name != "ours_no_noise":
                            arm = _Arm(make_rule(name, times, form), terms, name != "ours_no_noise")
                            self._arms[form, heat, budget, name] = arm

    def replay(self, recorded: Mapping[float, Recorded], seed: int) -> None:
        """One prompt in every arm. Its answers' rows stand at places in order of temperature."""
        for (form, heat, budget, name), arm in self._arms.items():
            one = recorded[heat]
            self._shown.tell(f"{one.id}: {form}, temperature {heat:g}, {budget}, {name}")
            place = self._choice.temperatures.index(heat)
            drafts = Replayer(
                self._drafters[form].model, self._target, place, Sampling(heat, seed), arm.noisy
            )
            arm.of[one.id] = replay(arm.rule, drafts, one, arm.terms)

    def arms(self) -> dict[str, Any]:
        """Format -> temperature -> budget -> rule -> figures."""
        made: dict[str, Any] = {}
        for (form, heat, budget, name), arm in self._arms.items():
            of = made.setdefault(form, {}).setdefault(f"{heat:g}", {}).setdefault(budget, {})
            of[name] = arm.object()
        return made


def tree_limits(nodes: int) -> Limits:
    """Of trees that are sent with `nodes`: the same for all rules; the widest runs most."""
    return Limits(nodes, nodes, SUBSPEC_WIDTH * nodes + 1)


def make_rule(name: str, steps: StepTimes, form: str) -> Rule:
    """A rule of RULES, or `paced`, for one arm with substitutes in `form`."""
    if name == "chain":
        return Levels(1, steps)
    if name == "subspec":
        return Levels(SUBSPEC_WIDTH, steps, SUBSPEC_SHARPENING)
    kind = Paced if name == "paced" else BestFirst
    return kind(WIDTHS, steps, Sharpening(form))


def measure_tree(options: Options, choice: TreeChoice, shown: Shown) -> Result:
    """Replay every rule over answers to the prompts. Raises UsageError, EngineError."""
    opened, _ = look(options.settings, shown)
    with ExitStack() as stack:
        stack.callback(opened.close)
        asked = asked_tokens(opened, options.prompts)
        longest = max(len(prompt) for prompt in asked.values()) + options.max_tokens + BEYOND
        if longest > opened.shape.max_positions:
            expected = f"prompts and answers within {opened.shape.max_positions} positions"
            raise OptionError("--max-tokens", options.max_tokens, expected)
        settings = msgspec.structs.replace(options.settings, model=str(opened.directory.resolve()))
        sweeps = measure_sweeps(
            settings, choice.forms, options.prompts, SWEPT_ANSWERS * options.repeats, shown.tell
        )
        target = stack.enter_context(Target(opened, len(choice.temperatures), longest + 1, shown))
        drafters = []
        for form in choice.forms:
            rows = tree_limits(choice.nodes).rows
            drafters.append(TreeDrafter(target, form, choice.nodes, rows, shown))
            stack.callback(drafters[-1].close)
        bench = _Bench(choice, target, drafters, sweeps, shown)
        _replay_all(bench, target, asked, choice, options, shown)
        result = begin_result("tree", options, str(opened.directory), {}, [])
        device = target.device.name
    result["machine"] |= {"device": device, "link_gbps": _link(sweeps)}
    result["notes"] += [*_NOTES, *plan_notes(sweeps)]
    result |= {
        "nodes": choice.nodes,
        "budgets": BUDGETS,
        "sweeps": sweeps,
        "draft_step_s": bench.steps,
        "arms": bench.arms(),
    }
    result["summary"] = summarize(result["arms"])
    return result


def _replay_all(
    bench: _Bench,
    target: Target,
    asked: Mapping[str, Sequence[int]],
    choice: TreeChoice,
    options: Options,
    shown: Shown,
) -> None:
    seed, heats = options.settings.seed or 0, choice.temperatures
    stops = stop_ids(target.opened.directory, target.opened.config)
    most = options.max_tokens
    for number, (name, prompt) in enumerate(asked.items()):
        shown.tell(f"{name} ({number + 1} of {len(asked)}): the target's answers")
        samplings = [Sampling(heat, seed) for heat in heats]
        texts = target.answer(prompt, samplings, most + BEYOND, stops)
        if not number:
            bench.prepare(texts[0])
        count = len(prompt)
        recorded = {
            heat: Recorded(name, text, count, count + most)
            for heat, text in zip(heats, texts, strict=True)
        }
        bench.replay(recorded, seed)


def _link(sweeps: Mapping[str, SweepTimes]) -> float | None:
    return next((one.raw_gbps for one in sweeps.values() if one.raw_gbps is not None), None)
