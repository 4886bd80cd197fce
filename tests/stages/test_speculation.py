"""Sessions that are driven without a clock and without a model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.messages import SweepTimes
from stages.growth import Growth, Limits
from stages.guesses import GUESSED_LEAST, Guesses
from stages.pace import Rate, StepTimes, SweepPace
from stages.sharpening import Sharpening
from stages.speculation import AHEAD_LEAST, PROBE_ROUNDS, Speculation
from stages.tree import accept
from tests.stages.made_drafts import Path, Rows, made_rows

WIDTHS = (1, 2, 4, 8)
LIMITS = Limits(6, 12, 20)
VOCAB = 12
SEEDS = st.integers(0, 10_000)


def cheap() -> tuple[StepTimes, Rate]:
    """Steps that cost nothing."""
    return StepTimes(), Rate()


def priced(costs: dict[int, float]) -> tuple[StepTimes, Rate]:
    """Steps by their rows, in the tokens that their time would yield."""
    steps, rate = StepTimes(), Rate()
    for rows, cost in costs.items():
        steps.see(rows, cost)
    rate.see(1.0, 1)
    return steps, rate


class Driven:
    """A session: its text, a speculation, a made draft and what the scratch rows hold."""

    def __init__(
        self,
        row: Rows,
        prices: tuple[StepTimes, Rate],
        text: Sequence[int] = (3, 1, 4),
        widths: Sequence[int] = WIDTHS,
        sweeps: SweepPace | None = None,
    ) -> None:
        self.row, self.text = row, [*text]
        self.speculation = Speculation(widths, *prices, Sharpening("int3"), sweeps)
        self.scratch: list[Path] = []

    @property
    def growth(self) -> Growth:
        assert self.speculation.growth is not None
        return self.speculation.growth

    def texts(self) -> list[Path]:
        """What each scratch row should hold: the text up to its token."""
        return [(*self.text, *self.growth.path(node)) for node in self.growth.order]

    def begin(self, limits: Limits = LIMITS) -> list[int] | None:
        kept = self.speculation.begin(self.text, len(self.text) - 1, limits)
        self.scratch = [self.scratch[row] for row in kept or ()]
        assert self.scratch == self.texts(), "a row that is kept holds what it stands for"
        return kept

    def run(self, nodes: Sequence[int]) -> None:
        growth = self.growth
        growth.begin(nodes)
        below = [(*self.text, *growth.path(node)) for node in nodes]
        growth.extend(nodes, torch.stack([self.row(text) for text in below]))
        self.scratch = self.texts()

    def draft(self) -> list[int]:
        """All steps of a round: how wide each was."""
        widths = []
        while nodes := self.speculation.next():
            self.run(nodes)
            widths.append(len(nodes))
        return widths

    def verify(self, target: Rows) -> Path:
        """The tree is sent and answered by what `target` chooses: the tokens that came."""
        tokens, parents = self.speculation.tree()
        while nodes := self.speculation.ahead():
            self.run(nodes)
        text = tuple(self.text)
        _, answer = accept(tokens, parents, lambda _, below: int(target((*text, *below)).argmax()))
        self.text += answer
        return answer


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 8), st.integers(1, 14), st.integers(1, 20))
def test_where_steps_cost_nothing_the_tree_grows_to_its_limits(
    seed: int, depth: int, nodes: int, rows: int
) -> None:
    made = Driven(made_rows(seed, VOCAB), cheap())
    made.begin(Limits(depth, nodes, rows))
    made.draft()
    run = len(made.growth.order)
    assert run == min(rows, nodes + 1) or (run < nodes + 1 and not made.growth.promising(8))
    assert len(made.speculation.tree()[0]) == min(nodes, len(made.growth.tokens) - 1) + 1


def test_where_steps_are_dear_nothing_is_drafted_but_a_probe_now_and_then() -> None:
    made = Driven(made_rows(1, VOCAB), priced({1: 1e3}))
    steps = []
    for _ in range(3 * PROBE_ROUNDS):
        made.begin()
        steps.append(len(made.draft()))
        made.text.append(100 + len(made.text))  # nothing that is in a tree
    assert steps == ([0] * (PROBE_ROUNDS - 1) + [1]) * 3


def test_a_step_that_yields_no_more_than_it_costs_is_not_made() -> None:
    made = Driven(made_rows(1, VOCAB), priced({1: 0.9}))  # of ten drafts nine are taken to hit
    made.begin()
    assert made.speculation.next() == []


def test_a_round_that_drafts_puts_off_the_next_probe() -> None:
    steps, rate = priced({1: 1e3})
    made = Driven(made_rows(1, VOCAB), (steps, rate))
    drafted = []
    for number in range(2 * PROBE_ROUNDS):
        if number == 5:
            made.speculation.rate = Rate()
        made.begin()
        drafted.append(bool(made.draft()))
        made.speculation.rate = rate
        made.text.append(100 + number)
    assert [number for number, some in enumerate(drafted) if some] == [5, 5 + PROBE_ROUNDS]


def test_nothing_is_drafted_where_nothing_may_be_sent() -> None:
    made = Driven(made_rows(1, VOCAB), cheap())
    for _ in range(PROBE_ROUNDS + 1):
        made.begin(Limits(0, 0, 0))
        assert made.draft() == []
        assert made.speculation.tree() == ((made.text[-1],), (-1,))
        made.text.append(5)


def halves(text: Path) -> torch.Tensor:
    """Each token half as likely as the one before it."""
    return torch.log_softmax(-math.log(2) * torch.arange(VOCAB).float(), dim=0)


def test_wider_steps_are_made_where_they_cost_the_same() -> None:
    made = Driven(halves, priced(dict.fromkeys(WIDTHS, 1e-9)))
    made.begin(Limits(6, 30, 31))
    widths = made.draft()
    assert widths[:3] == [1, 8, 8]


def test_steps_are_narrow_where_each_row_costs() -> None:
    """The root's children have chances of about 1/2, 1/4, 1/8, ...; a row is worth 0.15."""
    made = Driven(halves, priced({width: 0.15 * width for width in WIDTHS}))
    made.begin()
    made.run(made.speculation.next())
    assert len(made.speculation.next()) == 2


@given(SEEDS, st.lists(st.floats(0.0, 0.5), min_size=4, max_size=4))
def test_the_width_that_pays_best_is_chosen(seed: int, costs: list[float]) -> None:
    made = Driven(made_rows(seed, VOCAB), priced(dict(zip(WIDTHS, costs, strict=True))))
    made.begin()
    made.run([0])
    offered = made.growth.likeliest(WIDTHS[-1])
    gains = [0.9 * math.exp(made.growth.scores[node]) for node in offered]  # of ten, nine hit
    pays = {
        width: sum(gains[:width]) - cost
        for width, cost in zip(WIDTHS, costs, strict=True)
        if width <= len(offered)
    }
    nodes = made.speculation.next()
    assert nodes == offered[: len(nodes)]
    most = max(0.0, *pays.values())
    assert (pays[len(nodes)] if nodes else 0.0) == pytest.approx(most, abs=1e-9)


@settings(max_examples=30)
@given(
    SEEDS,
    st.integers(0, 10),
    st.integers(1, 8),
    st.integers(1, 14),
    st.integers(1, 30),
    st.booleans(),
)
def test_of_a_tree_the_rows_below_the_end_of_a_verdict_are_kept(
    seed: int, agree: int, depth: int, nodes: int, rows: int, holes: bool
) -> None:
    """And nothing where it ended elsewhere: `agree` tenths of the time the draft is right."""
    limits = Limits(depth, nodes, rows)
    draft = made_rows(seed, VOCAB, holes=holes)
    other = made_rows(seed + 1, VOCAB)

    def target(text: Path) -> torch.Tensor:
        return (draft if random.Random(hash(text)).randrange(10) < agree else other)(text)

    made = Driven(draft, cheap())
    made.begin(limits)
    for _ in range(5):
        made.draft()
        answer = made.verify(target)
        before, scratch = made.growth, list(made.scratch)
        path = before.follow(answer)
        ran = len(path) == len(answer) and before.rows[path[-1]] >= 0
        kept = made.begin(limits)
        if not ran:
            assert kept is None
            assert made.growth.order == []
            continue
        end = tuple(made.text)
        below = [text[: len(end)] == end and len(text) <= len(end) + depth for text in scratch]
        assert kept == [row for row, one in enumerate(below) if one]
        assert made.growth.rows[0] == 0


@settings(max_examples=30)
@given(SEEDS)
def test_rows_that_were_kept_take_nothing_from_the_next_draft(seed: int) -> None:
    """As many nodes are run anew as without them, if so many would be sent and there are rows."""
    draft = made_rows(seed, VOCAB)
    made = Driven(draft, cheap())
    limits = Limits(6, 8, 20)
    made.begin(limits)
    for _ in range(4):
        made.draft()
        made.verify(draft)
        kept = made.begin(limits)
        room = limits.rows - len(kept or ())
        anew = sum(made.draft())
        assert anew == min(room, limits.nodes + 1) or not made.growth.promising(8)


DEEP = Limits(12, 4, 40)
"""So deep that a tree goes on below what is sent of it."""


def test_where_the_target_agrees_what_was_run_ahead_is_kept() -> None:
    made = Driven(halves, cheap(), widths=(1,))
    made.begin(DEEP)
    made.draft()
    sent = len(made.growth.order)
    answer = made.verify(halves)
    kept = made.begin(DEEP)
    assert set(answer) == {0}
    assert kept
    assert made.speculation.kept_ahead == sum(row >= sent for row in kept) > 0
    assert len(kept) < 40
    assert made.speculation.next()[0] != 0  # the root is among them


def test_after_forgetting_nothing_is_kept() -> None:
    made = Driven(halves, cheap(), widths=(1,))
    made.begin(DEEP)
    made.draft()
    made.verify(halves)
    made.speculation.forget()
    assert made.speculation.ahead() == []
    assert made.begin(DEEP) is None
    assert made.speculation.kept_ahead == 0
    assert made.growth.order == []
    assert made.speculation.next() == [0]


def test_a_round_that_is_begun_again_keeps_its_whole_tree() -> None:
    made = Driven(halves, cheap())
    made.begin()
    made.draft()
    ran = len(made.growth.order)
    assert made.begin() == list(range(ran))


def test_a_draft_that_never_comes_true_is_given_up() -> None:
    made = Driven(halves, priced({1: 0.3}))
    drafted = []
    for number in range(40):
        made.begin()
        drafted.append(bool(made.draft()))
        made.speculation.tree()
        made.text.append(100 + number)
    assert all(drafted[:5])
    assert sum(drafted[20:]) <= 2  # no more than probes


PHRASE = [*range(20, 36)]


def test_what_a_text_repeats_is_sent_without_a_draft() -> None:
    made = Driven(made_rows(1, VOCAB), priced({1: 1e3}), [*PHRASE, 1, *PHRASE[:6]])
    made.begin()
    assert made.draft() == []
    tokens, parents = made.speculation.tree()
    assert tokens == tuple(PHRASE[5:12])
    assert parents == tuple(range(-1, LIMITS.depth))


def phrased(text: Path) -> torch.Tensor:
    """Begins the phrase wherever it is not in it, and goes on with its second token."""
    values = -9.0 - torch.arange(40) / 100
    values[PHRASE[1] if text[-1] == PHRASE[0] else PHRASE[0]] = 0.0
    return torch.log_softmax(values, dim=0)


@pytest.mark.parametrize("rows", [2, 3])
def test_leaves_of_a_draft_are_looked_up_as_well(rows: int) -> None:
    """The text is like nothing before; with the draft's next tokens it is. It takes no row."""
    made = Driven(phrased, cheap(), [*PHRASE, 1], widths=(1,))
    made.begin(Limits(6, 30, rows))
    for _ in range(2):
        made.run(made.speculation.next())
    made.speculation.tree()
    assert len(made.growth.follow(PHRASE)) == 6


def test_the_fit_learns_from_what_the_draft_gave_and_not_from_what_was_guessed() -> None:
    """Below a root that was run ahead, the lookup hangs a token to which the draft gave little."""
    first, second, third = PHRASE[:3]
    rest = [token for token in range(40) if token not in (second, third)]
    order = [second, *rest[:12], third, *rest[12:]]
    values = torch.empty(40)
    values[order] = -torch.arange(40).float() / 4

    made = Driven(lambda _: torch.log_softmax(values, dim=0), cheap(), [*PHRASE, 1, first])
    made.begin()
    made.run([0])
    made.run(made.growth.follow([second]))
    made.text.append(second)
    assert made.begin() == [1]
    assert made.growth.follow([third])
    before = made.speculation.sharpening.temperature
    made.text.append(third)
    made.begin()
    assert made.speculation.sharpening.temperature > before  # the draft had been too sure


def test_guesses_that_came_true_are_trusted_more() -> None:
    made = Driven(made_rows(1, VOCAB), priced({1: 1e3}), [*PHRASE, 1, *PHRASE[:6]])
    made.begin()
    before = made.growth.scores[1]
    made.text += PHRASE[6:10]
    made.begin()
    assert made.speculation._guesses.log_prob(6) > before


def test_guesses_below_a_leaf_are_judged_by_what_came_after_it() -> None:
    made = Driven(phrased, cheap(), [*PHRASE, 1], widths=(1,))
    made.begin(Limits(6, 30, 3))
    for _ in range(2):
        made.run(made.speculation.next())
    made.speculation.tree()
    made.text += PHRASE[:4]
    made.begin()
    assert made.speculation._guesses.log_prob(2) > Guesses().log_prob(2)


def test_guesses_that_were_forgotten_are_not_judged() -> None:
    made = Driven(made_rows(1, VOCAB), priced({1: 1e3}), [*PHRASE, 1, *PHRASE[:6]])
    made.begin()
    made.speculation.forget()
    for token in (98, 99):
        made.text.append(token)
        made.begin()
    assert made.speculation._guesses.log_prob(6) == Guesses().log_prob(6)


def test_a_text_that_never_goes_on_as_before_is_hardly_guessed_from_any_more() -> None:
    made = Driven(made_rows(1, VOCAB), priced({1: 1e3}), PHRASE)
    guessed = []
    for number in range(60):
        made.text += PHRASE[:4]  # it looks like the phrase, and then is not
        made.begin()
        assert made.speculation.growth is not None
        guessed.append(made.speculation.growth.scores[1])
        made.text.append(100 + number)
        made.begin()
    # But it is: a session may change, and what is never guessed is never seen to come true.
    assert guessed[0] > guessed[-1] == pytest.approx(math.log(GUESSED_LEAST))


@settings(max_examples=40)
@given(SEEDS, st.integers(0, 6))
def test_ahead_only_what_is_likely_enough_is_run(seed: int, steps: int) -> None:
    made = Driven(made_rows(seed, VOCAB), cheap(), widths=(4,) if seed % 2 else WIDTHS)
    made.begin(Limits(6, 30, 60))
    assert made.speculation.ahead() == []  # nothing was run yet
    made.run([0])
    for _ in range(steps):
        nodes = made.speculation.ahead()
        scores = made.growth.scores
        every = [n for n, row in enumerate(made.growth.rows) if row < 0]
        likely = [n for n in every if scores[n] >= math.log(AHEAD_LEAST)]
        likely = [n for n in likely if made.growth.depths[n] < 6]
        assert sorted(nodes) == sorted(sorted(likely, key=lambda n: -scores[n])[: len(nodes)])
        assert len(nodes) == min(len(likely), made.speculation._widths[-1])
        if nodes:
            made.run(nodes)


def test_before_anything_was_begun_nothing_is_run_ahead() -> None:
    assert Speculation(WIDTHS, *cheap(), Sharpening("int3")).ahead() == []


def sweeping(cost: float, arrival: float = 0.0) -> SweepPace:
    """Sweeps that each row makes longer by `cost`, but that take `arrival` at least."""
    sweeps = SweepPace()
    # The last ones are small, lest it is forgotten that weights are waited for.
    for rows in [*range(32, 0, -1), *[1] * 60]:
        computed = 1e-6 + cost * rows
        waited = max(0.0, arrival - computed)
        sweeps.see(SweepTimes(rows, computed, waited, computed))
    return sweeps


def drafted(seed: int, sweeps: SweepPace | None, limits: Limits = LIMITS) -> tuple[int, int]:
    """Nodes run and nodes sent in a first round; steps cost next to nothing."""
    made = Driven(made_rows(seed, VOCAB), priced({1: 1e-9}), sweeps=sweeps)
    made.begin(limits)
    made.draft()
    tokens, _ = made.speculation.tree()
    return len(made.growth.order), len(tokens) - 1


@settings(max_examples=20)
@given(SEEDS)
def test_the_more_a_row_costs_the_fewer_are_run_and_sent(seed: int) -> None:
    found = [drafted(seed, sweeping(cost)) for cost in (0.0, 0.1, 0.25, 2.0)]
    assert found[0] == drafted(seed, None)
    assert found == sorted(found, reverse=True)
    assert [sent for _, sent in found] == sorted((sent for _, sent in found), reverse=True)
    assert found[-1] == (0, 0)
    assert found[0][1] == LIMITS.nodes


def test_of_what_was_run_only_the_nodes_that_pay_are_sent() -> None:
    """The root's children have chances of about 1/2, 1/4, 1/8, of which nine in ten hit."""
    for cost, sent in ((0.5, 0), (0.3, 1), (0.15, 2), (0.08, 3)):
        made = Driven(halves, priced({1: 1e-9}), sweeps=sweeping(cost))
        made.begin(Limits(1, 12, 20))
        made.run([0])
        tokens, parents = made.speculation.tree()
        assert (tokens[1:], parents) == (tuple(range(sent)), (-1, *[0] * sent)), cost


def test_rows_are_free_until_their_weights_have_arrived() -> None:
    """As many as are computed by then are sent: 10 rows, one of them the root's."""
    made = Driven(halves, priced({1: 1e-9}), sweeps=sweeping(0.5, arrival=5.0))
    made.begin(Limits(6, 30, 31))
    for _ in range(4):
        made.run(made.growth.likeliest(8))
    assert len(made.speculation.tree()[0]) == 10


def test_a_step_whose_rows_cost_more_than_it_adds_is_not_made() -> None:
    for cost, steps in ((0.0, True), (0.89, True), (0.91, False)):  # of ten drafts nine hit
        made = Driven(made_rows(1, VOCAB), priced({1: 1e-9}), sweeps=sweeping(cost))
        made.begin()
        assert bool(made.speculation.next()) == steps, cost


@settings(max_examples=30)
@given(SEEDS, st.floats(0.0, 0.5), st.floats(0.0, 6.0), st.booleans())
def test_what_is_sent_of_a_tree_is_a_tree(
    seed: int, cost: float, arrival: float, holes: bool
) -> None:
    """Parents first, the best nodes of what was scored, and each with all that leads to it."""
    made = Driven(
        made_rows(seed, VOCAB, coarse=bool(seed % 2), holes=holes),
        cheap(),
        [*range(9), 10, *range(4)],
        sweeps=sweeping(cost, arrival),
    )
    made.begin()
    made.draft()
    made.speculation.rate.see(1.0, 1)
    tokens, parents = made.speculation.tree()
    assert parents[0] == -1 and tokens[0] == made.text[-1]
    assert all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
    assert len({*zip(parents, tokens, strict=True)}) == len(tokens) <= LIMITS.nodes + 1
    whole, sent = made.growth, [0]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        sent.append(whole._children[sent[parent]][token])
    left = [score for node, score in enumerate(whole.scores) if node not in sent]
    assert max(left, default=-math.inf) <= min(whole.scores[node] for node in sent)


def certain(text: Path) -> torch.Tensor:
    """The next number, with six chances in ten."""
    values = torch.full((96,), 0.4 / 95)
    values[(text[-1] + 1) % 96] = 0.6
    return values.log()


@pytest.mark.parametrize("ahead", [True, False])
def test_where_drafts_made_ahead_come_true_less_is_drafted_before_a_sweep(ahead: bool) -> None:
    made, cost, least = Driven(certain, priced({1: 0.1}), widths=(1,)), 0.1, []
    for _ in range(8):
        made.begin(Limits(30, 30, 60))
        chances = []
        while nodes := made.speculation.next():
            chances.append(math.exp(made.growth.scores[nodes[0]]))
            made.run(nodes)
        least.append(min(chances))
        tokens, _ = made.speculation.tree()
        while ahead and (nodes := made.speculation.ahead()):
            made.speculation.drafts_ahead = True
            made.run(nodes)
        made.text += [made.text[-1] + one + 1 for one in range(len(tokens))]
    assert min(least) > cost
    assert (min(least[1:]) > 1.25 * cost) == ahead
