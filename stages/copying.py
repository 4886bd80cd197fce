"""One session's drafts where there is no draft model: what its own text said before.

A tree is made of lookups alone (lookup.py): no draft time, only rows for the verifier. There is
room for three drafts in the padding of every pack, so a single token that agrees is enough to look
up here. More rows are sent only where the tokens that they are expected to add are worth the time
by which they were seen to lengthen a round, and none where guesses hardly ever come true. Guesses
are judged whether they were sent or not. No model in here, and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stages.growth import Growth, Limits
from stages.guesses import Guesses
from stages.lookup import LONGEST_MATCH, Lookup
from stages.pace import StepTimes
from stages.speculation import PROBE_ROUNDS
from stages.sweep import ROW_MULTIPLE

BRANCHES = 3
"""Continuations below the root."""
PLACES = 32
"""Places remembered of a token: the common ones stand in many."""
LEAST_TRIED = 0.1
"""Where no guess is as likely as this, nothing is sent but a probe."""
LEAST_SENT = 0.02
"""Nodes less likely than this are not worth a row."""


class RoundTimes(StepTimes):
    """Seconds of a round by the rows of its tree, padded.

    More rows than were ever tried are taken to cost nothing more, since a sweep waits for its
    weights first of all; and fewer to cost nothing at all, so that they are tried at once.
    """

    def __init__(self) -> None:
        super().__init__(fixed_rows=1e9)

    def of(self, rows: int) -> float:
        """See StepTimes."""
        return 0.0 if rows < min(self._means, default=0) else super().of(rows)


class Copying:
    """The trees of one session."""

    def __init__(self, times: RoundTimes) -> None:
        """`times` are shared with other sessions."""
        self._times = times
        self._lookup, self._guesses = Lookup(1, PLACES), Guesses()
        self._growth: Growth | None = None
        self._guessed: list[tuple[int, int, int]] = []
        self._began, self._rows, self._held_back = 0.0, 0, 0

    def draft(
        self, text: Sequence[int], position: int, limits: Limits, now: float
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A round begins: the last token of `text`, all tokens so far, stands at `position`.

        Learns from the round before. Returns the tree to send: tokens and parents, the root first.
        """
        before = self._growth
        if before is not None and position > before.position:
            self._times.see(self._rows, now - self._began)
            self._learn(before, text[len(text) - (position - before.position) :])
        self._lookup.extend(text[len(self._lookup) :])
        self._guessed.clear()
        growth = self._growth = Growth(text[-1], position, limits)
        self._grow(growth)
        tree = growth.tree(self._worth(growth))
        self._began, self._rows = now, _padded(len(tree[0]))
        return tree

    def forget(self) -> None:
        """The text is computed anew: that is no round."""
        self._growth = None

    def _learn(self, before: Growth, came: Sequence[int]) -> None:
        path = {0, *before.follow(came)}
        for node, agree, token in self._guessed:
            if node in path:
                self._guesses.see(agree, (token,), came[before.depths[node] :])

    def _grow(self, growth: Growth) -> None:
        depth, likeliest = growth.limits.depth, 0
        for agree, tokens in self._lookup.branches((), depth, BRANCHES if depth else 0):
            end = self._hang(growth, 0, agree, tokens)
            likeliest = likeliest or end
        # A text that goes round in circles ends long before its repetition does.
        while 0 < growth.depths[likeliest] < depth:
            agree, tokens = self._lookup.find(growth.path(likeliest), depth)
            if not tokens:
                return
            likeliest = self._hang(growth, likeliest, agree, tokens)

    def _hang(self, growth: Growth, node: int, agree: int, tokens: Sequence[int]) -> int:
        """Where the chain ends. Each token of it that comes true is one more that agrees."""
        for more, token in enumerate(tokens[: growth.limits.depth - growth.depths[node]]):
            known = min(agree + more, LONGEST_MATCH)
            self._guessed.append((node, known, token))
            node = growth.guess(node, (token,), self._guesses.log_prob(known))
        return node

    def _worth(self, growth: Growth) -> int:
        """How many nodes to send: as many as promise most tokens a second."""
        chances = sorted((math.exp(score) for score in growth.scores[1:]), reverse=True)
        chances = [chance for chance in chances if chance >= LEAST_SENT][: growth.limits.nodes]
        chosen, best = 0, 0.0
        if chances and chances[0] >= LEAST_TRIED:
            for rows in range(ROW_MULTIPLE, _padded(len(chances) + 1) + 1, ROW_MULTIPLE):
                nodes = min(rows - 1, len(chances))
                rate = (1.0 + sum(chances[:nodes])) / max(self._times.of(rows), 1e-9)
                if rate > best:
                    chosen, best = nodes, rate
        # What is never tried is never timed again.
        self._held_back = self._held_back + 1 if chosen < len(chances) else 0
        if self._held_back >= PROBE_ROUNDS:
            self._held_back, chosen = 0, len(chances)
        return chosen


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
