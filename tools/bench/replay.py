"""Rounds replayed over an answer that is known: what a rule's trees would have had accepted.

The target's choices are read from the recorded text, so only drafts are computed. Above temperature
0 that is exact too: a choice depends on position and text alone. Seconds are those of measured
steps, so that a machine's moods do not change the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from stages.growth import Growth, Limits
from stages.pace import StepTimes
from stages.tree import accept
from tools.bench.tree_rules import Rule


class Drafts(Protocol):
    """What runs the nodes of a tree over the rows of a recorded text."""

    def run(self, growth: Growth, nodes: Sequence[int], temperature: float) -> None:
        """Run `nodes` and add their children."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """See DraftModel.keep."""
        ...


class Recorded(msgspec.Struct, frozen=True):
    """A prompt and the target's own answer to it.

    `prompt` tokens are the prompt's. Rounds begin before token `last` only: the rest is there for
    the last of them to run into. A text that the target ended may be shorter.
    """

    id: str
    text: tuple[int, ...]
    prompt: int
    last: int


class Terms(msgspec.Struct, frozen=True):
    """What a round may cost: `budget_s` seconds of draft steps as `steps` has them, before a sweep
    of `sweep_s` seconds. `limits` are those of its tree."""

    budget_s: float
    sweep_s: float
    steps: StepTimes
    limits: Limits


class Replayed(msgspec.Struct):
    """Sums over rounds. `nodes` were sent (roots not counted); `tokens` include the bonus ones."""

    rounds: int = 0
    tokens: int = 0
    nodes: int = 0
    steps: int = 0
    run: int = 0
    draft_s: float = 0.0


def replay(rule: Rule, drafts: Drafts, recorded: Recorded, terms: Terms) -> Replayed:
    """Draft and accept from the first token of the answer on."""
    text, total = recorded.text, Replayed()
    position = recorded.prompt
    rule.enter()
    while position < min(recorded.last, len(text) - 1):
        spent = _draft(rule, drafts, text[: position + 1], terms, total)
        tokens, parents = rule.tree()
        count = _accepted(tokens, parents, text[position + 1 :])
        total.rounds += 1
        total.tokens += count
        total.nodes += len(tokens) - 1
        total.draft_s += spent
        rule.end(spent + terms.sweep_s, count)
        position += count
    return total


def _accepted(tokens: Sequence[int], parents: Sequence[int], came: Sequence[int]) -> int:
    """How many of the tokens that `came` a round with this tree yields, bonus token included."""
    _, answer = accept(
        tokens, parents, lambda _, below: came[len(below)] if len(below) < len(came) else -1
    )
    return min(len(answer), len(came))


def _draft(rule: Rule, drafts: Drafts, text: Sequence[int], terms: Terms, total: Replayed) -> float:
    """Grow a tree at the last token of `text` for as long as it may; the seconds it took."""
    kept = rule.begin(text, len(text) - 1, terms.limits)
    if kept is not None:
        drafts.keep(kept)
    spent = 0.0
    while nodes := rule.next(terms.budget_s - spent):
        drafts.run(rule.growth, nodes, rule.temperature)
        spent += terms.steps.of(len(nodes))
        total.steps += 1
        total.run += len(nodes)
    return spent


def add(one: Replayed, other: Replayed) -> Replayed:
    """The sums of both."""
    return Replayed(
        *(getattr(one, name) + getattr(other, name) for name in Replayed.__struct_fields__)
    )
