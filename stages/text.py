"""The text of an answer under way, up to the first stop string.

What is shown can never be taken back, so text that may yet turn out to begin a stop string is held
until that is decided. How much of each stop string the text ends in is carried from character to
character (Knuth, Morris and Pratt 1977), so the work grows with the answer's length and not with
its square.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.tokenizer import Decoder


class AnswerText:
    """The text of one session's tokens, given one by one. The committer owns it.

    Where several stop strings are complete once a token is decoded, the one that starts first
    counts: the answer ends where it starts.
    """

    def __init__(self, decoder: Decoder | None, stops: Sequence[str] = ()) -> None:
        """`decoder` is the session's own; None for a model without a tokenizer, which has no text.

        Stop strings are not empty.
        """
        self._decoder = decoder
        self._watches = tuple(_Watch(stop) for stop in stops)
        self._kept: list[str] = []
        self._length = 0  # in characters, as are the next two
        self._taken = 0
        self._end: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete. Then there is no more text, whatever is added."""
        return self._end is not None

    def add(self, token: int) -> bool:
        """Take the next token; whether a stop string is complete now.

        Raises what the decoder raises.
        """
        if self._decoder is not None and not self.stopped:
            self._grow(self._decoder.add((token,)))
        return self.stopped

    def take(self) -> str:
        """The text that may be shown and was not given out yet: whole characters only."""
        end = self._end
        if end is None:
            end = self._length - max((watch.matched for watch in self._watches), default=0)
        kept = "".join(self._kept)
        count = end - self._taken
        self._kept = [] if self.stopped else [kept[count:]]
        self._taken = end
        return kept[:count]

    def flush(self) -> str:
        """As `take`, at the end of the answer: also what was held back, if no stop string is hit.

        Bytes that never became a character show as U+FFFD. Raises what the decoder raises.
        """
        if self._decoder is not None and not self.stopped:
            self._grow(self._decoder.flush())
            for watch in self._watches:
                watch.matched = 0
        return self.take()

    def _grow(self, text: str) -> None:
        for offset, character in enumerate(text, start=self._length + 1):
            for watch in self._watches:
                if watch.step(character):
                    start = offset - len(watch.stop)
                    self._end = start if self._end is None else min(self._end, start)
        self._kept.append(text)
        self._length += len(text)


class _Watch:
    """One stop string, and how many of its first characters the text now ends in."""

    __slots__ = ("_back", "matched", "stop")

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string would end every answer"
        self.stop = stop
        self.matched = 0
        # back[k - 1]: the longest proper prefix of stop[:k] that is also its end.
        self._back = [0]
        for character in stop[1:]:
            self._back.append(self._longer(self._back[-1], character))

    def step(self, character: str) -> bool:
        """Move on by one character; whether the stop string is complete with it."""
        self.matched = self._longer(self.matched, character)
        if self.matched < len(self.stop):
            return False
        self.matched = self._back[-1]
        return True

    def _longer(self, matched: int, character: str) -> int:
        """How much is matched after one character more, where `matched` was; less than all."""
        while matched and self.stop[matched] != character:
            matched = self._back[matched - 1]
        return matched + (self.stop[matched] == character)
