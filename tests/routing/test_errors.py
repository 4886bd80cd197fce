"""Tests of the error tree: its shape, and what the messages say."""

from __future__ import annotations

import pytest

from routing import errors
from routing.errors import (
    BudgetError,
    BusyError,
    ContextLengthError,
    DeviceMemoryError,
    DiskFullError,
    EngineClosedError,
    EngineError,
    LinkError,
    ModelFormatError,
    ModelNotFoundError,
    OptionError,
    PacelineError,
    UnsupportedModelError,
    UsageError,
)

MIB = 1024 * 1024

USAGE: list[tuple[PacelineError, list[str]]] = [
    (ModelNotFoundError("some/model", "Check the name."), ["'some/model'", "Check the name."]),
    (ModelFormatError("a.safetensors", "the header is cut off"), ["a.safetensors", "cut off"]),
    (UnsupportedModelError("rwkv", ["llama", "qwen3"]), ["'rwkv'", "llama, qwen3"]),
    (UnsupportedModelError("llama", ["llama"], "dynamic rope"), ["(dynamic rope)"]),
    (BudgetError(10 * MIB + 1, 20 * MIB + 1, "--memory"), ["10 MiB", "21 MiB", "--memory"]),
    (ContextLengthError(5000, 4096), ["5000", "4096"]),
    (OptionError("--seed", "x", "a whole number"), ["--seed", "'x'", "a whole number"]),
    (DiskFullError("cache", 3 * MIB, 2 * MIB), ["cache", "3 MiB", "2 MiB"]),
]

OTHER: list[tuple[PacelineError, list[str]]] = [
    (BusyError(8, 8), ["8 requests wait", "limit is 8"]),
    (EngineError("drafter", ValueError("boom")), ["drafter", "ValueError: boom", "closed"]),
    (EngineError("drafter", KeyboardInterrupt()), ["(KeyboardInterrupt)"]),
    (EngineClosedError(), ["closed"]),
    (DeviceMemoryError(5, 96, 100, "the KV cache"), ["the KV cache", "5 bytes", "96 of 100"]),
    (LinkError("shard", "input/output error"), ["shard", "input/output error"]),
]


@pytest.mark.parametrize(("error", "parts"), USAGE + OTHER)
def test_messages_say_what_was_given_and_expected(error: PacelineError, parts: list[str]) -> None:
    assert isinstance(error, PacelineError)
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize("error", [error for error, _ in USAGE])
def test_mistakes_of_the_caller_are_usage_errors(error: PacelineError) -> None:
    assert isinstance(error, UsageError)
    assert "\n" not in str(error)


@pytest.mark.parametrize("error", [error for error, _ in OTHER])
def test_the_rest_are_not(error: PacelineError) -> None:
    assert not isinstance(error, UsageError)


def test_an_engine_error_shows_its_cause() -> None:
    cause = ValueError("boom")
    error = EngineError("drafter", cause)
    assert error.cause is error.__cause__ is cause


def test_the_tree_at_the_head_of_the_module_is_whole() -> None:
    assert errors.__doc__ is not None
    words = errors.__doc__.split()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, PacelineError):
            assert name in words
