"""Figures of tree rules, and the ratios between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.bench.figures import ratio
from tools.bench.replay import Replayed, Terms

Arms = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""Format -> temperature -> budget -> rule -> figures."""


def rule_object(
    total: Replayed, of: Mapping[str, Replayed], terms: Terms, sharpening: float
) -> dict[str, Any]:
    """The figures of one arm; `of` has its prompts. `draft_s` and `nodes` are a round's means."""
    rounds = total.rounds
    tokens, draft_s = ratio(total.tokens, rounds), ratio(total.draft_s, rounds)
    each = {name: ratio(one.tokens, one.rounds) for name, one in of.items()}
    known = [value for value in each.values() if value is not None]
    return {
        "tau": None if tokens is None else tokens - 1,
        "nodes": ratio(total.nodes, rounds),
        "draft_s": draft_s,
        "tokens_per_s": ratio(tokens, None if draft_s is None else draft_s + terms.sweep_s),
        "tokens_per_round": tokens,
        "rounds": rounds,
        "steps": ratio(total.steps, rounds),
        "nodes_run": ratio(total.run, rounds),
        "budget_s": terms.budget_s,
        "sweep_s": terms.sweep_s,
        "sharpening": sharpening,
        "prompts": each,
        "spread": {"tokens_per_round": [min(known), max(known)]} if known else {},
    }


def summarize(arms: Arms) -> dict[str, Any]:
    """For each format, ratios of tokens a round.

    `ours_over_chain`, `ours_over_subspec` and `noise_gain` (ours over ours_no_noise) by temperature
    and budget; `sampled_over_greedy` (ours over ours at temperature 0) by temperature and budget;
    null where an arm has no figure.
    """
    return {
        form: {
            "ours_over_chain": _over(heats, "chain"),
            "ours_over_subspec": _over(heats, "subspec"),
            "noise_gain": _over(heats, "ours_no_noise"),
            "sampled_over_greedy": _sampled(heats),
        }
        for form, heats in arms.items()
    }


def _over(heats: Mapping[str, Any], other: str) -> dict[str, dict[str, float | None]]:
    return {
        heat: {
            budget: ratio(rules["ours"]["tokens_per_round"], rules[other]["tokens_per_round"])
            for budget, rules in budgets.items()
        }
        for heat, budgets in heats.items()
        if all(other in rules for rules in budgets.values())
    }


def _sampled(heats: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    greedy = heats.get("0")
    if greedy is None:
        return {}
    return {
        heat: {
            budget: ratio(
                rules["ours"]["tokens_per_round"], greedy[budget]["ours"]["tokens_per_round"]
            )
            for budget, rules in budgets.items()
        }
        for heat, budgets in heats.items()
        if heat != "0"
    }
