"""What a benchmark and the process of one arm say to each other: JSON lines over pipes.

The arm hears one Job and then Asks, and answers each with one reply. Its standard input's end is
the sign to go; so an arm never outlives the benchmark that started it.
"""

from __future__ import annotations

from typing import BinaryIO, Literal, TypeVar

import msgspec

from pipeline.settings import Settings
from tools.bench.rounds import PromptSweeps, Rounds

Kind = Literal[
    "paceline",
    "sequential",
    "no_ahead",
    "plain",
    "transformers",
    "transformers_resident",
    "transformers_assisted",
    "llamacpp",
]
"""The first four are ours, told apart by settings (arena.py). `transformers` leaves on the disk
what does not fit; the two after it hold all of the model."""


class Job(msgspec.Struct, frozen=True):
    """Which arm to be: `settings` name the model's directory and the budget.

    `scratch` is an empty directory for what the arm puts on the disk; the benchmark removes it.
    `gguf` is the model's file for llama.cpp.
    With `baseline` the arm only runs the model that it is given (a one-layer one), says what
    memory it holds then, and ends.
    """

    kind: Kind
    settings: Settings
    scratch: str
    baseline: bool = False
    gguf: str | None = None


class Ask(msgspec.Struct, frozen=True):
    """One request: a message to put through the chat template, or token ids as they are."""

    prompt: str | tuple[int, ...]
    max_tokens: int


class PlanFacts(msgspec.Struct, frozen=True):
    """What one of our arms has planned, and the tokens a second that it predicted by that.

    `streamed_weights` is their number, not their bytes.
    """

    step: str
    substitute: str | None
    width: int
    depth: int
    resident_bytes: int
    substituted_bytes: int
    streamed_weights: int
    direct_reads: bool | None
    tokens_per_s: float | None = None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The arm is ready for Asks. `plan` is None for other people's arms."""

    device: str
    plan: PlanFacts | None = None


class Baseline(msgspec.Struct, frozen=True, tag=True):
    """Bytes of anonymous memory that are held after a one-layer model."""

    anonymous: int


class Run(msgspec.Struct, frozen=True, tag=True):
    """One answered request.

    `decode_s` is the time from the first token to the last. `peak_bytes` is the most anonymous
    memory that the process has held so far, loading included. `first_tokens` came at once, with
    the first. `tau`, `rounds`, `ahead_kept` (see Answer), `spans`, `prompt_sweeps`,
    `bytes_per_sweep` and `raw_gbps` (the link's own bandwidth, measured beside this request) are
    our arms' only.
    """

    tokens: int
    token_ids: tuple[int, ...]
    ttft_s: float
    decode_s: float
    peak_bytes: int
    first_tokens: int = 1
    energy_j: float | None = None
    tau: float | None = None
    rounds: int | None = None
    ahead_kept: float | None = None
    spans: Rounds | None = None
    prompt_sweeps: PromptSweeps | None = None
    bytes_per_sweep: int | None = None
    raw_gbps: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first ones; None where none came after them."""
        after = self.tokens - self.first_tokens
        return after / self.decode_s if after > 0 and self.decode_s > 0 else None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The arm has ended with this error; `usage` if it was the caller's mistake."""

    message: str
    usage: bool


Reply = Loaded | Baseline | Run | Failed
Heard = TypeVar("Heard", Job, Ask)


class Conversation:
    """The arm's end of the pipes. Blocking."""

    def __init__(self, heard: BinaryIO, said: BinaryIO) -> None:
        self._heard, self._said = heard, said

    def hear(self, kind: type[Heard]) -> Heard | None:
        """The next message, or None when there will be no more."""
        line = self._heard.readline()
        return msgspec.json.decode(line, type=kind) if line else None

    def say(self, reply: Reply) -> None:
        """Send one reply."""
        self._said.write(msgspec.json.encode(reply) + b"\n")
        self._said.flush()
