"""How fast a plan will be: seconds a sweep, a draft step, tokens a second.

A round of one session is some draft steps, then a sweep that streams while it computes. The ring
fills with the next sweep's first pieces while drafts are made, so those bytes cost no time; and
where a sweep waits for its weights, the next tree is drafted meanwhile, and often kept. With one
slot nothing arrives while a piece is computed, so that a sweep takes the sum of both. With n
sessions all ride in one sweep and are drafted for one after the other (one cohort). A tree is as
large as pays best within the plan's, as in the engine (stages/speculation.py).

Good enough to rank plans, and said to be so: what is assumed stands in the plan by name.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pipeline.candidates import LOOKUP
from pipeline.claims import Allowances, TreeSize, kv_row_bytes, padded
from pipeline.ladder import Rung
from pipeline.mixtures import Form, rate_of, yield_of
from stages.shapes import ModelShape

YIELD = {"int4": 1.7, "int8": 3.0, "nf4": 1.6, "int6": 2.6, "int3": 0.86, "int2": 0.32}
"""By substitute format: a tree of n nodes yields 1 + y * log2(1 + n / 2) tokens a round. Of five
answers of 96 tokens by SmolLM2-135M at temperature 0 behind a link so slow (0.1 GB/s) that all 64
nodes were sent: 9.5 with int4, 16.4 with int8, 8.9 with nf4, 14.2 with int6 (17.1 with 96 nodes),
5.3 with int3. With int2 2.5 of 19 nodes, in 12 answers within 140 MiB (`tools.bench budgets`)."""

NODES_A_STEP = 3.6
"""Nodes that a step of at most 4 runs on average."""

KEPT_AHEAD = 0.25
"""Share of rounds whose tree was drafted while the one before was verified, and kept."""

WHOLE = 0.25
"""Share of requests that need whole rows of logits: they sample, or want log-probabilities."""

SPREAD = 1.7
"""How much faster two threads or more compute a sweep than one does."""

LOOKUP_ACCEPTANCE = 0.23
"""The same for a level of what is looked up in the text alone (stages/copying.py). From 1.30 tokens
a round over 64-token greedy answers of SmolLM2-135M to tools/prompts.jsonl: 1.15 in summaries, 1.25
in chat, 1.54 for agents, 1.66 in extraction."""

LINK_BUSY = {0: 1.0, 1: 0.92, 2: 0.92, 3: 0.97, 4: 0.98}
"""Share of the link's bandwidth that a sweep reaches, by slots of the ring; with one slot, while
something is read. That was not measured, and is taken to be the same as with two."""

_PIECE_S = 1e-4  # handing a slot from thread to thread


class Compute(msgspec.Struct, frozen=True):
    """What the device computes. Defaults are those of two AVX2 cores; calibration replaces them.

    memory_gbps: GB/s at which a product of few rows reads full-precision weights; gflops: billion
    floating-point operations a second of a product of many rows; low_gbps: GB/s of substitute
    bytes by format, in a product of up to `flat_rows` rows (beyond, time grows with the rows);
    layer_s, draft_layer_s: seconds that a layer of a sweep or of a draft step takes besides its
    products; draft_s: those of a draft step besides its layers (choosing what to draft, the scores
    of what may follow, and the way from one thread to the other and back).
    """

    memory_gbps: float = 15.0
    gflops: float = 80.0
    low_gbps: dict[str, float] = msgspec.field(
        default_factory=lambda: {
            "int4": 5.5,
            "int8": 10.0,
            "nf4": 1.2,
            "int6": 6.0,
            "int3": 4.3,
            "int2": 3.3,
        }
    )
    flat_rows: int = 4
    layer_s: float = 3e-4
    draft_layer_s: float = 3e-4
    draft_s: float = 0.0
    measured: bool = False

    def draft_step_s(
        self, rows: int, form: Form, substitute_bytes: int, full_bytes: int, layers: int
    ) -> float:
        """Seconds to pass `rows` draft rows through all layers and the head."""
        low = substitute_bytes / (rate_of(form, self.low_gbps) * 1e9)
        full = full_bytes / (self.memory_gbps * 1e9)
        others = layers * self.draft_layer_s + self.draft_s
        return low * max(1.0, rows / self.flat_rows) + full + others


class Prediction(NamedTuple):
    """Of one plan. `sweep_s` is what a sweep takes beyond what was prefetched during drafts."""

    tokens_per_s: float
    tokens_per_round: float
    sweep_s: float
    draft_step_s: float


class Predictor:
    """Predictions for one model at one context and number of sessions."""

    def __init__(
        self,
        shape: ModelShape,
        allowances: Allowances,
        compute: Compute,
        link_gbps: float,
        context: int,
        sessions: int,
    ) -> None:
        self._compute, self._link, self._sessions = compute, link_gbps * 1e9, sessions
        self._allowances = allowances
        self._layers = len(shape.layers)
        self._elements = sum(m.elements for m in (*shape.matrices(), shape.head))
        self._read_s = self._elements * shape.compute_itemsize / (compute.memory_gbps * 1e9)
        # On average over an answer half of the context is written.
        self._kv_s = context * kv_row_bytes(shape) / 2 / (compute.memory_gbps * 1e9)
        self._others = (self._layers + 1) * compute.layer_s + sessions * self._kv_s
        sizes = {TreeSize(d, allowances.width).nodes for d in allowances.depths}
        self._nodes = sorted({0, 4, 8, 12, 24, *sizes})
        self._trees: dict[Form | None, list[_Tree]] = {}

    def _sizes(self, form: Form | None) -> list[_Tree]:
        """Trees to reckon with, the smallest first."""
        if form not in self._trees:
            sizes = (0,) if form is None else self._nodes
            self._trees[form] = [self._tree(form, nodes) for nodes in sizes]
        return self._trees[form]

    def _tree(self, form: Form | None, nodes: int) -> _Tree:
        rows = padded(self._sessions * (nodes + 1), self._allowances.row_multiple)
        products = max(2 * self._elements * rows / (self._compute.gflops * 1e9), self._read_s)
        tokens = 1.0 if form is None else 1.0 + yield_of(form, YIELD) * math.log2(1.0 + nodes / 2)
        # A step goes no deeper than one level.
        steps = self._sessions * max(nodes / NODES_A_STEP, tokens - 1.0)
        return _Tree(nodes, tokens, steps, products)

    def predict(
        self, rung: Rung, form: Form | None, tree: TreeSize, slots: int, logit_rows: int
    ) -> Prediction:
        """Of the plan that keeps `rung` resident, with substitutes in `form` (None: no drafts).

        Trees that are looked up (`form` LOOKUP) cost no time: most rounds have no more than what
        stands in a pack's padding, and more is sent only where it was seen to pay.

        Where there are fewer `logit_rows` than a tree has nodes, a share of the requests (WHOLE)
        is taken to need them, and to have smaller trees.
        """
        if form is None or form == LOOKUP:
            found, _ = self._quickest(rung, None, slots, 0, 0)
            if form is None:
                return found
            whole, least = _looked_up(tree.depth), _looked_up(min(tree.depth, logit_rows - 1))
            rate = found.tokens_per_s * ((1.0 - WHOLE) * whole + WHOLE * least)
            return found._replace(tokens_per_s=rate, tokens_per_round=whole)
        found, limited = self._quickest(rung, form, slots, tree.nodes, logit_rows - 1)
        rate = (1.0 - WHOLE) * found.tokens_per_s + WHOLE * limited
        return found._replace(tokens_per_s=rate)

    def _quickest(
        self, rung: Rung, form: Form | None, slots: int, nodes: int, fewer: int
    ) -> tuple[Prediction, float]:
        """The round that is quickest for its tokens, with a tree of at most `nodes` nodes; and the
        tokens a second of the one with at most `fewer`."""
        step = self._step_s(rung, form)
        link = self._link * LINK_BUSY[slots]
        converting = 2 * rung.converted_bytes / (self._compute.memory_gbps * 1e9)
        others = self._others + converting + rung.pieces * _PIECE_S
        arriving, filled = rung.streamed_bytes / link, slots * rung.slot_bytes / link
        kept = KEPT_AHEAD if self._allowances.ahead_rows else 0.0
        found, limited = Prediction(0.0, 1.0, 0.0, step), 0.0
        for size, tokens, steps, products in self._sizes(form):
            if size > nodes:
                break
            drafting = steps * step
            # With both cores, or with one beside a drafter that goes on meanwhile.
            for late, computing in (
                (drafting, products / SPREAD),
                (drafting * (1.0 - kept), products),
            ):
                sweep = _sweep_s(computing + others, arriving - min(late, filled), slots)
                rate = self._sessions * tokens / (late + sweep)
                if rate > found.tokens_per_s:
                    found = Prediction(rate, tokens, sweep, step)
            if size <= fewer:
                limited = found.tokens_per_s
        return found, limited

    def _step_s(self, rung: Rung, form: Form | None) -> float:
        if form is None:
            return 0.0
        width, layers = self._allowances.width, self._layers + 1
        low, full = rung.substitute_bytes, rung.drafting_bytes
        return self._kv_s + self._compute.draft_step_s(width, form, low, full, layers)


class _Tree(NamedTuple):
    """A tree of so many nodes: tokens a round, draft steps, seconds of products on one thread."""

    nodes: int
    tokens: float
    steps: float
    products: float


def _sweep_s(computing: float, arriving: float, slots: int) -> float:
    """Both at once; with one slot, one after the other."""
    return computing + max(0.0, arriving) if slots == 1 else max(computing, arriving)


def _looked_up(levels: int) -> float:
    """Tokens of a round, when each of `levels` levels holds the target's with this chance."""
    return (1.0 - LOOKUP_ACCEPTANCE ** (levels + 1)) / (1.0 - LOOKUP_ACCEPTANCE)
