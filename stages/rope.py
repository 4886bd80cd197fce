"""Rotary position embeddings as a pure function of the positions.

transformers' rotary modules keep state: a longrope module swaps its frequencies on the longest
position of a call, so that one rider's length would show in another's answer. Here the frequencies
are read once from a module of the model's own class and never written again, and what a call needs
to know, the length of its own text, it is told.

Longrope (phi3): a text longer than `switch_at` turns all of its positions by other frequencies, so
the keys of a text that grows past it are all wrong at once. Its prefix has to be computed anew.
transformers' generate does so for phi3, and one forward over a whole text means the same.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from routing.errors import UnsupportedModelError
from stages.architectures import ONE_ROPE, SUPPORTED, Architecture


class Frequencies(msgspec.Struct, frozen=True):
    """One rotary table: angles a position, float32 (dim / 2,), and the factor on cos and sin.

    `long` replaces `short` in texts longer than the rope's switch_at; None: it never does.
    """

    short: torch.Tensor
    long: torch.Tensor | None
    scaling: float


class Rope(msgspec.Struct, frozen=True):
    """The rotary tables of a model, by kind (Architecture.ropes says which layer uses which).

    `switch_at`: the longest total length, in tokens, at which the short frequencies hold; None: all
    lengths are alike. `in_float32`: the layers want cos and sin in float32 whatever their dtype.
    """

    tables: dict[str, Frequencies]
    switch_at: int | None
    in_float32: bool

    def is_long(self, total_length: int) -> bool:
        """Whether a text of `total_length` tokens turns by the long frequencies."""
        return self.switch_at is not None and total_length > self.switch_at


def read_rope(config: Any, architecture: Architecture) -> Rope:
    """The tables of a model, taken from transformers' rotary module of its class, on the CPU.

    Raises UnsupportedModelError when two tables of a model switch at different lengths.
    """
    cpu = torch.device("cpu")
    with cpu, torch.no_grad():
        module: Any = architecture.modules().rotary(config)
        tables = {}
        switches = set()
        for kind in architecture.rope_kinds:
            typed = kind != ONE_ROPE
            start = f"{kind}_" if typed else ""
            parameters = config.rope_parameters[kind] if typed else config.rope_parameters
            short = getattr(module, f"{start}inv_freq").detach().to(torch.float32).clone()
            long = None
            if parameters["rope_type"] == "longrope":
                switch = int(parameters["original_max_position_embeddings"])
                switches.add(switch)
                long, _ = ROPE_INIT_FUNCTIONS["longrope"](
                    config, cpu, seq_len=switch + 1, layer_type=kind if typed else None
                )
            scaling = float(getattr(module, f"{start}attention_scaling"))
            tables[kind] = Frequencies(short, long, scaling)
        if len(switches) > 1:
            why = f"its rotary tables switch at different lengths, {sorted(switches)}"
            raise UnsupportedModelError(architecture.model_type, SUPPORTED, why)
        in_float32 = bool(tables) and _keeps_float32(module, architecture.rope_kinds[0])
    return Rope(tables, next(iter(switches), None), in_float32)


def _keeps_float32(module: Any, kind: str) -> bool:
    """Whether the module answers in float32 when its input is not (olmo2's does)."""
    place = torch.zeros(1, 1, dtype=torch.long)
    more = () if kind == ONE_ROPE else (kind,)
    cos, _ = module(torch.zeros(1, dtype=torch.bfloat16), place, *more)
    return bool(cos.dtype == torch.float32)


def cos_sin(
    rope: Rope, positions: torch.Tensor, kind: str, total_length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for rows at `positions` (rows,) of one text, each (rows, dim).

    `kind` names the table, `total_length` is the length in tokens of the text that the rows are
    computed for: every row of one pass over a text gets the same, and a row that stands for a text
    of its own (a node of a tree) gets its own depth plus one. Computed in float32, then cast to
    `dtype`. Equal bit for bit to transformers' rotary module.
    """
    table = rope.tables[kind]
    frequencies = table.short
    if table.long is not None and rope.is_long(total_length):
        frequencies = table.long
    angles = positions[:, None].to(torch.float32) * frequencies.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * table.scaling, angles.sin() * table.scaling
    if rope.in_float32:
        return cos, sin
    return cos.to(dtype), sin.to(dtype)
