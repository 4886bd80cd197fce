"""Rotary tables equal transformers' modules bit for bit, and no call leaks into the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from routing.errors import UnsupportedModelError
from stages.architectures import check_supported
from stages.rope import Rope, cos_sin, read_rope
from tests import made

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
GEMMA_TWO = {
    "rope_parameters": {
        "full_attention": made.ROPES["llama3"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 7_000.0},
    }
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in made.ARCHITECTURES),
    *(("llama", {"rope_parameters": parameters}) for parameters in made.ROPES.values()),
    ("llama", {"rope_parameters": made.ROPES["yarn"] | {"truncate": False, "beta_fast": 20}}),
    ("gemma3_text", GEMMA_TWO),
    ("olmo2", {"rope_parameters": made.ROPES["yarn"] | {"attention_factor": 1.3}}),
    ("phi3", made.longrope(24)),
]


def both(architecture: str, more: dict[str, Any]) -> tuple[Rope, Any, tuple[str, ...]]:
    """Our tables, transformers' module, and the kinds of table."""
    config = made.make_config(architecture, **more)
    known = check_supported(config)
    return read_rope(config, known), known.modules().rotary(config), known.rope_kinds


def theirs(module: Any, positions: torch.Tensor, kind: str, dtype: torch.dtype) -> Any:
    more = () if kind == "all" else (kind,)
    with torch.no_grad():
        return module(torch.zeros(1, dtype=dtype), positions[None], *more)


@pytest.mark.parametrize(("architecture", "more"), CASES)
def test_equal_bit_for_bit(architecture: str, more: dict[str, Any]) -> None:
    rope, module, kinds = both(architecture, more)
    assert kinds
    for length in (1, 24, 25, 300, 70_000):
        positions = torch.arange(max(0, length - 40), length)
        for kind in kinds:
            for dtype in DTYPES:
                ours = cos_sin(rope, positions, kind, length, dtype)
                for mine, other in zip(ours, theirs(module, positions, kind, dtype), strict=True):
                    assert mine.dtype == other.dtype
                    assert torch.equal(mine, other[0])


@pytest.mark.parametrize("architecture", made.ARCHITECTURES)
def test_layers_are_called_with_these(architecture: str, tmp_path: Path) -> None:
    made.make_model(tmp_path, architecture)
    model = made.reference_model(tmp_path, torch.float64)
    known = check_supported(model.config)
    rope = read_rope(model.config, known)
    given = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: given.append(kwargs["position_embeddings"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    made.reference_logits(tmp_path, range(20))
    for hook in hooks:
        hook.remove()
    for kind, (cos, sin) in zip(known.ropes, given, strict=True):
        if kind is not None:
            mine = cos_sin(rope, torch.arange(20), kind, 20, torch.float64)
            assert torch.equal(mine[0], cos[0])
            assert torch.equal(mine[1], sin[0])
    assert all(kind is None for kind in known.ropes[1::2]) == (architecture == "smollm3")


def test_longrope_goes_by_the_text_and_not_by_the_call_before() -> None:
    rope, module, _ = both("phi3", made.longrope(24))
    assert rope.switch_at == 24
    assert not rope.is_long(24)
    assert rope.is_long(25)
    positions = torch.arange(24)
    short = cos_sin(rope, positions, "all", 24, torch.float64)
    long = cos_sin(rope, positions, "all", 25, torch.float64)
    again = cos_sin(rope, positions, "all", 24, torch.float64)
    assert torch.equal(short[0], again[0])
    assert not torch.equal(short[1], long[1])
    assert torch.equal(long[0], theirs(module, torch.arange(25), "all", torch.float64)[0][0, :24])


def test_rows_may_come_in_any_order() -> None:
    rope, _, _ = both("llama", {})
    every = cos_sin(rope, torch.arange(40), "all", 40, torch.float32)
    some = torch.tensor([7, 8, 8, 31, 8])
    mine = cos_sin(rope, some, "all", 40, torch.float32)
    assert torch.equal(mine[0], every[0][some])
    assert torch.equal(mine[1], every[1][some])


def test_tables_are_made_on_the_cpu_even_while_layers_are_made_on_meta() -> None:
    with torch.device("meta"):
        rope, _, _ = both("phi3", made.longrope(24))
    table = rope.tables["all"]
    assert table.long is not None
    assert table.short.device.type == table.long.device.type == "cpu"


def test_partial_rotary_has_fewer_columns() -> None:
    rope, _, _ = both("phi3", {})
    cos, _ = cos_sin(rope, torch.arange(3), "all", 3, torch.float32)
    assert cos.shape == (3, 12)


def test_two_switches_are_refused() -> None:
    def table(original: int) -> dict[str, Any]:
        parameters: dict[str, Any] = made.longrope(original, rotary_dim=32)["rope_parameters"]
        return parameters

    tables = {"full_attention": table(24), "sliding_attention": table(48)}
    with pytest.raises(UnsupportedModelError, match="switch at different lengths"):
        both("gemma3_text", {"rope_parameters": tables})
