"""What a model looks like from outside: names and sizes of its matrices, no weights.

The planner decides from these alone, so that a plan needs a checkpoint's headers and nothing more.
No torch here: `paceline plan --help` and the planner's tests import this module.
"""

from __future__ import annotations

import msgspec


class MatrixShape(msgspec.Struct, frozen=True):
    """One weight matrix, (rows, cols) = (out, in).

    `layer` is the decoder layer it belongs to; the head carries the number of layers, since it is
    the last 'layer' of a sweep. `nbytes` is its size in the source's dtype: what crosses the link.
    """

    name: str
    layer: int
    rows: int
    cols: int
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of weights."""
        return self.rows * self.cols


class LayerShape(msgspec.Struct, frozen=True):
    """One decoder layer: its matrices in the order in which the checkpoint holds them."""

    index: int
    matrices: tuple[MatrixShape, ...]


class ModelShape(msgspec.Struct, frozen=True):
    """A whole model. Sizes in bytes unless they count rows, heads or features.

    `small_bytes` is everything that is no matrix (norms, biases) in the compute dtype. `head` names
    lm_head, or the embedding when the two are `tied`. `max_positions` is the longest context that
    the model was made for.
    """

    architecture: str
    layers: tuple[LayerShape, ...]
    small_bytes: int
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    head: MatrixShape
    tied: bool
    source_itemsize: int
    compute_itemsize: int
    max_positions: int

    def matrices(self) -> tuple[MatrixShape, ...]:
        """Every layer's matrices, the head's not among them."""
        return tuple(matrix for layer in self.layers for matrix in layer.matrices)
