"""What transformers itself answers for a model on disk: the reference that ours must equal.

transformers' eager attention takes the softmax in float32 even when the model is in float64, which
limits any comparison to about 1e-5. In float64 the reference therefore uses EXACT by default: the
same arithmetic with the softmax in the query's dtype, registered through transformers' public
interface. `attention="eager"` gives the untouched one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

EXACT = "made_exact"


def _exact_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' eager one, except that the softmax keeps the query's dtype."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1)
    out = weights @ value.repeat_interleave(groups, 1)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(EXACT, _exact_attention)
AttentionMaskInterface.register(EXACT, eager_mask)


@contextmanager
def alone() -> Iterator[None]:
    """One thread and no gradients: on models this small a second thread only waits for its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


class _Key(NamedTuple):
    """A model as it stands on disk now: rewriting its files makes another one of it."""

    directory: Path
    dtype: torch.dtype
    attention: str
    stamps: tuple[int, ...]


def _key(directory: Path, dtype: torch.dtype, attention: str | None) -> _Key:
    if attention is None:
        attention = EXACT if dtype == torch.float64 else "eager"
    stamps = tuple(path.stat().st_mtime_ns for path in sorted(directory.iterdir()))
    return _Key(directory, dtype, attention, stamps)


@cache
def _model(key: _Key) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        key.directory, dtype=key.dtype, attn_implementation=key.attention, local_files_only=True
    )
    return model.eval()


@cache
def _logits(key: _Key, ids: tuple[int, ...]) -> torch.Tensor:
    with alone():
        logits: torch.Tensor = _model(key)(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@cache
def _generated(key: _Key, ids: tuple[int, ...], n: int, stop: tuple[int, ...]) -> tuple[int, ...]:
    with alone():
        out = _model(key).generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=n,
            do_sample=False,
            eos_token_id=list(stop) or None,
            pad_token_id=0,
        )
    return tuple(out[0, len(ids) :].tolist())


@cache
def _looped(key: _Key, ids: tuple[int, ...], n: int) -> tuple[tuple[int, ...], torch.Tensor]:
    model = _model(key)
    tokens = list(ids)
    rows = []
    with alone():
        for _ in range(n):
            logits = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits
            rows.append(logits[0, -1])
            tokens.append(int(logits[0, -1].argmax()))
    return tuple(tokens[len(ids) :]), torch.stack(rows)


def reference_model(
    directory: Path, dtype: torch.dtype = torch.float64, attention: str | None = None
) -> Any:
    """transformers' own model of `directory` in `dtype`; loaded once a session, so leave it whole.

    `attention`: "eager", "sdpa", or EXACT, which is the default in float64.
    """
    return _model(_key(directory, dtype, attention))


def reference_logits(
    directory: Path,
    ids: Iterable[int],
    dtype: torch.dtype = torch.float64,
    attention: str | None = None,
) -> torch.Tensor:
    """Logits of one forward over all of `ids`, (rows, vocab) in `dtype`; the caller's to keep."""
    return _logits(_key(directory, dtype, attention), tuple(ids)).clone()


def reference_generate(
    directory: Path,
    ids: Sequence[int],
    n: int,
    dtype: torch.dtype = torch.float64,
    stop: Sequence[int] = (),
) -> list[int]:
    """Greedy tokens of transformers' generate, at most `n`; a stop token is the last of them."""
    return list(_generated(_key(directory, dtype, None), tuple(ids), n, tuple(stop)))


def reference_loop(
    directory: Path, ids: Sequence[int], n: int, dtype: torch.dtype = torch.float64
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens by a loop that keeps no cache, and the (n, vocab) logits they came from.

    Each token is computed from the whole text before it, so this is the meaning of decoding,
    longrope's switch included. It takes n forwards: keep n small.
    """
    tokens, rows = _looped(_key(directory, dtype, None), tuple(ids), n)
    return list(tokens), rows.clone()
