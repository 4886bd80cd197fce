"""Substitutes in two formats: layers whose errors hurt most have theirs in the finer one.

What an error of a layer costs is measured once for a model (stages/sensitivity.py). With each bit
more it is taken to be a quarter, since the variance of rounding is; the costs of layers to add up;
and what a tree yields to go evenly with the logarithm of their sum, between what it yields with all
layers in either format (predictions.YIELD).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from stages.formats import BITS, head_format, substitute_bytes
from stages.shapes import LayerShape, ModelShape

PAIRS = (("int2", "int3"), ("int3", "int4"), ("int4", "int6"), ("int6", "int8"))
SHARES = (0.25, 0.5, 0.75)
"""Of the layers, to be raised."""


class Mixture(msgspec.Struct, frozen=True):
    """The layers `raised`, of `layers` in all, have substitutes in `finer`; all others, and the
    head, as if all had theirs in `base`.

    way: how far of the way from base to finer a tree's yield has come (0 to 1); finer_bytes: the
    share of the substitutes' bytes that are in finer.
    """

    base: str
    finer: str
    raised: tuple[int, ...]
    layers: int
    way: float
    finer_bytes: float

    def __str__(self) -> str:
        """For people: "int4 and int6"."""
        return f"{self.base} and {self.finer}"

    def yielded(self, uniform: Mapping[str, float]) -> float:
        """Between what is given for its two formats."""
        low, high = uniform[self.base], uniform[self.finer]
        return low + self.way * (high - low)

    def rate(self, uniform: Mapping[str, float]) -> float:
        """Bytes a second, from those of its formats: one after the other."""
        finer = self.finer_bytes
        return 1.0 / ((1.0 - finer) / uniform[self.base] + finer / uniform[self.finer])


Form = str | Mixture
"""What the substitutes of a plan are in."""


def base_of(form: Form) -> str:
    """The format of all layers that are not raised, and what the head's follows."""
    return form.base if isinstance(form, Mixture) else form


def yield_of(form: Form, uniform: Mapping[str, float]) -> float:
    """What a form yields, from figures by format."""
    return form.yielded(uniform) if isinstance(form, Mixture) else uniform[form]


def rate_of(form: Form, uniform: Mapping[str, float]) -> float:
    """How fast a form is multiplied by, from rates by format."""
    return form.rate(uniform) if isinstance(form, Mixture) else uniform[form]


def low_bit(shape: ModelShape, form: Form) -> dict[str, int]:
    """Bytes of each matrix's substitute, by name."""
    base = base_of(form)
    raised = dict.fromkeys(form.raised, form.finer) if isinstance(form, Mixture) else {}
    forms = {layer.index: raised.get(layer.index, base) for layer in shape.layers}
    found = {m.name: substitute_bytes((m.rows, m.cols), forms[m.layer]) for m in shape.matrices()}
    head = shape.head
    return {**found, head.name: substitute_bytes((head.rows, head.cols), head_format(base))}


def mixtures(shape: ModelShape, sensitivity: Sequence[float]) -> Iterator[Mixture]:
    """Those worth planning with: layers are raised in the order of what that saves for its bytes.

    sensitivity: what substitutes of each layer cost in some format, by index, in any unit. Where
    all of it is 0 there are none.
    """
    count = len(shape.layers)
    assert len(sensitivity) == count and min(sensitivity) >= 0, sensitivity
    if not any(sensitivity):
        return
    for base, finer in PAIRS:
        more = {layer.index: _more_bytes(layer, base, finer) for layer in shape.layers}
        order = sorted(more, key=lambda index: (-sensitivity[index] / more[index], index))
        for raised in sorted({round(share * count) for share in SHARES} - {0, count}):
            yield _mixture(shape, base, finer, tuple(sorted(order[:raised])), sensitivity)


def _mixture(
    shape: ModelShape, base: str, finer: str, raised: tuple[int, ...], sensitivity: Sequence[float]
) -> Mixture:
    bare = Mixture(base, finer, raised, len(shape.layers), 0.0, 0.0)
    sizes = low_bit(shape, bare)
    within = sum(sizes[m.name] for m in shape.matrices() if m.layer in raised)
    share = sum(sensitivity[index] for index in raised) / sum(sensitivity)
    way = way_gone(share, BITS[finer] - BITS[base])
    return msgspec.structs.replace(bare, way=way, finer_bytes=within / sum(sizes.values()))


def way_gone(share: float, bits: int) -> float:
    """How far the logarithm of a cost falls when this share of it has `bits` more bits, of how far
    it does when all of it has."""
    least = 4.0**-bits
    return math.log(1.0 - min(1.0, share) * (1.0 - least)) / math.log(least)


def _more_bytes(layer: LayerShape, base: str, finer: str) -> int:
    return sum(
        substitute_bytes((m.rows, m.cols), finer) - substitute_bytes((m.rows, m.cols), base)
        for m in layer.matrices
    )
