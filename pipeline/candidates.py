"""The family of plans that the planner chooses from, each with what it charges.

A candidate is a format (or none), the size of a tree, a number of slots and a rung of a residency
ladder. The family depends on the model and on what is asked for, never on the budget; whole rows of
logits are added to each as far as the budget goes, up to those of the largest tree.

There are some hundred thousand, so that they are handled in spans, each with an ideal that none of
its candidates is faster or smaller than: most need no look of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeline.claims import (
    Allowances,
    Claim,
    TreeSize,
    draft_rows,
    logit_row_bytes,
    pack_rows,
    work_claims,
)
from pipeline.ladder import Ladder, Rung
from pipeline.mixtures import Form, Mixture, base_of, low_bit
from pipeline.residency import caps, climb, resident_bytes, with_substitutes
from stages.placement import Placement
from stages.shapes import ModelShape

RESIDENT, LOOKUP, PLAIN = "resident", "lookup", "plain"
RESIDENT_LOOKUP, MIXED = "resident with lookup", "mixed"
_HELD = {PLAIN: RESIDENT, LOOKUP: RESIDENT_LOOKUP}
"""What it is called when all weights are held."""


class Job:
    """What is asked for, the model in canonical order; and its ladders, climbed once each."""

    def __init__(
        self, shape: ModelShape, context: int, sessions: int, allowances: Allowances
    ) -> None:
        self.shape, self.allowances = shape, allowances
        self.context, self.sessions = context, sessions
        self._ladders: dict[Form | None, tuple[Ladder, ...]] = {}

    def smaller(self, context: int, sessions: int) -> Job:
        """The same model for another context and number of sessions."""
        other = Job(self.shape, context, sessions, self.allowances)
        other._ladders = self._ladders  # they depend on neither
        return other

    def ladders(self, form: Form | None) -> tuple[Ladder, ...]:
        """Every ladder of one format."""
        form = _substitute(form)
        if form not in self._ladders:
            self._ladders[form] = tuple(self._climbed(form))
        return self._ladders[form]

    def _climbed(self, form: Form | None) -> Iterator[Ladder]:
        sizes = _low_bit(self.shape, form)
        heads = [(cap, head) for cap in caps(self.shape) for head in (False, True)]
        for place, (cap, head) in enumerate(heads):
            yield climb(self.shape, cap, head_resident=head, substitute=sizes)
            if form is not None:
                yield with_substitutes(self.ladders(None)[place], sum(sizes.values()))

    def trees(self, form: Form | None) -> tuple[TreeSize, ...]:
        """Trees to try with a format, the smallest first; without one nothing is drafted."""
        if form is None:
            return (TreeSize(),)
        if form == LOOKUP:
            return (TreeSize(self.allowances.lookup_depth, 1),)
        width = self.allowances.width
        return tuple(TreeSize(depth, width, True) for depth in sorted(self.allowances.depths))

    def work(self, tree: TreeSize, head_rows: int, logit_rows: int = 1) -> tuple[Claim, ...]:
        """The claims that do not depend on which weights are resident."""
        return work_claims(
            self.shape,
            self.allowances,
            context=self.context,
            sessions=self.sessions,
            tree=tree,
            head_rows=head_rows,
            logit_rows=logit_rows,
        )


class Candidate(NamedTuple):
    """One plan that could be. `form` is a format, a mixture of two, LOOKUP (no substitutes, but
    drafts) or None (no drafts); `nbytes` is the sum of its claims."""

    job: Job
    form: Form | None
    tree: TreeSize
    slots: int
    ladder: Ladder | None  # None: all weights resident
    step: int  # which rung of the ladder
    rung: Rung
    logit_rows: int
    nbytes: int

    @property
    def family(self) -> str:
        """The format, MIXED, or what is done without one."""
        if isinstance(self.form, Mixture):
            return MIXED
        name = self.form or PLAIN
        return name if self.ladder is not None else _HELD.get(name, name)

    @property
    def substitute(self) -> Form | None:
        """What its substitutes are in, if it has any."""
        return _substitute(self.form)


def _substitute(form: Form | None) -> Form | None:
    return None if form == LOOKUP else form


def _low_bit(shape: ModelShape, form: Form | None) -> dict[str, int]:
    """Bytes of each matrix's substitute, by name."""
    if form is None:
        return {matrix.name: 0 for matrix in (*shape.matrices(), shape.head)}
    return low_bit(shape, form)


def _total(claims: tuple[Claim, ...]) -> int:
    return sum(claim.nbytes for claim in claims)


def held(job: Job, form: Form | None, budget: int) -> Iterator[Candidate]:
    """Every candidate of one format that keeps every weight, without a ring, and fits the budget.

    What is drafted is drafted with substitutes all the same: they are quicker.
    """
    rung = _whole(job, form)
    for tree in job.trees(form):
        nbytes = _total(job.work(tree, job.shape.vocab)) + rung.fixed_bytes
        if nbytes <= budget:
            logit_rows, nbytes = _with_logit_rows(job, tree, nbytes, budget)
            yield Candidate(job, form, tree, 0, None, 0, rung, logit_rows, nbytes)


def _with_logit_rows(job: Job, tree: TreeSize, nbytes: int, budget: int) -> tuple[int, int]:
    """Whole rows of logits as far as the budget goes, and the bytes of a candidate with them."""
    row = logit_row_bytes(job.shape, job.sessions)
    more = min(tree.nodes, (budget - nbytes) // row)
    return 1 + more, nbytes + more * row


def _whole(job: Job, form: Form | None) -> Rung:
    matrices = [*job.shape.matrices(), job.shape.head]
    resident = sum(resident_bytes(m, job.shape.compute_itemsize) for m in matrices)
    low = sum(_low_bit(job.shape, _substitute(form)).values())
    return Rung(resident, 0, low, 0, 0, 0, 0, 0)


class Span(NamedTuple):
    """Candidates of one format and a number of slots: rungs `first` to `last` of a ladder, with
    each of `trees`, the smallest first; `works` are their claims besides weights and ring.

    `place` is that of the first of them in the order in which equal candidates win.
    """

    job: Job
    form: Form | None
    ladder: Ladder
    slots: int
    trees: tuple[TreeSize, ...]
    works: tuple[int, ...]
    first: int
    last: int
    place: tuple[int, int, int, int]  # ladder, rung, slots, tree

    @property
    def single(self) -> bool:
        """Whether it is one candidate."""
        return self.first == self.last and len(self.trees) == 1

    def ideal(self, budget: int) -> Candidate | None:
        """What none of them is faster or smaller than; of a single one, itself. None: none fits.

        By construction: the smallest claims, and with them the most rows of logits; the largest
        tree, since smaller ones may be sent; and the ladder's ideal rung.
        """
        nbytes = self.works[0] + self.ladder.least_bytes(self.first, self.last, self.slots)
        if nbytes > budget:
            return None
        rung, tree = self.ladder.ideal(self.first, self.last), self.trees[-1]
        logit_rows, nbytes = _with_logit_rows(self.job, tree, nbytes, budget)
        return Candidate(
            self.job, self.form, tree, self.slots, self.ladder, self.first, rung, logit_rows, nbytes
        )

    def split(self) -> Iterator[Span]:
        """Its candidates in smaller spans, none left out. A single one has no parts."""
        ladder, rung, slots, _ = self.place
        if self.first < self.last:
            middle = (self.first + self.last) // 2
            yield self._replace(last=middle)
            rung += middle + 1 - self.first
            yield self._replace(first=middle + 1, place=(ladder, rung, slots, 0))
        elif not self.single:
            for tree, (size, work) in enumerate(zip(self.trees, self.works, strict=True)):
                place = (ladder, rung, slots, tree)
                yield self._replace(trees=(size,), works=(work,), place=place)


def streaming(job: Job, form: Form | None) -> Iterator[Span]:
    """Every candidate of one format that streams something, whether it fits or not."""
    trees, ladders = job.trees(form), job.ladders(form)
    totals = {
        rows: tuple(_total(job.work(tree, rows)) for tree in trees)
        for rows in {ladder.head_rows for ladder in ladders}
    }
    for place, ladder in enumerate(ladders):
        works = totals[ladder.head_rows]
        for slot, slots in enumerate(job.allowances.slots):
            last, at = len(ladder.rungs) - 1, (place, 0, slot, 0)
            yield Span(job, form, ladder, slots, trees, works, 0, last, at)


def smallest(job: Job, forms: tuple[str | None, ...]) -> int:
    """Bytes of the smallest candidate of these formats, or of the one that holds all.

    Small trees, the fewest slots and one row of logits will do here: more only adds.
    """
    whole = _whole(job, None).fixed_bytes + _total(job.work(TreeSize(), job.shape.vocab))
    found, slots = whole, min(job.allowances.slots)
    for form in forms:
        for ladder in job.ladders(form):
            weights = min(rung.fixed_bytes + slots * rung.slot_bytes for rung in ladder.rungs)
            found = min(found, weights + _total(job.work(job.trees(form)[0], ladder.head_rows)))
    return found


def claims(candidate: Candidate) -> tuple[Claim, ...]:
    """What the candidate charges, in order; nothing that costs nothing."""
    job, _, tree, slots, ladder, _, rung, logit_rows, _ = candidate
    head_rows = ladder.head_rows if ladder is not None else job.shape.vocab
    streams_head = ladder is not None and not ladder.head_resident
    head = _low_bit(job.shape, candidate.substitute)[job.shape.head.name] if streams_head else 0
    charged = (
        *job.work(tree, head_rows, logit_rows),
        Claim("ring", slots * rung.slot_bytes),
        Claim("decode buffer", rung.decode_bytes),
        Claim("substitutes", rung.substitute_bytes - head),
        Claim("low-bit head", head),
        Claim("resident weights", rung.resident_bytes),
    )
    return tuple(claim for claim in charged if claim.nbytes)


def placement(candidate: Candidate) -> Placement:
    """What the stages are told of the candidate."""
    job, _, tree, slots, ladder, step, rung, logit_rows, _ = candidate
    every = [m.name for layer in job.shape.layers for m in layer.matrices] + [job.shape.head.name]
    kept = set(every) if ladder is None else ladder.resident(step)
    form = candidate.substitute
    low = form is not None and (ladder is None or ladder.low) and bool(kept)
    # Where only streamed matrices have substitutes, a layer that stays has none to be raised.
    drafted = {m.layer for m in job.shape.matrices() if low or m.name not in kept}
    mixed = form if isinstance(form, Mixture) else None
    return Placement(
        resident=tuple(name for name in every if name in kept),
        substitute=None if form is None else base_of(form),
        slots=slots,
        slot_bytes=rung.slot_bytes,
        head_rows=job.shape.vocab if ladder is None else ladder.head_rows,
        context=job.context,
        sessions=job.sessions,
        tree_budget=tree.nodes,
        prefill_rows=pack_rows(job.context, job.allowances),
        logit_rows=logit_rows,
        low_resident=low,
        draft_rows=draft_rows(tree, job.allowances),
        finer=mixed.finer if mixed else None,
        raised=tuple(layer for layer in mixed.raised if layer in drafted) if mixed else (),
    )
