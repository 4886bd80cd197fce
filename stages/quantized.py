"""What all formats do alike with row blocks, and what a kernel is.

A format says how it turns a padded block of rows into codes and scales. A kernel takes these, keeps
them in its own packing, in equally many bytes whichever it is, and multiplies by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVarTuple

import torch
from torch.nn import functional

from stages.formats import GROUP, stored_rows, substitute_bytes
from stages.packed import Packed

PART_ROWS = 256
"""Rows quantized at once: what a format makes meanwhile is a dozen times a part's size."""

_LEAST_SHARE = 1e-4
"""Of a group's mean: what nothing came into on one text may have something come into on another."""

Codes = TypeVarTuple("Codes")
"""What a format makes of rows: their codes, their scales and so on."""


class Kernel(Protocol[*Codes]):
    """A matrix, in whole groups and as many rows as are stored of it (formats.stored_rows)."""

    nbytes: int

    @property
    def compiled(self) -> Packed | None:
        """What the compiled part multiplies by, where it does."""
        ...

    def put(self, start: int, *codes: *Codes) -> None:
        """Rows from `start` on, as many as are stored of some."""
        ...

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, cols) in any float dtype -> (n, rows) in x's dtype."""
        ...

    def dequantize(self) -> torch.Tensor:
        """(rows, cols) float32."""
        ...


Making = Callable[[tuple[int, int], int], Kernel[*Codes]]
"""Of an empty kernel, for a shape (rows, cols) and the number of rows stored."""


class Quantized(Generic[*Codes]):
    """See Substitute. The kernel is given what `quantize` makes of each block, padded to the rows
    that are stored of it and to whole groups."""

    def __init__(
        self,
        form: str,
        blocks: Iterable[torch.Tensor],
        shape: tuple[int, int],
        kernel: Making[*Codes],
        quantize: Callable[[torch.Tensor], tuple[*Codes]],
    ) -> None:
        rows, cols = shape
        stored = stored_rows(rows, form)
        self._kernel = kernel(shape, stored)
        start = given = 0
        for part in (part for block in blocks for part in block.split(PART_ROWS)):
            given += part.shape[0]
            stop = start + stored_rows(part.shape[0], form)
            if stop > stored:
                raise ValueError(f"more than the {rows} rows expected were given")
            spare = stop - start - part.shape[0]
            padded = functional.pad(part, (0, -cols % GROUP, 0, spare))
            self._kernel.put(start, *quantize(padded))
            start = stop
        if given != rows:
            raise ValueError(f"{given} rows given, {rows} expected")
        self.nbytes = self._kernel.nbytes
        assert self.nbytes == substitute_bytes(shape, form)

    @property
    def compiled(self) -> Packed | None:
        """See Substitute."""
        return self._kernel.compiled

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Substitute."""
        return self._kernel.matmul(x)

    def dequantize(self) -> torch.Tensor:
        """See Substitute."""
        return self._kernel.dequantize()


def group_shares(inputs: torch.Tensor | None, cols: int) -> torch.Tensor:
    """How much the error of each column counts within its group: (groups, 64), each adding up to 1.

    inputs: (cols,), the mean square of what columns are multiplied by; None: all alike. A column
    that nothing came into counts a little all the same, and padding does not.
    """
    spare = -cols % GROUP
    seen = torch.ones(cols) if inputs is None else inputs.float()
    padded = functional.pad(seen, (0, spare)).view(-1, GROUP)
    there = functional.pad(torch.ones(cols), (0, spare)).view(-1, GROUP)
    least = (_LEAST_SHARE * padded.mean(dim=1, keepdim=True)).clamp_min(torch.finfo().tiny)
    weights = padded.maximum(least) * there
    return weights / weights.sum(dim=1, keepdim=True)
