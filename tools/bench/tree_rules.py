"""Rules by which draft trees grow, held to the same draft time. Pure, no model in here.

A rule is told how many seconds are left and names the nodes of its next step, whose price is that
of a measured step of as many rows (StepTimes): no clock decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from stages.growth import Growth, Limits
from stages.pace import Rate, StepTimes
from stages.sharpening import Sharpening
from stages.speculation import Speculation

SUBSPEC_WIDTH, SUBSPEC_SHARPENING = 6, 0.2

Sent = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens and parents of a tree, the root first."""


class Rule(Protocol):
    """How one arm drafts. It answers many prompts, one after the other."""

    @property
    def growth(self) -> Growth:
        """The tree of this round."""
        ...

    @property
    def temperature(self) -> float:
        """What scores are divided by (their sharpening)."""
        ...

    def enter(self) -> None:
        """Another prompt's answer begins."""
        ...

    def begin(self, text: Sequence[int], position: int, limits: Limits) -> list[int] | None:
        """A round begins at the last token of `text`; see Speculation.begin."""
        ...

    def next(self, left: float) -> list[int]:
        """The nodes of the next step, which takes at most `left` seconds; none: send the tree."""
        ...

    def tree(self) -> Sent:
        """The tree to send."""
        ...

    def end(self, seconds: float, tokens: int) -> None:
        """The round took so long, draft and sweep, and yielded so many tokens."""
        ...


class Levels:
    """Level by level: of the newest level's children the `width` best are kept and run next.

    1 wide it is a chain. 6 wide with scores divided by 0.2 it is SubSpec's tree (arXiv 2509.18344).
    All that was kept is sent, the last level's children too, as they cost no time. No level is
    begun whose nodes could not all be sent: cut to the likeliest, a tree that is sharpened so much
    loses its breadth, and yields less than a shallower one.
    """

    def __init__(self, width: int, steps: StepTimes, temperature: float = 1.0) -> None:
        self._width, self._steps = width, steps
        self.temperature = temperature
        self._growth: Growth | None = None
        self._kept: list[int] = []
        self._level: list[int] = []

    @property
    def growth(self) -> Growth:
        """See Rule."""
        assert self._growth is not None
        return self._growth

    def enter(self) -> None:
        """See Rule."""
        self._growth = None

    def begin(self, text: Sequence[int], position: int, limits: Limits) -> list[int] | None:
        """See Rule. Nothing of the tree before is kept."""
        self._growth = Growth(text[-1], position, limits)
        self._kept, self._level = [], [0]
        return None

    def next(self, left: float) -> list[int]:
        """See Rule."""
        growth = self.growth
        if growth.order:
            self._descend()
        level = self._level
        fits = len(level) <= growth.room and growth.depths[level[0]] < growth.limits.depth
        sent = len(self._kept) + min(self._width, growth.limits.nodes) <= growth.limits.nodes
        return level if fits and sent and self._steps.of(len(level)) <= left else []

    def _descend(self) -> None:
        """Take the children of the newest level for the newest, if it was run."""
        growth, above = self.growth, set(self._level)
        if growth.rows[self._level[0]] < 0:
            return
        # They stand behind every older node.
        found = range(max(above) + 1, len(growth.tokens))
        children = [n for n in found if growth.parents[n] in above]
        level = sorted(children, key=lambda n: (-growth.scores[n], n))[: self._width]
        if level:
            self._level = level
            self._kept += level

    def tree(self) -> Sent:
        """See Rule."""
        growth = self.growth
        if growth.order:
            self._descend()
        best = sorted(self._kept, key=lambda n: (-growth.scores[n], n))[: growth.limits.nodes]
        # A child scores at most its parent and comes after it, so a sent node's parent is sent.
        sent = [0, *sorted(best)]
        index = {node: place for place, node in enumerate(sent)}
        parents = tuple(-1 if node == 0 else index[growth.parents[node]] for node in sent)
        return tuple(growth.tokens[node] for node in sent), parents

    def end(self, seconds: float, tokens: int) -> None:
        """See Rule. Nothing is learnt."""


class BestFirst:
    """Ours: the engine's own Speculation, with prompt lookup and fitted sharpening.

    In the engine a step is also left out when it yields less than its time is worth at the
    session's rate. Here the time that may be spent is given, and it is spent: where the rate would
    stop, or its choice takes more than is left, the step is as wide as gives most a second.
    """

    def __init__(self, widths: Sequence[int], steps: StepTimes, sharpening: Sharpening) -> None:
        self._widths, self._steps = widths, steps
        self._sharpening, self._rate = sharpening, Rate()
        self._session = Speculation(widths, steps, self._rate, sharpening)

    @property
    def growth(self) -> Growth:
        """See Rule."""
        assert self._session.growth is not None
        return self._session.growth

    @property
    def temperature(self) -> float:
        """See Rule."""
        return self._sharpening.temperature

    def enter(self) -> None:
        """See Rule. What was learnt of rate and sharpening stays, as in the drafter."""
        self._session = Speculation(self._widths, self._steps, self._rate, self._sharpening)

    def begin(self, text: Sequence[int], position: int, limits: Limits) -> list[int] | None:
        """See Rule."""
        return self._session.begin(text, position, limits)

    def next(self, left: float) -> list[int]:
        """See Rule."""
        growth = self.growth
        chosen = self._session.next()
        if chosen and self._steps.of(len(chosen)) <= left:
            return chosen
        nodes = growth.promising(self._widths[-1])
        best, width = 0.0, 0
        for one in self._widths:
            seconds = self._steps.of(one)
            if one <= len(nodes) and seconds <= left:
                gain = sum(math.exp(growth.scores[node]) for node in nodes[:one])
                if gain > best * seconds:
                    best, width = gain / seconds, one
        return nodes[:width]

    def tree(self) -> Sent:
        """See Rule."""
        return self._session.tree()

    def end(self, seconds: float, tokens: int) -> None:
        """See Rule."""
        self._rate.see(seconds, tokens)


class Paced(BestFirst):
    """Ours as in the engine: no step that is worth less than its time at the session's rate."""

    def next(self, left: float) -> list[int]:
        """See Rule."""
        chosen = self._session.next()
        return chosen if self._steps.of(len(chosen)) <= left else []
