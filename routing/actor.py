"""What an actor is."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Actor(ABC):
    """One independent loop that takes messages and gives messages.

    The contract of `run`:

    - It receives until EndOfMail and then returns. That is the only way to stop an actor in
      good order; nothing calls into it.
    - On the way out, in good order, on an error or on a cancellation, it closes every end that
      it owns: its senders, so that the actors after it end in their turn, and its receivers, so
      that whoever sends to it gets an error instead of waiting for ever.
    - A failure that concerns one request goes on as a message or ends that session. What
      escapes from `run` is the actor's death and closes the engine.
    - Blocking work is done in worker threads, and work that writes to a store is waited for
      even when the actor is cancelled.

    An actor is run once, as one task of a task group. Actors know mailboxes and stores, never
    each other.
    """

    name: str
    """What errors and traces call it."""

    @abstractmethod
    async def run(self) -> None:
        """Receive until EndOfMail, then close all ends and return."""
