"""`tree`: tokens a round by rule, for each format and temperature, at each draft budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.bench.pictures.style import (
    FAINT,
    LIMIT,
    OURS,
    PLAIN,
    THEIRS,
    add_caption,
    described,
    error_of,
    new_figure,
    title_of,
)

_COLORS = {"ours": OURS, "chain": PLAIN, "subspec": THEIRS, "ours_no_noise": FAINT}
_GROUP = 0.8
"""The width of the bars of one budget, together."""


def draw_tree(result: Mapping[str, Any]) -> Figure:
    """A row of axes a format, a column a temperature; all of the same height."""
    arms, budgets = result["arms"], list(result["budgets"])
    forms = list(arms)
    heats = list(dict.fromkeys(heat for of in arms.values() for heat in of))
    rules = list(
        dict.fromkeys(
            rule for of in arms.values() for one in of.values() for rule in one[budgets[0]]
        )
    )
    made, axes = new_figure(title_of(result, "tokens a round"), len(forms), len(heats))
    for place, one in enumerate(axes):
        form, heat = forms[place // len(heats)], heats[place % len(heats)]
        _draw_rules(one, arms[form].get(heat), budgets, rules)
        one.set_title(f"{form}, temperature {heat}", fontsize=10)
    most = max(one.get_ylim()[1] for one in axes)
    for one in axes:
        one.set_ylim(0, most)
    # The noise of a draft says nothing at temperature 0: not all axes have all rules.
    fullest = max(axes, key=lambda one: len(one.get_legend_handles_labels()[1]))
    fullest.legend(fontsize=8, loc="upper left")
    about = "bars: all rounds; lines: from the least to the most of single prompts"
    add_caption(made, [described(result), f"at most {result['nodes']} nodes sent; {about}"])
    return made


def _draw_rules(
    axes: Axes,
    of: Mapping[str, Mapping[str, Any]] | None,
    budgets: Sequence[str],
    rules: Sequence[str],
) -> None:
    width = _GROUP / len(rules)
    for number, rule in enumerate(rules):
        for place, budget in enumerate(budgets):
            arm = {} if of is None else of[budget].get(rule, {})
            tokens = arm.get("tokens_per_round")
            if tokens is None:
                continue
            low, high = error_of(arm, "tokens_per_round")
            axes.bar(
                place - _GROUP / 2 + (number + 0.5) * width,
                tokens,
                width * 0.92,
                color=_COLORS.get(rule, LIMIT),
                label=rule if not place else None,
                yerr=[[low], [high]],
                error_kw={"elinewidth": 0.8, "ecolor": "#333333", "capsize": 2},
                zorder=2,
            )
    axes.set_xticks(range(len(budgets)), [f"{budget} of a sweep" for budget in budgets])
    axes.set_xlabel("draft time a round")
    axes.set_ylabel("tokens a round")
    axes.set_xlim(-0.5, len(budgets) - 0.5)
    axes.margins(y=0.25)
