"""The planner: a pure function from sizes, rates and a budget to what lives where.

Claims are made in the design's order: small tensors, embedding rows, KV, logits, activations, the
ring; then substitutes; what is left goes to resident weights. What that leaves open (the format,
how deep to draft, slots, piece sizes, how much to keep resident) is settled by predicted tokens a
second over one fixed family of candidates, of which a budget only admits some. So more memory can
never predict a slower plan, and the smallest budget is the smallest candidate.

Candidates without substitutes (drafts that are looked up in the text alone; plain streaming, one
token a sweep) and those that hold all compete like the others: speculation that would lose is
switched off that way. So do substitutes in two formats, where it is known which layers' errors hurt
most (mixtures.py): memory goes on more bits or on residency, whichever is predicted to be faster.
Every candidate takes whole rows of logits (for requests that sample) as far as the budget goes;
fewer than a tree has nodes lower its prediction, so that resident weights make room for them first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import msgspec

from pipeline.candidates import (
    LOOKUP,
    MIXED,
    PLAIN,
    RESIDENT,
    RESIDENT_LOOKUP,
    Candidate,
    Job,
    Span,
    claims,
    held,
    placement,
    smallest,
    streaming,
)
from pipeline.claims import Allowances, Claim, context_token_bytes
from pipeline.mixtures import mixtures
from pipeline.predictions import Compute, Predictor
from pipeline.reasons import Scored, assumptions, reasons
from pipeline.residency import canonical
from routing.errors import BudgetError, OptionError
from stages.formats import FORMATS
from stages.placement import Placement
from stages.shapes import ModelShape

_ROUNDING = 1.0 + 1e-12
"""More than what rounding takes from the prediction of an ideal."""


class Plan(msgspec.Struct, frozen=True):
    """What lives where and what is expected of it. Bytes and seconds.

    `placement` is for the stages; `claims` sum to at most `budget`. `step` says how far the plan
    had to fall back: "resident" (all weights held), "substitutes" (streaming, with drafts made by
    them), "lookup" (streaming, with drafts looked up in the text), "plain" (streaming, no drafts),
    and `reasons` why. `resident_bytes` are held in the compute dtype, in
    whole pages, `substituted_bytes` in low-bit copies. A tree has `width` nodes a level and
    `depth` levels (0: no drafts). `sweep_s` leaves out what arrives during drafts.
    `plain_tokens_per_s` predicts the best plan without drafts in the same budget (None: none
    fits). `assumptions` names every figure that was not measured.
    """

    placement: Placement
    claims: tuple[Claim, ...]
    step: str
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...]
    budget: int
    resident_bytes: int
    substituted_bytes: int
    streamed_bytes_per_sweep: int
    width: int
    depth: int
    embedding_rows: int
    sweep_s: float
    draft_step_s: float
    tokens_per_round: float
    tokens_per_s: float
    plain_tokens_per_s: float | None

    @property
    def claimed(self) -> int:
        """Bytes that the claims sum to."""
        return sum(claim.nbytes for claim in self.claims)


def plan(
    shape: ModelShape,
    budget: int,
    link_gbps: float,
    compute: Compute | None = None,
    *,
    context: int,
    sessions: int = 1,
    substitute: str = "auto",
    allow_plain: bool = True,
    allowances: Allowances | None = None,
    sensitivity: Sequence[float] | None = None,
) -> Plan:
    """The plan with most predicted tokens a second whose claims fit `budget` bytes.

    `link_gbps` is the bandwidth of the tier below in GB/s. `substitute` is "auto", a format of
    FORMATS or "lookup" (then what comes after it is only what is left when it does not fit), or
    "none". Without `allow_plain` what was not asked for is chosen only where all weights are held,
    and "auto" asks for substitutes. `sensitivity`: what substitutes of each layer cost, in any
    unit; with "auto" these may then be in two formats. Raises BudgetError with the smallest budget
    that works, and OptionError for values out of range.
    """
    compute, allowances = compute or Compute(), allowances or Allowances()
    _check(shape, budget, link_gbps, context, sessions, substitute)
    job = Job(canonical(shape), context, sessions, allowances)
    forms = _forms(substitute, allow_plain)
    predictor = Predictor(job.shape, allowances, compute, link_gbps, context, sessions)
    best = _best(job, (*forms, None), budget, predictor)
    allowed = {name: best[name] for name in _families(substitute, forms, best)}
    if not allowed:
        raise BudgetError(budget, smallest(job, forms), _knob(job, forms, budget))
    chosen = max(allowed.values(), key=_rate)
    if substitute == "auto" and sensitivity is not None:
        mixed = _mixed(job, sensitivity, budget, predictor, chosen)
        if mixed is not chosen:
            chosen = best[MIXED] = mixed
    told = reasons(chosen, best, substitute, budget)
    undrafted = [best[name].prediction for name in (PLAIN, RESIDENT) if name in best]
    plain = max((one.tokens_per_s for one in undrafted), default=None)
    assumed = assumptions(chosen.candidate, compute, link_gbps)
    return _made(chosen, budget, told, assumed, plain)


def smallest_budget(
    shape: ModelShape,
    *,
    context: int,
    sessions: int = 1,
    substitute: str = "auto",
    allow_plain: bool = True,
    allowances: Allowances | None = None,
) -> int:
    """The smallest budget, in bytes, that `plan` accepts with these arguments."""
    job = Job(canonical(shape), context, sessions, allowances or Allowances())
    return smallest(job, _forms(substitute, allow_plain))


def _check(
    shape: ModelShape, budget: int, link: float, context: int, sessions: int, substitute: str
) -> None:
    if budget < 1:
        raise OptionError("--memory", budget, "a size above zero")
    if not 1 <= context <= shape.max_positions:
        raise OptionError("--ctx-size", context, f"1 to {shape.max_positions}, the model's longest")
    if sessions < 1:
        raise OptionError("--sessions", sessions, "at least 1")
    if not (math.isfinite(link) and link > 0):
        raise OptionError("--link-gbps", link, "a bandwidth above zero, in GB/s")
    if substitute not in (known := ("auto", *FORMATS, LOOKUP, "none")):
        raise OptionError("--substitute", substitute, ", ".join(known))


def _forms(substitute: str, allow_plain: bool) -> tuple[str | None, ...]:
    """Formats whose plans may be chosen, LOOKUP among them; None stands for plain streaming."""
    if substitute == "none":
        return (None,)
    named = FORMATS if substitute == "auto" else (substitute,)
    return tuple(dict.fromkeys((*named, LOOKUP, None))) if allow_plain else named


def _families(substitute: str, forms: tuple[str | None, ...], best: dict[str, Scored]) -> list[str]:
    """Which of the families that fit may win."""
    named = [form or PLAIN for form in forms if (form or PLAIN) in best]
    if substitute in (*FORMATS, LOOKUP) and substitute in named:
        named = [substitute]
    return [*(name for name in (RESIDENT, RESIDENT_LOOKUP) if name in best), *named]


def _best(
    job: Job, forms: tuple[str | None, ...], budget: int, predictor: Predictor
) -> dict[str, Scored]:
    """The best candidate that fits of each family; families without one are left out."""
    found: dict[str, Scored] = {}
    for form in dict.fromkeys(forms):
        # Holding everything is not always the faster: the drafts of the two differ.
        whole = [_scored(candidate, predictor) for candidate in held(job, form, budget)]
        if whole:
            found[whole[0].candidate.family] = max(whole, key=_rate)
        family = form or PLAIN
        rival = _rate(found[family]) if family in found else 0.0
        streamed = _fastest(streaming(job, form), budget, predictor, rival)
        if streamed is not None:
            found[family] = streamed
    return found


def _mixed(
    job: Job, sensitivity: Sequence[float], budget: int, predictor: Predictor, rival: Scored
) -> Scored:
    """The best candidate that fits of all mixtures, or `rival` where that is as fast."""
    for mixture in mixtures(job.shape, sensitivity):
        whole = (_scored(candidate, predictor) for candidate in held(job, mixture, budget))
        rival = max((rival, *whole), key=_rate)
        streamed = _fastest(streaming(job, mixture), budget, predictor, _rate(rival))
        rival = streamed or rival
    return rival


def _fastest(
    spans: Iterable[Span], budget: int, predictor: Predictor, rival: float
) -> Scored | None:
    """The first of the fastest candidates that fit, if it is faster than `rival`: what scoring
    each of them would find.

    Best first (Hart, Nilsson and Raphael's A*): the span whose ideal is the fastest is split, until
    that is a single candidate. All others are in spans with slower ideals, or come after it.
    """
    heap: list[tuple[float, tuple[int, ...], Span, Scored]] = []

    def push(span: Span) -> None:
        ideal = span.ideal(budget)
        if ideal is not None:
            scored = _scored(ideal, predictor)
            bound = _rate(scored) * (1.0 if span.single else _ROUNDING)
            if bound > rival:
                heappush(heap, (-bound, span.place, span, scored))

    for span in spans:
        push(span)
    while heap:
        _, _, span, scored = heappop(heap)
        if span.single:
            return scored
        for part in span.split():
            push(part)
    return None


def _scored(candidate: Candidate, predictor: Predictor) -> Scored:
    _, form, tree, slots, _, _, rung, logit_rows, _ = candidate
    return Scored(candidate, predictor.predict(rung, form, tree, slots, logit_rows))


def _rate(scored: Scored) -> float:
    return scored.prediction.tokens_per_s


def _knob(job: Job, forms: tuple[str | None, ...], budget: int) -> str:
    """What to turn, with a value that fits `budget` where there is one."""

    def lacking(context: int, sessions: int) -> int:
        return smallest(job.smaller(context, sessions), forms) - budget

    over = lacking(job.context, job.sessions)
    token = context_token_bytes(job.shape, job.sessions)
    context = job.context - -(-over // token)
    if context * 2 >= job.context or (context >= 16 and job.sessions == 1):
        return f"--ctx-size to {context}"
    for sessions in range(job.sessions - 1, 0, -1):
        if lacking(job.context, sessions) <= 0:
            return f"--sessions to {sessions}"
    if context >= 16:
        return f"--ctx-size to {context}"
    if None not in forms and smallest(job, (None,)) <= budget:
        return "--substitute to none"
    return "--memory, or choose a smaller model"


def _made(
    chosen: Scored,
    budget: int,
    told: tuple[str, ...],
    assumed: tuple[str, ...],
    plain: float | None,
) -> Plan:
    candidate, prediction = chosen
    job, rung = candidate.job, candidate.rung
    made = Plan(
        placement=placement(candidate),
        claims=claims(candidate),
        step=_step(candidate),
        reasons=told,
        assumptions=assumed,
        budget=budget,
        resident_bytes=rung.resident_bytes,
        substituted_bytes=rung.substitute_bytes,
        streamed_bytes_per_sweep=rung.streamed_bytes,
        width=candidate.tree.width,
        depth=candidate.tree.depth,
        embedding_rows=min(job.shape.vocab, job.allowances.embedding_rows),
        sweep_s=prediction.sweep_s,
        draft_step_s=prediction.draft_step_s,
        tokens_per_round=prediction.tokens_per_round,
        tokens_per_s=prediction.tokens_per_s,
        plain_tokens_per_s=plain,
    )
    assert made.claimed == candidate.nbytes <= budget, (made.claims, candidate.nbytes, budget)
    return made


def _step(candidate: Candidate) -> str:
    if candidate.ladder is None:
        return RESIDENT
    return "substitutes" if candidate.substitute else candidate.family
