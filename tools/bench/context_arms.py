"""The arms of `context`: rounds summed over prompts of one length, and their figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.bench.figures import figure, median_of, ratio
from tools.bench.replay import Drafts, Recorded, Replayed, Terms, add, replay
from tools.bench.tree_rules import Rule
from tools.bench.tree_summary import rule_object

COMPARED = ("tokens_per_round", "tokens_per_s", "kv_bytes")


class Arm:
    """One way to keep keys and values at one length. `kv_bytes`: what these take."""

    def __init__(self, rule: Rule, terms: Terms, kv_bytes: int) -> None:
        self._rule, self._terms, self._kv_bytes = rule, terms, kv_bytes
        self._of: dict[str, Replayed] = {}
        self._rows_s: list[float] = []

    def replay(
        self, drafts: Drafts, recorded: Recorded, rows_s: float, *, warm_up: bool = False
    ) -> None:
        """One prompt, whose rows took `rows_s` seconds beside the target's.

        `warm_up`: once before without counting, for the rule to learn its pace.
        """
        if warm_up:
            replay(self._rule, drafts, recorded, self._terms)
        self._of[recorded.id] = replay(self._rule, drafts, recorded, self._terms)
        self._rows_s.append(rows_s)

    def object(self) -> dict[str, Any]:
        """Its figures: as a rule's of `tree`, and the mean of a draft step, as they were counted.

        No budget is among them: only the rule's own pace ends a round's drafting.
        """
        total = Replayed()
        for one in self._of.values():
            total = add(total, one)
        made = rule_object(total, self._of, self._terms, self._rule.temperature)
        del made["budget_s"]
        spread = made["spread"].get("tokens_per_round")
        if spread is not None:
            made["spread"]["tau"] = [tokens - 1 for tokens in spread]
        return made | {
            "draft_step_s": ratio(total.draft_s, total.steps),
            "kv_bytes": self._kv_bytes,
            "rows_s": median_of(figure(self._rows_s)),
        }


def shared_over_own(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Ratios between the figures of a length's arms."""
    return {key: ratio(arms["shared"][key], arms["own"][key]) for key in COMPARED}
