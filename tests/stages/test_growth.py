from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.growth import BRANCH, Growth, Limits
from stages.tree import ancestor_mask, depths
from tests.stages.made_drafts import Path, Rows, made_rows

ROOT, POSITION = 7, 20
GUESSED = math.log(0.6)

LIMITS = st.builds(
    Limits, depth=st.integers(1, 4), nodes=st.integers(0, 14), rows=st.integers(1, 9)
)
DISTRIBUTIONS = st.builds(
    made_rows, st.integers(0, 10_000), st.integers(1, 10), coarse=st.booleans(), holes=st.booleans()
)
WIDTHS = st.lists(st.integers(0, 4), max_size=5)
Deed = int | tuple[int, list[int]]
"""Run so many nodes, or guess tokens below one of the nodes that were not run."""
DEEDS = st.lists(
    st.integers(0, 4)
    | st.tuples(st.integers(0, 50), st.lists(st.integers(0, 4), min_size=1, max_size=5)),
    max_size=7,
)


class Grown:
    """A growth that is driven, and beside it what it should hold: every edge by its path."""

    def __init__(self, row: Rows, growth: Growth, prefix: Path = ()) -> None:
        self.row, self.growth, self.prefix = row, growth, prefix
        self.edges: dict[Path, float] = {}
        self.run_paths: set[Path] = set()

    def paths(self) -> list[Path]:
        return [tuple(self.growth.path(node)) for node in range(len(self.growth.tokens))]

    def below(self, path: Path) -> torch.Tensor:
        return self.row((*self.prefix, *path))

    def score(self, path: Path) -> float:
        return sum(self.edges[path[:size]] for size in range(1, len(path) + 1))

    def run(self, most: int) -> list[int]:
        """One step, as the drafter makes it."""
        growth = self.growth
        nodes = growth.likeliest(most)
        assert nodes == self.best_unrun(most)
        for place, node in enumerate(nodes):
            parent = growth.parents[node]
            assert node == 0 or growth.rows[parent] >= 0 or parent in nodes[:place]
        mask = growth.begin(nodes)
        assert torch.equal(mask, self.seen(nodes))
        paths = [tuple(growth.path(node)) for node in nodes]
        if nodes:
            growth.extend(nodes, torch.stack([self.below(path) for path in paths]))
        for path in paths:
            self.ran(path)
        return nodes

    def ran(self, path: Path) -> None:
        """The children that a node gets, from the distribution."""
        self.run_paths.add(path)
        values = self.below(path).tolist()
        for token, value in enumerate(values):
            if (*path, token) in self.edges:
                self.edges[(*path, token)] = value
        if len(path) < self.growth.limits.depth:
            held = self.children(path)  # where values are equal any of them may be taken
            best = sorted(filter(math.isfinite, values), reverse=True)[:BRANCH]
            assert len(held) >= len(best)
            assert all(t in held for t, v in enumerate(values) if best and v > best[-1])
            for token in held:
                self.edges.setdefault((*path, token), values[token])

    def children(self, path: Path) -> list[int]:
        size = len(path)
        return [p[-1] for p in self.paths() if len(p) == size + 1 and p[:size] == path]

    def guess(self, node: int, tokens: Sequence[int]) -> None:
        self.growth.guess(node, tokens, GUESSED)
        path = tuple(self.growth.path(node))
        for token in tokens:
            if len(path) < self.growth.limits.depth:
                path = (*path, token)
                self.edges.setdefault(path, GUESSED)

    def do(self, deeds: Iterable[Deed]) -> None:
        for deed in deeds:
            if isinstance(deed, int):
                self.run(deed)
            else:
                growth, (pick, tokens) = self.growth, deed
                unrun = [node for node, row in enumerate(growth.rows) if row < 0]
                vocab = len(self.row(()))
                if unrun:
                    self.guess(unrun[pick % len(unrun)], [token % vocab for token in tokens])
            self.check()

    def best_unrun(self, most: int) -> list[int]:
        """By trying all: the nodes that may still get children, best first."""
        growth = self.growth
        may = [
            node
            for node in range(len(growth.tokens))
            if growth.rows[node] < 0
            and growth.depths[node] < growth.limits.depth
            and math.isfinite(growth.scores[node])
        ]
        return sorted(may, key=lambda n: (-growth.scores[n], n))[: max(0, min(most, growth.room))]

    def seen(self, nodes: Sequence[int]) -> torch.Tensor:
        """Of all rows so far, those of a node and its ancestors."""
        order = self.growth.order
        return ancestor_mask(self.growth.parents, nodes)[:, order]

    def check(self) -> None:
        growth, paths = self.growth, self.paths()
        limits = growth.limits
        assert set(paths) == {(), *self.edges}
        assert len(set(paths)) == len(paths), "siblings differ"
        assert all(parent < node for node, parent in enumerate(growth.parents))
        assert growth.depths == depths(growth.parents)
        assert max(growth.depths) <= limits.depth
        assert len(growth.order) <= limits.rows
        assert {paths[node] for node in growth.order} == self.run_paths
        assert [growth.rows[node] for node in growth.order] == list(range(len(growth.order)))
        assert sum(row >= 0 for row in growth.rows) == len(growth.order)
        for node, path in enumerate(paths):
            assert growth.scores[node] == pytest.approx(self.score(path), abs=1e-6)
        self.check_sent()

    def check_sent(self) -> None:
        growth, paths = self.growth, self.paths()
        tokens, parents = growth.tree()
        assert (tokens[0], parents[0]) == (ROOT if not self.prefix else self.prefix[-1], -1)
        assert all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))
        sent: list[Path] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            sent.append((*sent[parent], token))
        assert len(set(sent)) == len(sent)
        finite = [n for n in range(1, len(paths)) if math.isfinite(growth.scores[n])]
        best = sorted(finite, key=lambda n: (-growth.scores[n], n))[: growth.limits.nodes]
        assert set(sent) == {(), *(paths[node] for node in best)}


def planted(row: Rows, limits: Limits) -> Grown:
    return Grown(row, Growth(ROOT, POSITION, limits))


def logs(*probs: float) -> torch.Tensor:
    return torch.log(torch.tensor([probs]))


@given(DISTRIBUTIONS, LIMITS, WIDTHS)
def test_the_best_of_all_nodes_are_sent_after_any_steps(
    row: Rows, limits: Limits, widths: list[int]
) -> None:
    planted(row, limits).do(widths)


@given(DISTRIBUTIONS, LIMITS, DEEDS)
def test_guesses_are_nodes_like_others(row: Rows, limits: Limits, deeds: list[Deed]) -> None:
    planted(row, limits).do(deeds)


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 20))
def test_with_room_for_all_it_is_the_best_of_all_continuations(
    seed: int, vocab: int, nodes: int
) -> None:
    row = made_rows(seed, vocab)
    grown = planted(row, Limits(3, nodes, 100))
    grown.do([4] * 10)
    every: dict[Path, float] = {(): 0.0}
    level: list[Path] = [()]
    for _ in range(3):
        level = [(*path, token) for path in level for token in range(vocab)]
        every |= {path: every[path[:-1]] + row(path[:-1])[path[-1]].item() for path in level}
    assert set(grown.paths()) == set(every)
    best = sorted((score for path, score in every.items() if path), reverse=True)[:nodes]
    sent: list[Path] = [()]
    tokens, parents = grown.growth.tree()
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        sent.append((*sent[parent], token))
    assert sorted((every[path] for path in sent[1:]), reverse=True) == pytest.approx(best)


@given(DISTRIBUTIONS, LIMITS, DEEDS)
def test_the_same_deeds_make_the_same_tree(row: Rows, limits: Limits, deeds: list[Deed]) -> None:
    """Where scores are equal as well."""
    trees = []
    for _ in range(2):
        grown = planted(row, limits)
        grown.do(deeds)
        trees.append((grown.growth.tokens, grown.growth.parents, grown.growth.tree()))
    assert trees[0] == trees[1]


@settings(max_examples=60)
@given(DISTRIBUTIONS, LIMITS, LIMITS, DEEDS, WIDTHS, st.integers(0, 50))
def test_what_is_below_a_new_root_stays_and_grows_on(
    row: Rows, before: Limits, after: Limits, deeds: list[Deed], more: list[int], pick: int
) -> None:
    old = planted(row, before)
    old.run(1)
    old.do(deeds)
    node = old.growth.order[pick % len(old.growth.order)]
    top = tuple(old.growth.path(node))
    growth, rows = old.growth.rerooted(node, after)
    assert growth.position == POSITION + len(top)
    assert growth.tokens[0] == old.growth.tokens[node]

    new = Grown(row, growth, top)
    near = [path for path in old.paths() if path[: len(top)] == top]
    kept = [path for path in near if len(path) - len(top) <= after.depth]
    assert new.paths() == [path[len(top) :] for path in kept]  # in the same order
    new.edges = {path[len(top) :]: old.edges[path] for path in kept if path != top}
    new.run_paths = {path[len(top) :] for path in kept if path in old.run_paths}
    assert rows == sorted(set(rows))
    assert [old.growth.path(old.growth.order[r]) for r in rows] == [
        [*top, *growth.path(node)] for node in growth.order
    ]
    if len(growth.order) <= after.rows:  # rows that are there are not taken away
        new.check()
        new.do(more)
    else:
        assert growth.likeliest(9) == []


@given(DISTRIBUTIONS, LIMITS, DEEDS, st.lists(st.integers(0, 9), max_size=6))
def test_a_text_is_followed_as_far_as_the_tree_goes(
    row: Rows, limits: Limits, deeds: list[Deed], text: list[int]
) -> None:
    grown = planted(row, limits)
    grown.do(deeds)
    nodes = grown.growth.follow(text)
    assert [grown.growth.tokens[node] for node in nodes] == text[: len(nodes)]
    paths = set(grown.paths())
    assert tuple(text[: len(nodes)]) in paths
    assert len(nodes) == len(text) or tuple(text[: len(nodes) + 1]) not in paths


def test_a_good_sibling_is_run_before_a_worse_node_deeper_down() -> None:
    growth = Growth(ROOT, POSITION, Limits(3, 8, 8))
    growth.begin([0])
    growth.extend([0], logs(0.5, 0.4, 0.1))
    growth.begin([1])
    growth.extend([1], logs(0.3, 0.4, 0.3))
    assert growth.likeliest(2) == [2, 4]  # the other child of the root; then 0.5 * 0.4


def test_a_deep_node_drives_out_a_poor_shallow_one() -> None:
    growth = Growth(ROOT, POSITION, Limits(3, 2, 8))
    growth.begin([0])
    growth.extend([0], logs(0.9, 0.1))
    growth.begin([1])
    growth.extend([1], logs(0.2, 0.8))
    assert growth.tree() == ((ROOT, 0, 1), (-1, 0, 1))


def test_of_equals_the_older_is_sent() -> None:
    growth = Growth(ROOT, POSITION, Limits(3, 1, 8))
    growth.begin([0])
    growth.extend([0], torch.tensor([[-1.0, -2.0]]))
    growth.begin([1])
    growth.extend([1], torch.tensor([[0.0, -5.0]]))
    assert growth.tree() == ((ROOT, 0), (-1, 0))
    assert growth.likeliest(2) == [3, 2]


def test_values_that_are_no_numbers_never_enter() -> None:
    growth = Growth(ROOT, POSITION, Limits(3, 8, 8))
    growth.begin([0])
    growth.extend([0], torch.tensor([[-math.inf, -1.0, math.nan, -2.0]]))
    assert sorted(growth.tokens[1:]) == [1, 3]
    nodes = growth.likeliest(4)
    growth.begin(nodes)
    growth.extend(nodes, torch.full((2, 4), -math.inf))
    assert growth.likeliest(4) == []
    assert growth.tree() == ((ROOT, 1, 3), (-1, 0, 0))


def test_a_guess_that_the_model_rules_out_is_neither_run_nor_sent() -> None:
    growth = Growth(ROOT, POSITION, Limits(4, 8, 8))
    growth.guess(0, [0, 1], GUESSED)
    growth.begin([0])
    growth.extend([0], torch.tensor([[-math.inf, 0.0]]))
    assert growth.likeliest(4) == [3]
    assert growth.tree() == ((ROOT, 1), (-1, 0))


def test_what_is_below_a_guess_that_was_ruled_out_is_never_run() -> None:
    """A chain of guesses is run together with the node that it hangs below."""
    growth = Growth(ROOT, POSITION, Limits(4, 8, 8))
    growth.guess(0, [0], GUESSED)
    growth.begin([0, 1])
    growth.extend([0, 1], torch.tensor([[-math.inf, 0.0], [-0.7, -0.7]]))
    assert [growth.tokens[node] for node in growth.likeliest(4)] == [1]


def test_a_guess_that_was_ruled_out_stays_so_below_a_new_root() -> None:
    growth = Growth(ROOT, POSITION, Limits(4, 8, 8))
    growth.guess(0, [0], GUESSED)
    growth.begin([0])
    growth.extend([0], torch.tensor([[-math.inf, 0.0]]))
    new, _ = growth.rerooted(0, growth.limits)
    assert [new.tokens[node] for node in new.likeliest(4)] == [1]


def test_below_a_root_that_the_model_had_ruled_out_growth_goes_on() -> None:
    """The target chose what the draft gave no chance, and that was run with its parent."""
    growth = Growth(ROOT, POSITION, Limits(4, 8, 8))
    growth.guess(0, [0], GUESSED)
    growth.begin([0, 1])
    growth.extend([0, 1], torch.tensor([[-math.inf, 0.0], [-0.5, -1.0]]))
    new, rows = growth.rerooted(1, growth.limits)
    assert rows == [1]
    assert all(not math.isnan(score) for score in new.scores)
    assert [new.tokens[node] for node in new.likeliest(4)] == [0, 1]


def test_no_guess_at_the_deepest_level_is_run() -> None:
    """It could have no children: the step would be for nothing."""
    growth = Growth(ROOT, POSITION, Limits(1, 8, 8))
    growth.guess(0, [0], GUESSED)
    growth.begin([0])
    growth.extend([0], logs(0.5, 0.5))
    assert growth.likeliest(4) == []


def test_descendants_shift_with_a_guess() -> None:
    growth = Growth(ROOT, POSITION, Limits(4, 8, 8))
    growth.guess(0, [5, 6, 7], math.log(0.5))
    growth.guess(0, [5, 6, 8], math.log(0.5))  # merged as far as it is the same
    assert growth.tokens == [ROOT, 5, 6, 7, 8]
    before = list(growth.scores)
    growth.begin([0])
    growth.extend([0], torch.log_softmax(torch.arange(9.0), dim=0)[None])
    value = torch.log_softmax(torch.arange(9.0), dim=0)[5].item()
    assert growth.scores[1:5] == pytest.approx([s + value - before[1] for s in before[1:5]])
    assert growth.tokens.count(5) == 1


def test_a_guess_below_a_node_that_was_run_claims_no_more_than_is_left() -> None:
    """The odds of a node's children are those of the draft: the fit of sharpening rests on it."""
    growth = Growth(ROOT, POSITION, Limits(4, 8, 8))
    growth.begin([0])
    growth.extend([0], torch.log_softmax(-torch.arange(12.0), dim=0)[None])
    growth.guess(0, [11], math.log(0.9))
    odds = growth.odds(0, 10)
    assert odds is not None
    assert sum(map(math.exp, odds[1])) <= 1.0


@given(DISTRIBUTIONS, st.integers(0, 9))
def test_odds_are_those_of_the_distribution(row: Rows, token: int) -> None:
    grown = planted(row, Limits(3, 8, 8))
    assert grown.growth.odds(0, token) is None
    grown.run(1)
    odds, values = grown.growth.odds(0, token), row(())
    assert odds is not None
    chosen, others, entropy = odds
    assert entropy == pytest.approx(torch.special.entr(values.exp()).sum().item(), abs=1e-5)
    children = grown.children(())
    assert chosen == (pytest.approx(values[token].item()) if token in children else None)
    rest = [values[other].item() for other in children if other != token]
    assert sorted(others) == pytest.approx(sorted(rest))


def test_a_node_whose_children_were_cut_off_has_no_odds() -> None:
    """It was run, but what became of its children says nothing of the draft."""
    growth = Growth(ROOT, POSITION, Limits(4, 8, 8))
    for node in (0, 1):
        growth.begin([node])
        growth.extend([node], logs(0.6, 0.4))
    new, rows = growth.rerooted(0, Limits(1, 8, 8))
    assert rows == [0, 1]
    assert new.odds(1, 0) is None


@given(st.floats(0.05, 0.95), st.floats(-3.0, 3.0))
def test_a_bent_likeliest_child_leaves_the_others_what_is_left(top: float, shift: float) -> None:
    """Chances are what they were together, and `odds` still tells what the model said."""
    rest = 1.0 - top
    probs = torch.tensor([[top, rest * 0.04, rest * 0.03, rest * 0.02, rest * 0.01]])
    growth = Growth(0, 5, Limits(3, 8, 8), lambda log_prob: log_prob - abs(shift))
    growth.begin([0])
    growth.extend([0], probs.log())
    bent = [math.exp(score) for score in growth.scores[1:]]
    said = math.exp(math.log(top) - abs(shift))
    assert bent[0] == pytest.approx(said, rel=1e-4)
    for value, prob in zip(bent[1:], probs[0, 1:].tolist(), strict=True):
        assert value == pytest.approx(min(said, prob * (1 - said) / rest), rel=1e-3)
    odds = growth.odds(0, growth.tokens[1])
    assert odds is not None and odds[0] == pytest.approx(math.log(top), abs=1e-5)
