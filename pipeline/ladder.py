"""A ladder of residencies, each rung with one matrix more that stays than the one below.

What a planner climbs (residency.py makes them): sizes alone, and bounds of them over many rungs.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Rung(NamedTuple):
    """Sizes at one residency, in bytes; `pieces` a sweep. `converted_bytes` is what a sweep
    converts to the compute dtype, `decode_bytes` the buffer for the largest piece of it,
    `drafting_bytes` what a draft step reads in full precision."""

    resident_bytes: int
    streamed_bytes: int
    substitute_bytes: int
    slot_bytes: int
    decode_bytes: int
    converted_bytes: int
    pieces: int
    drafting_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """What the rung takes besides the ring."""
        return self.resident_bytes + self.substitute_bytes + self.decode_bytes


class Ladder(msgspec.Struct, frozen=True):
    """`base` is resident on every rung; rung k adds the first k names of `order`.

    Every rung streams something: holding all is a plan of its own, without a ring. `low`: resident
    matrices have substitutes as well, so that a draft step is as quick as with none resident.
    """

    base: tuple[str, ...]
    order: tuple[str, ...]
    rungs: tuple[Rung, ...]
    head_rows: int
    head_resident: bool
    low: bool

    def resident(self, rung: int) -> frozenset[str]:
        """Names of the matrices that are resident on a rung."""
        return frozenset(self.base) | frozenset(self.order[:rung])

    def ideal(self, first: int, last: int) -> Rung:
        """What no rung from `first` to `last` is faster than: up the ladder resident bytes grow,
        and every other size shrinks or stays."""
        low, high = self.rungs[first], self.rungs[last]
        # Drafts wait for less where less is resident, and a large ring fills meanwhile.
        return high._replace(slot_bytes=low.slot_bytes, drafting_bytes=low.drafting_bytes)

    def least_bytes(self, first: int, last: int, slots: int) -> int:
        """At most what any rung from `first` to `last` takes, ring included."""
        low, high = self.rungs[first], self.rungs[last]
        others = high.substitute_bytes + high.decode_bytes + slots * high.slot_bytes
        return low.resident_bytes + others
