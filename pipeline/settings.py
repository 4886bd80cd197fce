"""What a user may set: checked once, here, for the command line, the environment and Python alike.

Explicit values win over PACELINE_* variables, and those over the defaults. Every complaint is an
OptionError that names the option or variable, what was given, and what was expected.

`host_memory` caps staging in host memory on the way to an accelerator. On the CPU there is no such
tier (the device's memory is the host's, capped by `memory`), so there the option is refused rather
than ignored: at once for device "cpu", and by `refuse_host_memory` where "auto" turns out to be it.

Without `overlap` stages come one after the other, whatever `draft_ahead` says: it shows what their
overlap is worth.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Literal, get_args

import msgspec

from routing.errors import OptionError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kmg]?i?b)?\s*", re.IGNORECASE | re.ASCII)
_SIZE_EXPECTED = "a size above zero such as 200MiB, 1.5GB or a number of bytes"
_LARGEST = 2**60

DEFAULT_CONTEXT = 1024
LEAST_TEMPERATURE = 0.01
"""Above zero: scores divided by less overflow in float32."""

Size = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
Substitute = Literal["auto", "int4", "int8", "nf4", "int6", "int3", "int2", "lookup", "none"]
_SUBSTITUTES = f"{', '.join(get_args(Substitute)[:-1])} or none"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of an engine and its requests. Sizes in bytes, link_gbps in GB/s.

    Constructors of Structs do not validate: make settings with `from_environment`.
    None means: the default model; all the memory that can be spared; a context of DEFAULT_CONTEXT
    tokens or the model's longest; a fresh seed for each request; the link as measured.
    """

    model: str | None = None
    memory: Size | None = None
    host_memory: Size | None = None
    max_tokens: Count = 256
    context: Count | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    sessions: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    queue: Count = 64
    device: Literal["auto", "cpu", "simulated"] = "auto"
    substitute: Substitute = "auto"
    draft_ahead: bool = True
    overlap: bool = True
    link_gbps: Annotated[float, msgspec.Meta(ge=1e-6, le=100_000)] | None = None

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, **given: object
    ) -> Settings:
        """Settings from PACELINE_* variables, overridden by what is given and not None.

        Raises OptionError. An empty variable counts as unset. Sizes may be texts or bytes.
        """
        environ = os.environ if environ is None else environ
        for name in given.keys() - _OPTIONS.keys():
            raise OptionError(name, given[name], f"one of {', '.join(_OPTIONS)}")
        values: dict[str, object] = {}
        for name, option in _OPTIONS.items():
            if given.get(name) is not None:
                values[name] = _checked(name, option.flag, given[name], strict=True)
            elif text := environ.get(option.variable, "").strip():
                values[name] = _checked(name, option.variable, text, strict=False)
        settings = msgspec.convert(values, cls)
        if settings.device == "cpu":
            settings.refuse_host_memory("cpu")
        return settings

    def refuse_host_memory(self, device: str) -> None:
        """Raise OptionError if host memory was capped on a device that stages nothing there."""
        if self.host_memory is not None:
            expected = f"no such cap on device {device}, whose memory is the host's: use --memory"
            raise OptionError("--host-memory", self.host_memory, expected)

    def context_for(self, max_positions: int) -> int:
        """The context in tokens for a model; OptionError when it asks for more than that has."""
        if self.context is None:
            return min(DEFAULT_CONTEXT, max_positions)
        if self.context > max_positions:
            expected = f"at most {max_positions} tokens, the model's longest context"
            raise OptionError("--ctx-size", self.context, expected)
        return self.context


class _Option(msgspec.Struct, frozen=True):
    flag: str
    expected: str

    @property
    def variable(self) -> str:
        return f"PACELINE_{self.flag.removeprefix('--').replace('-', '_').upper()}"


_OPTIONS = {
    "model": _Option("--model", "a directory, a GGUF file or a Hugging Face id"),
    "memory": _Option("--memory", _SIZE_EXPECTED),
    "host_memory": _Option("--host-memory", _SIZE_EXPECTED),
    "max_tokens": _Option("--max-tokens", "a whole number of tokens, 1 or more"),
    "context": _Option("--ctx-size", "a whole number of tokens, 1 or more"),
    "seed": _Option("--seed", "a whole number from 0 to 2^63 - 1"),
    "temperature": _Option("--temp", "0 or a number from 0.01 to 100"),
    "sessions": _Option("--sessions", "a whole number from 1 to 1024"),
    "queue": _Option("--queue", "a whole number of requests, 1 or more"),
    "device": _Option("--device", "auto, cpu or simulated"),
    "substitute": _Option("--substitute", _SUBSTITUTES),
    "draft_ahead": _Option("--draft-ahead", "true or false"),
    "overlap": _Option("--overlap", "true or false"),
    "link_gbps": _Option("--link-gbps", "a bandwidth from 1e-6 to 100000 GB/s"),
}
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}


def parse_size(value: str | int, option: str = "--memory") -> int:
    """Bytes from "200MiB", "1.5GB", "4096" or 4096; fractions of a byte are dropped.

    KB, MB, GB are powers of 1000, KiB, MiB, GiB of 1024; case does not matter. Raises OptionError
    in the name of `option` for anything else, and for less than one byte.
    """
    nbytes = value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or (unit := (match[2] or "").lower()) not in _UNITS:
            raise OptionError(option, value, _SIZE_EXPECTED)
        nbytes = int(Decimal(match[1]) * _UNITS[unit])
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes <= _LARGEST:
        raise OptionError(option, value, _SIZE_EXPECTED)
    return nbytes


def _checked(name: str, source: str, value: object, *, strict: bool) -> object:
    """The value in its field's type. `strict` refuses texts for numbers (explicit values)."""
    expected = _OPTIONS[name].expected
    if name in ("memory", "host_memory"):
        if not isinstance(value, str | int):
            raise OptionError(source, value, expected)
        return parse_size(value, source)
    if name == "model" and isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        checked: object = msgspec.convert(value, _TYPES[name], strict=strict)
    except msgspec.ValidationError as error:
        raise OptionError(source, value, expected) from error
    # NaN passes every bound; an empty model would be taken for the directory one stands in; and
    # lax conversion reads the text "null" as None.
    refused = checked is None or checked == ""
    if isinstance(checked, float):
        cold = name == "temperature" and 0 < checked < LEAST_TEMPERATURE
        refused = cold or not math.isfinite(checked)
    if refused:
        raise OptionError(source, value, expected)
    return checked
