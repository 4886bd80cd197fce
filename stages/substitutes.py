"""Substitutes: low-bit copies of weight matrices, for the drafter's eyes only.

Every format is made from row blocks, so that a matrix is never whole in floating point, and
multiplies a few rows at a time. A weight that is not finite counts as 0: a draft may be wrong, but
it must not be NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch

from stages.affine import Affine
from stages.formats import FORMATS
from stages.int8 import Int8
from stages.nf4 import Nf4
from stages.packed import Packed


class Substitute(Protocol):
    """One matrix, (out, in), in few bits."""

    nbytes: int
    """Bytes held; equals formats.substitute_bytes."""

    @property
    def compiled(self) -> Packed | None:
        """What the compiled part multiplies by, where it does."""
        ...

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, in) in any float dtype -> (rows, out) in x's dtype."""
        ...

    def dequantize(self) -> torch.Tensor:
        """The matrix it stands for: (out, in) float32. For tests and measurements."""
        ...


_FORMS: dict[
    str, Callable[[Iterable[torch.Tensor], tuple[int, int], torch.Tensor | None], Substitute]
] = {
    "int4": partial(Affine, "int4"),
    "int8": Int8,
    "nf4": Nf4,
    "int6": partial(Affine, "int6"),
    "int3": partial(Affine, "int3"),
    "int2": partial(Affine, "int2"),
}


def quantize(
    blocks: Iterable[torch.Tensor],
    shape: tuple[int, int],
    form: str,
    inputs: torch.Tensor | None = None,
) -> Substitute:
    """Quantize a matrix given as consecutive row blocks, each (rows, in), multiples of 64 rows.

    The last block may have any number of rows. `inputs`: (in,), the mean square of what each column
    is multiplied by (probe.py): errors count by it, and all alike without. Raises ValueError for an
    unknown format or blocks that do not add up to `shape`.
    """
    if form not in _FORMS:
        raise ValueError(f"format {form!r} given, one of {FORMATS} expected")
    clean = (torch.nan_to_num(b.float(), nan=0.0, posinf=0.0, neginf=0.0) for b in blocks)
    return _FORMS[form](clean, shape, inputs)
