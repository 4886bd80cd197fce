"""Draft trees while they grow: which nodes to run next, what is sent, what outlives a verdict.

Growth goes by cumulative log-probability, as in SubSpec (arXiv 2509.18344) and EAGLE-2 (arXiv
2406.16858), but best first instead of level by level: a step runs the likeliest nodes that have not
been run, wherever they stand, so a good sibling higher up is not given up for a worse node deeper
down. The nodes that were not run are leaves, which cost no draft time at all.

The same tree goes on growing while a part of it is verified: what is added then hangs below places
where acceptance may end, and `rerooted` keeps the part below the place where it did. Pure, no model
in here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch

from stages.outlook import Outlook, of_log_probs

BRANCH = 8
"""Children remembered of a node that was run: the target's token is mostly among them."""


class Limits(msgspec.Struct, frozen=True):
    """How far a tree may go: levels, nodes sent (without the root), nodes run (with it)."""

    depth: int
    nodes: int
    rows: int


Bend = Callable[[float], float]


def _bent(likeliest: Sequence[tuple[float, int]], bend: Bend | None) -> Bend:
    """What scores take of each child's log-probability. All together they stay what they were."""
    if bend is None or not likeliest or likeliest[0][0] >= 0.0:
        return lambda edge: edge
    top = likeliest[0][0]
    bent = bend(top)
    others = math.log(-math.expm1(bent)) - math.log(-math.expm1(top))
    return lambda edge: bent if edge >= top else min(edge + others, bent)


class Growth:
    """A draft tree. Node 0 is the root, the committed token at `position`; parents come first.

    rows: for each node the draft scratch row that holds its keys and values, -1 until it is run.
    """

    def __init__(self, token: int, position: int, limits: Limits, bend: Bend | None = None) -> None:
        """`bend`: what becomes of the log-probability of a node's likeliest child in its score."""
        self.position, self.limits, self._bend = position, limits, bend
        self.tokens = [token]
        self.parents = [-1]
        self.depths = [0]
        self.scores = [0.0]
        self.rows = [-1]
        self.order: list[int] = []
        """The nodes that were run, by row."""
        self._children: list[dict[int, int]] = [{}]
        self._entropy: dict[int, float] = {}
        self._edges, self._bent = [0.0], [0.0]
        """What the model said of each node, and what its score takes of it."""
        self._known = [True]
        self._waiting: list[tuple[float, int]] = [(0.0, 0)]

    @property
    def room(self) -> int:
        """How many more nodes may be run."""
        return self.limits.rows - len(self.order)

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to `node`."""
        tokens = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def likeliest(self, most: int) -> list[int]:
        """The nodes to run next, as `leaves`, no more than there is room for."""
        return self.leaves(min(most, self.room))

    def promising(self, most: int) -> list[int]:
        """Those of `likeliest` that would be sent as the tree is: what grows below the others
        would not be either."""
        nodes = self.likeliest(most)
        if len(self.tokens) <= self.limits.nodes:
            return nodes
        least = heapq.nlargest(self.limits.nodes, self.scores[1:])[-1]
        return [node for node in nodes if node == 0 or self.scores[node] >= least]

    def leaves(self, most: int) -> list[int]:
        """The best `most` nodes that were not run, best first: in rising order where scores tie."""
        found: list[int] = []
        seen: set[int] = set()
        while self._waiting and len(found) < most:
            entry = heapq.heappop(self._waiting)
            score, node = -entry[0], entry[1]
            # An entry is stale once its node was run or scored anew.
            if self.rows[node] < 0 and node not in seen and score == self.scores[node]:
                found.append(node)
                seen.add(node)
        for node in found:
            heapq.heappush(self._waiting, (-self.scores[node], node))
        return found

    def begin(self, nodes: Sequence[int]) -> torch.Tensor:
        """Give `nodes` the next scratch rows. Whom they see: (len(nodes), rows so far) bool.

        The parents of `nodes` must have been run.
        """
        first = len(self.order)
        seen = torch.zeros(len(nodes), first + len(nodes), dtype=torch.bool)
        for index, node in enumerate(nodes):
            self.rows[node] = first + index
            self.order.append(node)
            while node >= 0:
                seen[index, self.rows[node]] = True
                node = self.parents[node]
        return seen

    def extend(self, nodes: Sequence[int], log_probs: torch.Tensor) -> None:
        """See `see`; log_probs: (nodes, vocab) float32."""
        self.see(nodes, of_log_probs(log_probs, BRANCH))

    def see(self, nodes: Sequence[int], outlook: Outlook) -> None:
        """Add the likeliest children of `nodes`, which were run.

        Children that were guessed before (`guess`) get the model's score instead.
        """
        for index, node in enumerate(nodes):
            self._entropy[node] = outlook.entropy[index]
            likeliest = outlook.likeliest[index]
            bent = _bent(likeliest, self._bend)
            for token, child in self._children[node].items():
                edge = outlook.log_prob(index, token)
                self._rescore(child, edge, bent(edge))
            if self.depths[node] < self.limits.depth:
                for value, token in likeliest:
                    if token not in self._children[node]:
                        self._add(node, token, value, bent(value))

    def guess(self, node: int, tokens: Iterable[int], log_prob: float) -> int:
        """Hang a chain of `tokens` below `node`, each with `log_prob` where it is not known.

        Returns where the chain ends.
        """
        for token in tokens:
            if self.depths[node] >= self.limits.depth:
                break
            child = self._children[node].get(token)
            if child is None:
                child = self._add(node, token, log_prob, log_prob, False)
            node = child
        return node

    def _add(self, parent: int, token: int, edge: float, bent: float, known: bool = True) -> int:
        score = self.scores[parent] + bent
        self._edges.append(edge)
        self._bent.append(bent)
        self._known.append(known)
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(score)
        self.rows.append(-1)
        self._children.append({})
        self._children[parent][token] = node
        self._wait(node)
        return node

    def _wait(self, node: int) -> None:
        fit = self.depths[node] < self.limits.depth and math.isfinite(self.scores[node])
        if self.rows[node] < 0 and fit:
            heapq.heappush(self._waiting, (-self.scores[node], node))

    def _rescore(self, node: int, edge: float, bent: float) -> None:
        self._edges[node], self._bent[node], self._known[node] = edge, bent, True
        below = [node]
        while below:
            one = below.pop()
            self.scores[one] = self.scores[self.parents[one]] + self._bent[one]
            self._wait(one)
            below += self._children[one].values()

    def tree(self, most: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens and parents of the root and the best nodes, in order: as many as may be sent,
        or `most`."""
        most = self.limits.nodes if most is None else most
        finite = [n for n in range(1, len(self.tokens)) if math.isfinite(self.scores[n])]
        best = heapq.nsmallest(most, finite, key=lambda n: (-self.scores[n], n))
        # A child scores at most its parent and comes after it, so a kept node's parent is kept.
        kept = [0, *sorted(best)]
        index = {node: place for place, node in enumerate(kept)}
        parents = tuple(-1 if node == 0 else index[self.parents[node]] for node in kept)
        return tuple(self.tokens[node] for node in kept), parents

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """The nodes that `tokens` lead to from the root, as far as they are in the tree."""
        node, nodes = 0, []
        for token in tokens:
            child = self._children[node].get(token)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def odds(self, node: int, token: int) -> tuple[float | None, list[float], float] | None:
        """How likely `token` was after `node`: its log-probability if it was among the children,
        that of each other child, and the entropy of all tokens. None if `node` was not run."""
        entropy = self._entropy.get(node)
        if entropy is None:
            return None
        of = {t: self._edges[c] for t, c in self._children[node].items() if self._known[c]}
        chosen = of.pop(token, None)
        return chosen, list(of.values()), entropy

    def rerooted(self, node: int, limits: Limits) -> tuple[Growth, list[int]]:
        """The tree below `node`, which was run, and the scratch rows that it keeps, in order."""
        position = self.position + self.depths[node]
        new = Growth(self.tokens[node], position, limits, self._bend)
        new._waiting.clear()
        moved = {node: 0}
        for old in range(node, len(self.tokens)):
            parent = moved.get(self.parents[old])
            if old != node and parent is not None and new.depths[parent] < limits.depth:
                said = self._edges[old], self._bent[old], self._known[old]
                moved[old] = new._add(parent, self.tokens[old], *said)
        kept = [old for old in self.order if old in moved]
        for row, old in enumerate(kept):
            new.rows[moved[old]] = row
            new.order.append(moved[old])
            if new.depths[moved[old]] < limits.depth:
                new._entropy[moved[old]] = self._entropy[old]
        return new, [self.rows[old] for old in kept]
