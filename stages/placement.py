"""Where a plan puts a model: the part of a plan that the stages act upon.

The planner (pipeline/planner.py) makes it, skeleton, sweep, drafter and KV store read it. Plain
numbers and names, no torch.
"""

from __future__ import annotations

import msgspec


class Placement(msgspec.Struct, frozen=True):
    """What lives where.

    `resident` names the matrices kept on the device in full precision, in the compute dtype: layer
    matrices and, if named, the head. Every other matrix is streamed. `substitute` is the format
    of the low-bit copies of streamed matrices (one of formats.FORMATS; None: there are none, and
    what is drafted is looked up in the text); layers in `raised` have theirs in the format `finer`
    instead, the head never does. The ring has `slots` slots of `slot_bytes` bytes (0 and 0 when all
    is resident). A streamed head is cut into pieces of `head_rows` vocabulary rows
    (the whole vocabulary when it is resident). KV is held for `context` tokens in each of
    `sessions` sessions; a tree has at most `tree_budget` nodes besides its root (0: no drafts),
    and a sweep carries at most `prefill_rows` prompt rows at once through a layer. Whole rows of
    logits, for riders that sample or want log-probabilities, are held for `logit_rows` nodes of
    each session: their trees have at most `logit_rows` - 1 nodes besides the root. The drafter has
    keys and values for `draft_rows` nodes that it runs (0: it has no model). With `low_resident`
    resident matrices have substitutes as well, which are what it multiplies by.
    """

    resident: tuple[str, ...]
    substitute: str | None
    slots: int
    slot_bytes: int
    head_rows: int
    context: int
    sessions: int
    tree_budget: int
    prefill_rows: int
    logit_rows: int = 1
    draft_rows: int = 0
    low_resident: bool = False
    finer: str | None = None
    raised: tuple[int, ...] = ()
