from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stages.lookup import LONGEST_MATCH, PLACES, Lookup

TOKENS = st.integers(0, 2)
TEXTS = st.lists(TOKENS, max_size=50)
BELOW = st.lists(TOKENS, max_size=LONGEST_MATCH + 2)
MOST = st.integers(1, 20)


def indexed(text: Sequence[int], **kind: int) -> Lookup:
    lookup = Lookup(**kind)
    lookup.extend(text)
    return lookup


def agreement(text: Sequence[int], place: int, end: Sequence[int]) -> int:
    """How many tokens before `place` are the last ones of `end`."""
    agree = 0
    while agree < min(place, len(end)) and text[place - agree - 1] == end[-agree - 1]:
        agree += 1
    return min(agree, LONGEST_MATCH)


def naive(text: Sequence[int], below: Sequence[int], most: int) -> tuple[int, tuple[int, ...]]:
    """By looking at every place of the text that something follows."""
    whole = [*text, *below]
    every = [(agreement(text, place, whole), place) for place in range(2, len(text))]
    agree, place = max([one for one in every if one[0] >= 2][-PLACES:], default=(0, 0))
    return agree, tuple(text[place : place + most]) if agree else ()


@given(st.lists(TOKENS, max_size=2 * LONGEST_MATCH), BELOW, MOST)
def test_it_finds_what_trying_every_place_finds(
    text: list[int], below: list[int], most: int
) -> None:
    assert indexed(text).find(below, most) == naive(text, below, most)


@given(st.lists(TOKENS, min_size=LONGEST_MATCH, max_size=50), BELOW, MOST)
def test_it_finds_what_trying_every_place_finds_in_longer_texts(
    text: list[int], below: list[int], most: int
) -> None:
    assert indexed(text).find(below, most) == naive(text, below, most)


@given(st.lists(TEXTS, max_size=4), BELOW, MOST)
def test_a_text_that_came_in_parts_is_the_same_text(
    parts: list[list[int]], below: list[int], most: int
) -> None:
    lookup = Lookup()
    for part in parts:
        lookup.extend(part)
    text = [token for part in parts for token in part]
    assert len(lookup) == len(text)
    assert lookup.find(below, most) == indexed(text).find(below, most)


@given(st.integers(0, 30), MOST)
def test_a_text_never_finds_its_own_end(size: int, most: int) -> None:
    """No pair stands in it twice, so there is nothing else to find."""
    assert indexed(range(size)).find((), most) == (0, ())


@given(TEXTS, BELOW, MOST)
def test_where_something_agrees_something_follows(
    text: list[int], below: list[int], most: int
) -> None:
    agree, tokens = indexed(text).find(below, most)
    assert bool(agree) == bool(tokens)
    assert agree == 0 or 2 <= agree <= LONGEST_MATCH
    assert len(tokens) <= most


def test_a_short_text_is_found_as_well() -> None:
    assert indexed([9, 1, 2, 3, 9, 1, 2]).find((), 3) == (3, (3, 9, 1))


def test_the_longest_agreement_is_taken_and_of_equals_the_latest() -> None:
    text = [0, 1, 2, 50, 9, 1, 2, 51, 8, 1, 2, 52]
    assert indexed([*text, 0, 1, 2]).find((), 1) == (3, (50,))
    assert indexed([*text, 9, 1, 2]).find((), 1) == (3, (51,))
    assert indexed([*text, 7, 1, 2]).find((), 1) == (2, (52,))


def test_tokens_below_the_text_count_as_its_end() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert indexed(text).find((), 2) == (2, (3, 4))
    assert indexed(text).find((3,), 2) == (3, (4, 5))
    assert indexed(text).find((3, 7), 2) == (0, ())


def test_a_single_token_is_enough_where_that_was_asked_for() -> None:
    text = [7, 1, 8, 2, 8, 3, 7, 4, 8]
    assert indexed(text).find((), 2) == (0, ())
    assert indexed(text, least=1).find((), 2) == (1, (3, 7))
    assert indexed([8], least=1).find((), 2) == (0, ())
    assert indexed([*text, 2, 8], least=1).find((), 1) == (3, (3,))


def test_branches_begin_with_different_tokens_the_surest_first() -> None:
    text = [5, 8, 1, 6, 8, 2, 8, 1, 9, 8, 3, 0, 6, 8]
    found = indexed(text, least=1).branches((), 2, 9)
    assert found == [(2, (2, 8)), (1, (3, 0)), (1, (1, 9))]
    assert indexed(text, least=1).branches((), 2, 2) == found[:2]
    assert indexed(text, least=1, places=1).branches((), 2, 9) == [(1, (3, 0))]
    assert indexed(text, least=1).branches((), 2, 0) == []


@given(TEXTS, BELOW, MOST, st.integers(1, 3))
def test_the_first_of_the_branches_is_what_is_found(
    text: list[int], below: list[int], most: int, least: int
) -> None:
    lookup = indexed(text, least=least)
    found = lookup.branches(below, most, 4)
    assert lookup.find(below, most) == (found[0] if found else (0, ()))
    assert len({tokens[0] for _, tokens in found}) == len(found) <= 3


def test_old_places_of_a_pair_are_forgotten() -> None:
    text = [7, 1, 2, 30]
    for other in range(PLACES):
        text += [40 + other, 1, 2, 30]
    assert indexed([*text, 7, 1, 2]).find((), 1)[0] == 2
    assert indexed([*text[:-4], 7, 1, 2]).find((), 1)[0] == 3
