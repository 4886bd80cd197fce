"""The divergence of two rows of scores that come in pieces is that of whole rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from stages.divergence import Divergence


def logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(5, 300, generator=generator, dtype=torch.float64)


def seen(own: torch.Tensor, other: torch.Tensor, step: int) -> float:
    divergence = Divergence(len(own))
    for mine, its in zip(own.split(step, dim=1), other.split(step, dim=1), strict=True):
        divergence.see(mine, its)
    return divergence.mean()


@pytest.mark.parametrize("step", [1, 7, 299, 300])
@pytest.mark.parametrize("shift", [0.0, 800.0, -800.0])
def test_pieces_give_what_torch_gives_for_whole_rows(step: int, shift: float) -> None:
    own, other = logits(0), logits(1)
    right = functional.kl_div(
        other.log_softmax(1), own.log_softmax(1), log_target=True, reduction="batchmean"
    )
    # A constant added to all logits of a row, such as would overflow by itself, is nothing.
    assert seen(own + shift, other - shift, step) == pytest.approx(float(right), rel=1e-9)


def test_it_is_nothing_between_equals_and_small_between_neighbors() -> None:
    own = logits(0)
    assert seen(own, own.clone(), 64) == pytest.approx(0.0, abs=1e-12)
    near, far = (seen(own, own + size * logits(2), 64) for size in (1e-4, 1e-3))
    assert far / near == pytest.approx(100, rel=0.1), "it goes by the square"


def test_what_is_no_number_stays_so() -> None:
    broken = logits(1)
    broken[2, 100] = math.nan
    assert math.isnan(seen(logits(0), broken, 64))
