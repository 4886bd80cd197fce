"""What actors tell each other.

Messages are frozen and carry ids, token ids and small numbers; tensors stay in the stores that
own them. A session has at most one message in the loop drafter -> verifier -> committer ->
drafter at any time.

Everywhere: `session` is the id of the request, `place` is its index in the stores (rows of KV,
scratch), from 0 to sessions - 1. msgspec does not validate what a constructor is given: values
from outside are validated at the edges, before a message is made of them.
"""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are chosen. Temperature 0 is greedy, whatever the seed.

    Applied in this order: logit_bias ((token, bias) pairs), allowed and banned tokens, then the
    penalties (repetition over prompt and answer, presence and frequency over the answer), then
    what applies above temperature 0 only: temperature, top_k, top_p, min_p, typical_p. The
    defaults change nothing.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None

    @property
    def plain(self) -> bool:
        """Whether the next token is just the largest logit: then no whole row is needed."""
        return msgspec.structs.replace(self, seed=0) == _PLAIN

    @property
    def looks_back(self) -> bool:
        """Whether a token's score depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


_PLAIN = Sampling()


class Request(msgspec.Struct, frozen=True):
    """One prompt to answer. At most `max_tokens` tokens; any of `stop_ids` ends the answer.

    `stop`: texts that end the answer and do not show in it. `logprobs`: None for none, else how
    many of the likeliest tokens to name beside each chosen one.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    @property
    def whole_rows(self) -> bool:
        """Whether the largest logit will not do, so that whole rows of logits are needed."""
        return not self.sampling.plain or self.logprobs is not None


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probabilities (natural) of the target at one place of the answer, before any sampling
    option: of the chosen `token`, and the likeliest (token, logprob) pairs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Batch(msgspec.Struct, frozen=True):
    """Committer -> caller: tokens of an answer, and the text that they complete.

    The text may lag behind the tokens. `logprobs` is as long as `tokens`, or empty when the
    request did not ask.
    """

    tokens: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


class Route(msgspec.Struct, frozen=True):
    """Which parent answers and how far to speculate.

    `width` is nodes a level, `depth` levels, `budget` draft nodes in all; `reasons` says, for
    people, why the route was chosen.
    """

    parent: str = "q16"
    width: int = 4
    depth: int = 8
    budget: int = 32
    reasons: tuple[str, ...] = ()


class Routed(msgspec.Struct, frozen=True):
    """Router -> drafter: a session has just been given its place."""

    session: int
    place: int
    route: Route


class SweepTimes(msgspec.Struct, frozen=True):
    """What a sweep of trees took, in seconds: `computed`, and `waited` for weights to arrive.

    `rows`: of all its trees; `cores`: seconds computed times the threads that did it.
    """

    rows: int
    computed: float
    waited: float
    cores: float


class DraftOrder(msgspec.Struct, frozen=True):
    """Committer -> drafter: draft from `token`, which will stand at `position`.

    `position` is also the number of rows committed. `sweep` is told of the round before, unless a
    prompt rode along.
    """

    session: int
    place: int
    token: int
    position: int
    sweep: SweepTimes | None = None


class Refill(msgspec.Struct, frozen=True):
    """Committer -> drafter -> verifier: compute the rows of the whole prefix anew.

    Needed where a longer context changes the rotary frequencies of rows already computed.
    """

    session: int
    place: int
    tokens: tuple[int, ...]


class Prefill(msgspec.Struct, frozen=True):
    """Drafter -> verifier: compute rows 0 to len(tokens) of a new session."""

    session: int
    place: int
    tokens: tuple[int, ...]


class Tree(msgspec.Struct, frozen=True):
    """Drafter -> verifier: a draft.

    Node 0 is the root, the committed token that stands at `position`, with parent -1; parents
    come before their children. `draft_s` is the time drafting took, in `steps` steps.
    """

    session: int
    place: int
    position: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_s: float
    steps: int


class Verdict(msgspec.Struct, frozen=True):
    """Verifier -> committer.

    `path` holds the accepted nodes from the root on, `tokens` the accepted draft tokens and
    then the bonus token, `drafted` how many nodes below the root the tree had. After a prompt
    (`prompt` true) the path is all of its rows and the bonus token is the only one. `logprobs`
    has one entry a token where the request asked for them. `sweep`: see DraftOrder.
    """

    session: int
    place: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    drafted: int
    prompt: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()
    sweep: SweepTimes | None = None


class Failed(msgspec.Struct, frozen=True):
    """Anywhere in the loop, and carried on to the committer, which ends the session."""

    session: int
    place: int
    stage: str
    problem: str


class PieceReady(msgspec.Struct, frozen=True):
    """Prefetcher -> verifier: piece `piece` stands in slot `slot`."""

    piece: int
    slot: int


class SlotFree(msgspec.Struct, frozen=True):
    """Verifier -> prefetcher: nothing reads slot `slot` any more."""

    slot: int


ToDrafter = Routed | DraftOrder | Refill
ToVerifier = Prefill | Refill | Tree | Failed
ToCommitter = Verdict | Failed
