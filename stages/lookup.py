"""Prompt lookup: what followed the last time that the text went like this.

Agents and code editing repeat their input, and a copy costs no draft time (Saxena 2023, prompt
lookup decoding). A text is indexed by its pairs of tokens (or by each token, where a guess costs
even less than that); of the latest places where a pair stood, the one that agrees with the text
before it for longest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

PLACES = 8
"""Places remembered of a pair (or token), the latest ones."""
LONGEST_MATCH = 8
"""Tokens compared; a longer agreement is no better sign."""


class Lookup:
    """The index of one session's tokens, prompt and answer. Grows as the answer does.

    least: tokens that must agree for a place to be found; places: how many are remembered.
    """

    def __init__(self, least: int = 2, places: int = PLACES) -> None:
        self._least, self._places = least, places
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        """Tokens indexed."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the tokens that came next."""
        for token in tokens:
            # A pair counts once something has followed it, so that a text never finds its own end.
            if len(self._tokens) >= self._least:
                places = self._after.setdefault(tuple(self._tokens[-self._least :]), [])
                places.append(len(self._tokens))
                del places[: -self._places]
            self._tokens.append(token)

    def find(self, below: Sequence[int], most: int) -> tuple[int, tuple[int, ...]]:
        """What followed an earlier stretch like the end of the text with `below` behind it.

        Returns how many tokens agree (`least` to LONGEST_MATCH; 0 where there is nothing) and at
        most `most` tokens that followed.
        """
        return next(iter(self.branches(below, most, 1)), (0, ()))

    def branches(
        self, below: Sequence[int], most: int, branches: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        """As `find`, up to `branches` of them that begin with different tokens.

        Those with the longest agreement first, and of equals the latest.
        """
        reach = max(0, LONGEST_MATCH - len(below))
        end = [*self._tokens[-reach:], *below] if reach else [*below]
        end = end[-LONGEST_MATCH:]
        found: list[tuple[int, int]] = []
        for place in self._after.get(tuple(end[-self._least :]), ()):
            agree = self._least
            while (
                agree < min(len(end), place) and self._tokens[place - agree - 1] == end[-agree - 1]
            ):
                agree += 1
            found.append((agree, place))
        first: dict[int, tuple[int, tuple[int, ...]]] = {}
        for agree, place in sorted(found, reverse=True):
            if len(first) < branches:
                following = tuple(self._tokens[place : place + most])
                first.setdefault(following[0], (agree, following))
        return list(first.values())
