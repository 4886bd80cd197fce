"""What of an answer's text is shown, and when: never a stop string, never a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.text import AnswerText
from stages.tokenizer import Decoder, Tokenizer
from tests.made import make_model, make_tokenizer


class Pieces:
    """A decoder whose token n is the nth of these texts; `rest` is what it holds to the end."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self._pieces, self._rest = pieces, rest

    def add(self, tokens: Sequence[int]) -> str:
        return "".join(self._pieces[token] for token in tokens)

    def flush(self) -> str:
        return self._rest


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("made") / "model"
    make_tokenizer(make_model(path, "llama", layers=1, dtype=torch.float32))
    loaded = Tokenizer.load(path)
    assert loaded is not None
    return loaded


def cut(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, int | None]:
    """The plain way: the text up to the first stop string, and the piece that completes one."""
    text = ""
    for number, piece in enumerate(pieces):
        text += piece
        starts = [text.find(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], number
    return text, None


def held(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may yet become a stop string."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


def stream(
    decoder: Decoder | Pieces | None, tokens: Sequence[int], stops: Sequence[str]
) -> tuple[list[str], int | None]:
    """What is shown after each token and at the end, and which token ended the answer."""
    text = AnswerText(cast("Decoder | None", decoder), stops)
    shown: list[str] = []
    for number, token in enumerate(tokens):
        if text.add(token):
            return [*shown, text.flush()], number
        shown.append(text.take())
    return [*shown, text.flush()], None


FEW = st.text("ab", min_size=1, max_size=5)


@given(pieces=st.lists(st.text("abc", max_size=4), max_size=12), stops=st.lists(FEW, max_size=4))
def test_the_shown_text_is_the_whole_text_up_to_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    right, ends = cut(pieces, stops)
    shown, ended = stream(Pieces(pieces), range(len(pieces)), stops)
    assert ("".join(shown), ended) == (right, ends)
    for count in range(len(pieces) if ends is None else ends):
        soon, whole = "".join(shown[: count + 1]), "".join(pieces[: count + 1])
        assert right.startswith(soon), "what is shown is never taken back"
        assert soon == whole[: len(whole) - held(whole, stops)], "and nothing else is held back"


CHARACTERS = st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}<")


@given(text=st.text(st.one_of(CHARACTERS, st.sampled_from("aé漢😀")), max_size=20), data=st.data())
def test_characters_and_stops_over_several_tokens(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    """The made tokenizer's tokens are bytes, so that almost everything lies across tokens."""
    places = st.integers(0, len(text))
    slices = [sorted(data.draw(st.tuples(places, places))) for _ in range(2)]
    stops = [text[a:b] for a, b in slices if a < b]
    right, _ = cut(list(text), stops)
    shown, _ = stream(tokenizer.decoder(), tokenizer.encode(text), stops)
    assert "".join(shown) == right
    assert not any("\N{REPLACEMENT CHARACTER}" in one for one in shown)


@pytest.mark.parametrize("pieces", [["one EN", "D two"], ["one E", "N", "D two"], ["one END two"]])
def test_a_stop_string_over_tokens(pieces: list[str]) -> None:
    shown, ended = stream(Pieces(pieces), range(len(pieces)), ["END"])
    assert "".join(shown) == "one " and ended == len(pieces) - 1
    assert all("E" not in one for one in shown)


def test_one_that_never_completes_is_given_out() -> None:
    shown, ended = stream(Pieces(["a EN", "D", "E", "N"]), range(4), ["ENDING"])
    assert (shown, ended) == (["a ", "", "END", "", "EN"], None)


def test_the_first_of_overlapping_candidates() -> None:
    assert stream(Pieces(["xa", "ab", "abc"]), range(3), ["aabb", "bab", "abc"]) == (
        ["x", "", "aa"],
        2,
    )
    # Complete with the same token: the one that starts first.
    assert stream(Pieces(["xabc"]), range(1), ["b", "abc"]) == (["x"], 0)


def test_nothing_shows_after_a_stop() -> None:
    text = AnswerText(cast(Decoder, Pieces(["a.", "b"], rest="c")), ["."])
    assert text.add(0) and text.stopped
    assert text.take() == "a"
    assert text.add(1), "it stays stopped"
    assert (text.take(), text.flush(), text.flush()) == ("", "", "")


def test_a_stop_in_what_the_decoder_held_to_the_end() -> None:
    text = AnswerText(cast(Decoder, Pieces(["ab"], rest="c.d")), ["c."])
    assert not text.add(0)
    assert text.flush() == "ab" and text.stopped


def test_a_character_cut_short_shows_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a😀")[:-1]
    assert stream(tokenizer.decoder(), tokens, [])[0] == ["a", "", "", "", "\ufffd"]


def test_an_emoji_as_a_stop(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("aé😀b")
    shown, ended = stream(tokenizer.decoder(), tokens, ["😀"])
    assert "".join(shown) == "aé" and ended == len(tokens) - 2


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert stream(None, range(3), []) == (["", "", "", ""], None)


class Counted(str):
    """A text that counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, key: object) -> str:
        Counted.looks += 1
        return super().__getitem__(key)  # type: ignore[index]


@pytest.mark.parametrize("letter", ["a", "b", "c"])
def test_the_work_grows_with_the_length_of_the_answer(letter: str) -> None:
    """Also where a long stop string is always about to be complete."""
    Counted.looks = 0
    shown, ended = stream(Pieces(["a" * 50 + letter] * 100), range(100), [Counted("a" * 200 + "b")])
    assert len("".join(shown)) == 51 * 100 and ended is None
    assert Counted.looks <= 4 * (51 * 100 + 201)
