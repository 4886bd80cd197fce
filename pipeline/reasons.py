"""Why a plan is what it is, in words: what was compared, what did not fit, what was assumed."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.candidates import (
    LOOKUP,
    PLAIN,
    RESIDENT,
    RESIDENT_LOOKUP,
    Candidate,
    smallest,
)
from pipeline.claims import MIB
from pipeline.mixtures import Mixture, base_of, yield_of
from pipeline.predictions import LINK_BUSY, LOOKUP_ACCEPTANCE, WHOLE, YIELD, Compute, Prediction
from stages.formats import BITS, FORMATS


class Scored(NamedTuple):
    """A candidate and how fast it is predicted to be."""

    candidate: Candidate
    prediction: Prediction


def reasons(
    chosen: Scored, best: dict[str, Scored], substitute: str, budget: int
) -> tuple[str, ...]:
    """Why `chosen` and not the others; `best` holds the best of each family that fits."""
    family, form = chosen.candidate.family, chosen.candidate.substitute
    rates = {name: scored.prediction.tokens_per_s for name, scored in best.items()}
    if family in (RESIDENT, RESIDENT_LOOKUP):
        told = ["all weights fit in full precision"]
    elif form is not None:
        told = [f"{form} substitutes: {_rate(rates[family])} predicted"]
        if chosen.candidate.ladder is None:
            told.append("all weights fit in full precision")
        elif RESIDENT in rates:
            told.append("all weights would fit, but drafting is predicted to be faster")
        if rates[family] < max(rates.get(PLAIN, 0.0), rates.get(LOOKUP, 0.0)):
            told.append("drafting is predicted to lose, and was asked for")
        if substitute == "auto" and BITS[base_of(form)] < BITS["int4"] and "int4" not in rates:
            told.append("fewer bits, since int4 does not fit")
    elif substitute == "none":
        told = ["no substitutes were asked for"]
    elif drafted := [name for name in rates if name in FORMATS]:
        fastest = max(drafted, key=lambda name: rates[name])
        lost = f"{_rate(rates[fastest])} predicted with {fastest}, {_rate(rates[family])} without"
        told = [f"drafting with substitutes is off, since it would lose: {lost}"]
    else:
        told = []
    if family in (LOOKUP, RESIDENT_LOOKUP):
        told.append(f"drafts are looked up in the text: {_rate(rates[family])} predicted")
    elif substitute == LOOKUP and LOOKUP not in rates and RESIDENT not in rates:
        told.append(_short(chosen.candidate, LOOKUP, "trees that are looked up", budget))
    named = FORMATS if substitute == "auto" else (substitute,)
    for name in named:
        if name in FORMATS and name not in rates:
            told.append(_short(chosen.candidate, name, f"{name} substitutes", budget))
    others = [f"{name} {_rate(rate)}" for name, rate in rates.items() if name != family]
    return tuple(told + ([f"against {', '.join(others)}"] if others else []))


def _short(candidate: Candidate, form: str, what: str, budget: int) -> str:
    short = smallest(candidate.job, (form,)) - budget
    return f"{what} do not fit: {short / MIB:.1f} MiB too little"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.3g} tokens/s"


def assumptions(candidate: Candidate, compute: Compute, link_gbps: float) -> tuple[str, ...]:
    """What the candidate's prediction takes for granted."""
    found: list[str] = []
    if candidate.form == LOOKUP:
        found.append(
            f"{LOOKUP_ACCEPTANCE:.3g} of the levels of what is looked up are accepted, as on "
            "SmolLM2-135M: text that repeats itself goes faster"
        )
    elif candidate.form is not None:
        form = candidate.form
        found.append(
            f"a tree of n nodes drafted in {form} yields 1 + {yield_of(form, YIELD):.3g} "
            "log2(1 + n / 2) tokens, as on SmolLM2-135M"
        )
        if isinstance(form, Mixture):
            found.append(
                f"that is {form.way:.0%} of the way from {form.base} to {form.finer}: the most "
                f"sensitive {len(form.raised)} of {form.layers} layers have that, or stay whole"
            )
    if candidate.logit_rows < candidate.tree.nodes + 1:
        found.append(
            f"{WHOLE:.0%} of the requests sample or want log-probabilities: their trees have at "
            f"most {candidate.logit_rows - 1} nodes of {candidate.tree.nodes}"
        )
    if candidate.slots:
        busy = LINK_BUSY[candidate.slots]
        found.append(f"sweeps reach {busy:.0%} of the link's {link_gbps:.3g} GB/s")
    if candidate.slots == 1:
        found.append("nothing arrives while a sweep computes")
    if not compute.measured:
        found.append("compute rates of two AVX2 cores, not measured here")
    found.append("half of the context is in use")
    return tuple(found)
