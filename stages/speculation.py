"""One session's speculation: what to draft next, when to stop, what to make of a verdict.

A draft step costs time in which the verifier could have made tokens. So a step is made only while
the tokens that it is expected to add are worth more than its time yields at the session's own rate,
and it is made as wide as pays best; where nothing pays, nothing is drafted. While the tree is being
verified the same tree goes on growing for nothing (draft-ahead): below the places where acceptance
is likeliest to end. No model in here, and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stages.growth import Growth, Limits
from stages.guesses import Guesses
from stages.lookup import Lookup
from stages.pace import Mean, Rate, StepTimes, SweepPace
from stages.sharpening import Sharpening

PROBE_ROUNDS = 16
"""After so many rounds without a draft one step is made, whether it seems to pay or not."""
AHEAD_LEAST = 0.02
"""Ahead of a verdict, nodes less likely than this are not worth the cores they take."""
HASTE, KEPT_USUALLY = 0.8, 0.6
"""Where drafts made ahead come true, a step before the sweep is weighed at so much more than its
time: what it would find is found for nothing while the sweep is under way, though a round later.
Replayed with steps of 12 ms and sweeps of 400, that gave 5 % more tokens a second, and a third less
was drafted before sweeps. How often they come true is taken for so much at first."""
GUESSED_MOST = 16
"""Tokens taken from one earlier place."""


class Speculation:
    """The drafting of one session. Its tree's nodes may hold draft scratch rows.

    widths: how many nodes a step may run, rising.
    """

    def __init__(
        self,
        widths: Sequence[int],
        steps: StepTimes,
        rate: Rate,
        sharpening: Sharpening,
        sweeps: SweepPace | None = None,
    ) -> None:
        """`rate` is this session's, the others are shared with other sessions. `sweeps`: None where
        a sweep takes no longer for the rows of a tree."""
        self._widths, self._steps = widths, steps
        self._sweeps = SweepPace() if sweeps is None else sweeps
        self.rate, self.sharpening = rate, sharpening
        self._lookup, self._guesses = Lookup(), Guesses()
        self._guessed: list[tuple[int, int, tuple[int, ...]]] = []
        self._hit = Mean(0.1, 0.9)
        self.idle_rounds = 0
        """Rounds on end in which nothing seemed worth drafting, up to PROBE_ROUNDS."""
        self._kept = self._sent = 0
        self._ahead_kept, self._haste = Mean(0.2, KEPT_USUALLY), 0.0
        """Of the rounds that were drafted ahead of, the share in which it came true."""
        self.expected = 1.0
        """Tokens that the tree sent last is expected to yield."""
        self.growth: Growth | None = None
        self.drafts_ahead = False
        """Whether the tree was grown since it was sent."""
        self.kept_ahead = 0
        """Of the nodes that were run since then, those that the tree begun with."""

    def begin(self, text: Sequence[int], position: int, limits: Limits) -> list[int] | None:
        """A round begins: the last token of `text`, all tokens so far, stands at `position`.

        Learns from what came true of the tree before. Returns the scratch rows that the new tree
        keeps of it, to be moved to the front in order; None: it keeps nothing.
        """
        self._lookup.extend(text[len(self._lookup) :])
        before, self.growth = self.growth, Growth(text[-1], position, limits, self.sharpening.bend)
        rows, self.kept_ahead = None, 0
        if before is not None and 0 <= (more := position - before.position) <= len(text):
            rows = self._learn(before, text[len(text) - more :], limits)
        if self.drafts_ahead:
            self._ahead_kept.see(float(rows is not None))
        self._haste = HASTE * (self._ahead_kept.value or 0.0) if self.drafts_ahead else 0.0
        self.drafts_ahead = False
        self._guessed.clear()
        self._kept = len(self.growth.order)
        self._guess(0)
        return rows

    def forget(self) -> None:
        """The scratch rows went to another session, or the text was computed anew."""
        self.growth = None
        self._guessed.clear()

    def _learn(self, before: Growth, came: Sequence[int], limits: Limits) -> list[int] | None:
        path = [0, *before.follow(came)]
        for node, token in zip(path, came, strict=False):
            seen = before.odds(node, token)
            if seen is None:
                continue
            chosen, others, entropy = seen
            self._hit.see(float(chosen is not None))
            if others or chosen is not None:
                likeliest = max(others, default=-math.inf)
                first = chosen is not None and chosen >= likeliest
                self.sharpening.likeliest(chosen if first and chosen else likeliest, first)
            if chosen is None:
                self.sharpening.miss(others, entropy)
            else:
                self.sharpening.hit(chosen, entropy)
        for node, agree, guessed in self._guessed:
            if node in path:
                self._guesses.see(agree, guessed, came[before.depths[node] :])
        end = path[-1]
        if len(path) <= len(came) or before.rows[end] < 0:
            return None
        self.growth, rows = before.rerooted(end, limits)
        self.kept_ahead = sum(row >= self._sent for row in rows)
        return rows

    def _guess(self, node: int) -> None:
        assert self.growth is not None
        agree, tokens = self._lookup.find(self.growth.path(node), GUESSED_MOST)
        if tokens:
            self.growth.guess(node, tokens, self._guesses.log_prob(agree))
            self._guessed.append((node, agree, tokens))

    def next(self) -> list[int]:
        """The nodes to run next, parents first; none once the tree is worth sending as it is."""
        growth, hit, rate = self.growth, self._hit.value, self.rate.value
        assert growth is not None and hit is not None
        dear = rate * (1.0 + self._haste)
        # The other rows are for what is drafted ahead.
        left = growth.limits.nodes + 1 - (len(growth.order) - self._kept)
        nodes = growth.promising(min(self._widths[-1], left)) if growth.limits.nodes else []
        # A node that is run brings at least one more to be sent: its likeliest child.
        rows = len(growth.order)
        longer = self._sweeps.of(rows + 2) - self._sweeps.of(rows + 1)
        gains = [hit * math.exp(growth.scores[node]) - rate * longer for node in nodes]
        best, chosen = 0.0, 0
        for width in self._widths:
            if width <= len(nodes):
                gain = sum(gains[:width]) - dear * self._steps.of(width)
                if gain > best:
                    best, chosen = gain, width
        if nodes and nodes[0] == 0:
            self.idle_rounds = 0 if chosen else self.idle_rounds + 1
            if self.idle_rounds >= PROBE_ROUNDS:
                self.idle_rounds, chosen = 0, 1
        return nodes[:chosen]

    def ahead(self) -> list[int]:
        """The nodes to run while the tree is being verified; none when that is in vain."""
        growth = self.growth
        if growth is None or not growth.order:
            return []
        nodes = growth.likeliest(self._widths[-1])
        return [node for node in nodes if growth.scores[node] >= math.log(AHEAD_LEAST)]

    def tree(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tree to send: tokens and parents, the root first."""
        growth = self.growth
        assert growth is not None
        self._sent = len(growth.order)
        if growth.order:
            for leaf in growth.leaves(2):
                if growth.depths[leaf]:
                    self._guess(leaf)
        return growth.tree(self._worth(growth))

    def _worth(self, growth: Growth) -> int:
        """How many nodes to send: those that add more tokens than their rows' time yields."""
        hit, rate, sweeps = self._hit.value, self.rate.value, self._sweeps
        assert hit is not None
        chances = sorted((math.exp(score) for score in growth.scores[1:]), reverse=True)
        chosen, tokens, best, self.expected = 0, 0.0, -rate * sweeps.of(1), 1.0
        for nodes, chance in enumerate(chances[: growth.limits.nodes], 1):
            tokens += hit * chance
            gain = tokens - rate * sweeps.of(nodes + 1)
            if gain >= best:
                chosen, best, self.expected = nodes, gain, 1.0 + tokens
        return chosen
