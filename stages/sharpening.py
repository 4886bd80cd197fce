"""The temperature of draft scores, fitted to what was accepted.

A draft's scores s become log-probabilities log_softmax(s / t). SubSpec sharpens with a fixed
t = 0.2. Here t follows the maximum of the likelihood of what the target chose: with H the entropy
of a node's children and p the probability of the chosen one, d log p / d log(1/t) = log p + H, and
for a choice that is not among the children the same for the chance 1 - P of missing them all. Each
choice moves log(1/t) a small step along its gradient.

A likeliest child's log-probability is besides that bent into what such children were seen to be
worth: its log-odds are shifted and stretched, both fitted in the same way (Platt scaling).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

START = {"int2": 0.85, "int3": 0.6, "int4": 0.35, "nf4": 0.38, "int6": 0.18, "int8": 0.14}
"""Where a fit begins, by the substitutes' format: near the maximum over answers of SmolLM2-135M
(0.3 for int4 where all of the text is the target's, 0.4 deep in trees). To begin elsewhere costs as
many tokens, until the fit gets there, as any rule of growing trees wins."""
LEAST, MOST = 0.1, 1.2
STEP, MEMORY, FLOOR = 0.05, 0.99, 0.5
"""A step is STEP times the gradient over the root of what squared gradients come to (as in AdaGrad,
Duchi et al. 2011, but forgetting): the choices of a drafter that is nearly always right have small
ones, and it would take thousands of them to believe it."""
STEEPEST = 8.0

BEND_STEP = 0.1
CERTAIN = 9.0
"""Log-odds beyond which there is no telling."""


def _log_odds(log_prob: float) -> float:
    if log_prob >= -1e-9:
        return CERTAIN
    return max(-CERTAIN, min(CERTAIN, log_prob - math.log(-math.expm1(log_prob))))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


class Sharpening:
    """A running fit. `temperature` divides the scores."""

    def __init__(self, form: str) -> None:
        """`form`: see START."""
        self._log = math.log(START[form])
        self._power = FLOOR
        self._shift, self._slope = 0.0, 1.0
        self._shift_power = self._slope_power = 0.0

    @property
    def temperature(self) -> float:
        return math.exp(self._log)

    def bend(self, log_prob: float) -> float:
        """What a likeliest child that is given `log_prob` was seen to be worth: below 0."""
        return -_softplus(-(self._shift + self._slope * _log_odds(log_prob)))

    def likeliest(self, log_prob: float, chosen: bool) -> None:
        """The likeliest child had `log_prob`; the target chose it or another."""
        odds = _log_odds(log_prob)
        off = float(chosen) - math.exp(self.bend(log_prob))
        for_shift, for_slope = off, off * odds
        self._shift_power = MEMORY * self._shift_power + for_shift * for_shift
        self._slope_power = MEMORY * self._slope_power + for_slope * for_slope
        shift = self._shift + BEND_STEP / math.sqrt(FLOOR + self._shift_power) * for_shift
        slope = self._slope + BEND_STEP / math.sqrt(FLOOR + self._slope_power) * for_slope
        self._shift, self._slope = max(-2.0, min(2.0, shift)), max(0.5, min(4.0, slope))

    def hit(self, log_prob: float, entropy: float) -> None:
        """The target chose a child that had `log_prob`."""
        self._move(log_prob + entropy)

    def miss(self, log_probs: Iterable[float], entropy: float) -> None:
        """The target chose none of the children, which had `log_probs`."""
        children = [(math.exp(value), value) for value in log_probs if value > -math.inf]
        left = max(1e-3, 1.0 - sum(prob for prob, _ in children))
        self._move(-sum(prob * (value + entropy) for prob, value in children) / left)

    def _move(self, gradient: float) -> None:
        gradient = max(-STEEPEST, min(STEEPEST, gradient))
        self._power = FLOOR + MEMORY * (self._power - FLOOR) + gradient * gradient
        moved = self._log - STEP * gradient / math.sqrt(self._power)
        self._log = max(math.log(LEAST), min(math.log(MOST), moved))
