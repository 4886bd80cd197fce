from __future__ import annotations

import pytest
import torch

from stages.logprobs import token_logprob
from tests.stages.made_stages import normal


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logprobs_are_the_log_softmax_of_the_row(dtype: torch.dtype) -> None:
    row = (4 * normal(300, seed=1)).to(dtype)
    wide = row.to(torch.promote_types(dtype, torch.float32)).log_softmax(0)
    for count in (0, 1, 5, 300, 1000):
        found = token_logprob(row, 17, count)
        assert (found.token, found.logprob) == (17, float(wide[17]))
        assert len(found.top) == min(count, 300)
        order = torch.sort(wide, descending=True, stable=True)
        assert (
            found.top
            == tuple(zip(order.indices.tolist(), order.values.tolist(), strict=True))[:count]
        )


def test_of_equals_the_lowest_tokens_are_named_in_order() -> None:
    row = torch.zeros(2000)
    row[[5, 900]] = 1.0
    assert [token for token, _ in token_logprob(row, 0, 5).top] == [5, 900, 0, 1, 2]


def test_tokens_that_cannot_come_have_a_logprob_of_minus_infinity() -> None:
    row = torch.tensor([0.0, -torch.inf])
    assert token_logprob(row, 1, 2).logprob == -torch.inf
    assert token_logprob(row, 0, 2).top == ((0, 0.0), (1, -torch.inf))
