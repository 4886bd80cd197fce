"""Gumbel noise that is a function of (seed, position, token) alone.

So a sampled text depends on neither trees, batches nor speculation (Gumbel-max; Kool et al. 2019,
arXiv 1903.06059, for its use in trees).
"""

from __future__ import annotations

import threading

import torch

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 read as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer (Steele, Lea and Flood 2014) on int64, wrapping."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def gumbel(seed: int, position: int, start: int, stop: int) -> torch.Tensor:
    """Noise for tokens [start, stop) at one position: (stop - start,) float32.

    A 64-bit counter per (seed, position, token), made uniform on (0, 1) in float64 and rounded
    once to float32.
    """
    key = _mix_int(_mix_int(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    tokens = torch.arange(start, stop, dtype=torch.int64)
    bits = _mix(_mix(tokens * _signed(_GOLDEN) + _signed(key)) ^ _signed(key >> 1))
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
    return (-torch.log(-torch.log(uniform))).float()


BLOCK = 8192
"""Tokens whose noise is made at once: bounds the float64 and int64 that making it takes."""


class Noise:
    """Whole rows of noise, kept for the last `positions` (at least 1) that were asked for.

    Drafter and verifier share one, so that each row is made once. Thread-safe.
    """

    def __init__(self, positions: int = 4) -> None:
        assert positions >= 1, positions
        self._most = positions
        self._rows: dict[tuple[int, int, int], torch.Tensor] = {}
        self._lock = threading.Lock()

    def row(self, seed: int, position: int, vocab: int) -> torch.Tensor:
        """(vocab,) float32. It is shared: whoever gets it must not change it."""
        key = (seed, position, vocab)
        # Made under the lock, so that two never make the same row, nor two rows at once.
        with self._lock:
            row = self._rows.pop(key, None)
            if row is None:
                while len(self._rows) >= self._most:
                    del self._rows[next(iter(self._rows))]
                row = _row(*key)
            self._rows[key] = row  # The newest stands last.
            return row


def _row(seed: int, position: int, vocab: int) -> torch.Tensor:
    row = torch.empty(vocab, dtype=torch.float32)
    for start in range(0, vocab, BLOCK):
        stop = min(start + BLOCK, vocab)
        row[start:stop] = gumbel(seed, position, start, stop)
    return row
