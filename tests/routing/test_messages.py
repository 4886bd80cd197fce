"""Tests of the messages: frozen, small, and without tensors."""

from __future__ import annotations

import subprocess
import sys
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest

from routing import messages
from routing.messages import Request, Sampling

KINDS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
]


@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_frozen(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen


@pytest.mark.parametrize("kind", KINDS)
def test_messages_hold_plain_values_only(kind: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(kind):
        assert _leaves(field.type) <= {int, float, bool, str, type(None), *KINDS}, field


def _leaves(kind: Any) -> set[Any]:
    """The types that a field's type is made of: tuples and unions taken apart."""
    if get_origin(kind) not in (tuple, Union, UnionType):
        return {kind}
    parts = [part for part in get_args(kind) if part is not ...]
    return set().union(*map(_leaves, parts))


def test_equal_messages_are_equal_and_hashable() -> None:
    first, second = (Request(1, (2, 3), 4, Sampling(seed=5)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


def test_routing_does_not_import_torch() -> None:
    code = (
        "import sys, routing.router, routing.messages, routing.errors\n"
        "assert not {'torch', 'transformers', 'stages', 'pipeline'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
