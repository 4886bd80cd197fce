"""A made draft distribution, a function of what came before, for the tests of draft trees."""

from __future__ import annotations

from collections.abc import Callable

import torch

Path = tuple[int, ...]
Rows = Callable[[Path], torch.Tensor]
"""Log-probabilities (vocab,) of the token after a path."""


def made_rows(seed: int, vocab: int, *, coarse: bool = False, holes: bool = False) -> Rows:
    """Peaked or flat by turns; `coarse` gives many equal values, `holes` some tokens no chance."""

    def row(path: Path) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
        if coarse:
            logits = -torch.randint(1, 4, (vocab,), generator=generator).float()
        else:
            logits = torch.randn(vocab, generator=generator) * (1 + 4 * (len(path) % 2))
        if holes:
            gone = torch.rand(vocab, generator=generator) < 0.3
            gone[int(logits.argmax())] = False
            logits[gone] = -torch.inf
        return torch.log_softmax(logits, dim=0)

    return row
