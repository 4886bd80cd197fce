from __future__ import annotations

import pytest
import torch

from routing.messages import Sampling
from stages.noise import Noise
from stages.outcomes import Outcome, WholeRows, largest, outcome
from stages.packs import Rider
from stages.sampling import Scorer
from tests.stages.made_stages import normal

VOCAB = 12


def tree(
    sampling: Sampling, history: tuple[int, ...] = (), logprobs: int | None = None
) -> tuple[Rider, torch.Tensor]:
    """Root 3 with children 5 and 6, of which 5 has child 7; rows that lead down to 7, then to 2."""
    logits = 0.1 * normal(4, VOCAB, seed=1)
    for row, token in enumerate((5, 7, 0, 2)):
        logits[row, token] = 9.0
    rider = Rider(
        0, 0, 8, (3, 5, 6, 7), (-1, 0, 0, 1), sampling, 2, history=history, logprobs=logprobs
    )
    return rider, logits


def walked(rider: Rider, logits: torch.Tensor) -> Outcome | None:
    scorer = Scorer(rider.sampling, rider.prompt, Noise(), VOCAB)
    positions = [position + 1 for position in rider.positions()]
    return outcome(rider, WholeRows(rider, logits, scorer, positions).choose)


def test_a_tree_is_accepted_as_far_as_the_target_goes_along() -> None:
    rider, logits = tree(Sampling(0.0))
    expected = Outcome((0, 1, 3), (5, 7, 2))
    assert outcome(rider, largest([5, 7, 0, 2])) == expected
    assert walked(rider, logits) == expected


def test_a_path_sees_its_own_tokens() -> None:
    """Once 5 was accepted it is 10 worth less, so that the row after it no longer prefers it."""
    sampling = Sampling(presence_penalty=10.0)
    rider, logits = tree(sampling, history=(1, 1, 3))
    logits[1, 5] = 12.0
    assert walked(rider, logits) == Outcome((0, 1, 3), (5, 7, 2))
    logits[3, 7], logits[3, 3] = 11.0, 12.0  # on the path, and the root
    assert walked(rider, logits) == Outcome((0, 1, 3), (5, 7, 2))
    logits[3, 6] = 10.0  # drafted as well, but not on the path
    assert walked(rider, logits) == Outcome((0, 1, 3), (5, 7, 6))


def test_rows_beside_the_path_are_not_looked_at() -> None:
    rider, logits = tree(Sampling(0.0, banned=(0,)))
    logits[2] = torch.nan
    assert walked(rider, logits) == Outcome((0, 1, 3), (5, 7, 2))


@pytest.mark.parametrize("row", [0, 1, 3])
def test_a_row_on_the_path_without_numbers_is_no_outcome(row: int) -> None:
    rider, logits = tree(Sampling(1.0, 2))
    logits[row] = torch.nan
    assert walked(rider, logits) is None


def test_each_token_has_its_logprob() -> None:
    rider, logits = tree(Sampling(0.0, logit_bias=((4, 100.0),)), logprobs=2)
    found = walked(rider, logits)
    assert found is not None and found.tokens == (4,), "the bias decides"
    (entry,) = found.logprobs
    raw = torch.log_softmax(logits[0], dim=0)
    assert entry.token == 4 and entry.logprob == float(raw[4]), "and is not in the log-probability"
    assert entry.top[0] == (5, float(raw[5]))
    rider, logits = tree(Sampling(0.0), logprobs=0)
    found = walked(rider, logits)
    assert found is not None and [entry.token for entry in found.logprobs] == [5, 7, 2]


def test_a_prompt_gives_one_token_and_all_of_its_rows() -> None:
    rider = Rider(0, 0, 0, (4, 5, 6), None, Sampling(0.0), 3)
    assert outcome(rider, largest([9])) == Outcome((0, 1, 2), (9,))
    assert outcome(rider, largest([None])) is None
