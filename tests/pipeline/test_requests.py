"""The edge: every option's range, what a refusal says, and that the same wishes look the same."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pipeline.options import NAMES, RequestOptions
from pipeline.requests import LONGEST_STOP, MOST_STOPS, check_options, make_request
from pipeline.settings import Settings
from routing.errors import OptionError
from routing.messages import Request, Sampling
from stages.tokenizer import Tokenizer

VOCAB = 50
NAN, INF = float("nan"), float("inf")


def ask(**options: Any) -> Request:
    return asked(options)


def asked(
    options: dict[str, Any], settings: Settings | None = None, *, readable: bool = True
) -> Request:
    return make_request(
        7,
        [1, 2, 3],
        None,
        options,
        settings=Settings() if settings is None else settings,
        tokenizer=cast(Tokenizer, object()) if readable else None,
        vocab=VOCAB,
        context=100,
        stop_ids=(9, 4),
    )


def sampling(**options: Any) -> Sampling:
    """How tokens are chosen, above temperature 0 unless that is an option."""
    return ask(**{"temperature": 1.0, "seed": 0, **options}).sampling


NUMBERS = [
    ("temperature", "0 or a number from 0.01 to 100", [0, 0.01, 1, 100.0], [-1, 0.001, 101]),
    ("top_p", "a number above 0, at most 1", [1e-9, 0.5, 1], [0, -0.5, 1.001]),
    ("min_p", "a number from 0 to 1", [0, 0.05, 1], [-0.1, 1.1]),
    ("typical_p", "a number above 0, at most 1", [0.2, 1.0], [0.0, 2]),
    (
        "repetition_penalty",
        "a number from 0.01 to 100",
        [0.01, 1, 1.3, 100],
        [0, -1.2, 1e-320, 101],
    ),
    ("presence_penalty", "a number from -2 to 2", [-2, 0, 2.0], [-2.1, 3]),
    ("frequency_penalty", "a number from -2 to 2", [-2, 0, 2.0], [-2.1, 3]),
]


@pytest.mark.parametrize(("option", "expected", "good", "bad"), NUMBERS)
def test_numbers(option: str, expected: str, good: list[float], bad: list[Any]) -> None:
    for value in good:
        found = getattr(sampling(**{option: value}), option)
        assert found == value and type(found) is float
    for value in (*bad, NAN, INF, -INF, 10**400, True, False, "1", [1], b"1"):
        with pytest.raises(OptionError) as refused:
            sampling(**{option: value})
        assert (refused.value.option, refused.value.given) == (option, value)
        assert str(refused.value) == f"{option} was {value!r}; expected {expected}."


WHOLE = [
    ("max_tokens", "a whole number of at least 1", [1, 20], [0, -1]),
    ("seed", "a whole number of at least 0", [0, 2**63], [-1]),
    ("top_k", "a whole number of at least 0", [0, 1, VOCAB - 1], [-1]),
]


@pytest.mark.parametrize(("option", "expected", "good", "bad"), WHOLE)
def test_whole_numbers(option: str, expected: str, good: list[int], bad: list[Any]) -> None:
    for value in good:
        request = ask(**{"temperature": 1.0, option: value})
        assert getattr(request if option == "max_tokens" else request.sampling, option) == value
    for value in (*bad, 1.0, NAN, True, "1", [1]):
        with pytest.raises(OptionError) as refused:
            ask(**{option: value})
        assert str(refused.value) == f"{option} was {value!r}; expected {expected}."


@pytest.mark.parametrize("option", ["banned_tokens", "allowed_tokens", "stop_token_ids"])
def test_token_ids(option: str) -> None:
    for value in (5, "5", b"5", {5: 1}, 1.5):
        with pytest.raises(
            OptionError, match=rf"^{option} was .*; expected token ids, in a list\.$"
        ):
            ask(**{option: value})
    for token in (-1, VOCAB, 1.0, True, "1", None):
        with pytest.raises(
            OptionError, match=rf"^{option} was .*; expected token ids from 0 to 49"
        ):
            ask(**{option: [3, token]})


def test_tokens_named_twice_are_named_once_and_in_order() -> None:
    assert sampling(banned_tokens=[7, 3, 7]).banned == (3, 7)
    assert sampling(allowed_tokens=iter((7, 3, 7))).allowed == (3, 7)
    assert sampling(logit_bias={7: 1, 3: -2.5, 5: 0}).logit_bias == ((3, -2.5), (7, 1.0))
    assert ask(stop_token_ids={30, 4}).stop_ids == (4, 9, 30), "added to the model's own"
    assert ask(stop=["b", "a", "b"]).stop == ("a", "b")


def test_some_token_must_be_left_to_choose() -> None:
    assert len(sampling(banned_tokens=range(1, VOCAB)).banned) == VOCAB - 1
    with pytest.raises(
        OptionError, match=r"^banned_tokens was 'every token'; expected at least one"
    ):
        sampling(banned_tokens=range(VOCAB))
    both = sampling(allowed_tokens=[1, 2, 3], banned_tokens=[2, 8])
    assert (both.allowed, both.banned) == ((1, 3), ())
    for banned, allowed in (([1, 2], [2, 1]), ([], []), ([0], [0])):
        with pytest.raises(
            OptionError, match=r"^allowed_tokens was .* one token that is not banned"
        ):
            sampling(allowed_tokens=allowed, banned_tokens=banned)
    everything = sampling(allowed_tokens=range(VOCAB), banned_tokens=[2])
    assert (everything.allowed, everything.banned) == (None, (2,))


@pytest.mark.parametrize("bias", [[(1, 2)], 5, "1=2", {"1": 2}, {VOCAB: 1}, {True: 1}, {-1: 1}])
def test_a_bias_of_the_wrong_kind(bias: object) -> None:
    with pytest.raises(OptionError, match=r"^logit_bias was .*; expected .*token ids"):
        ask(logit_bias=bias)


@pytest.mark.parametrize("bias", [100.5, -101, -INF, INF, NAN, True, "1", None])
def test_a_bias_out_of_range(bias: object) -> None:
    with pytest.raises(OptionError) as refused:
        ask(logit_bias={3: bias})
    assert str(refused.value) == f"logit_bias was {bias!r}; expected a number from -100 to 100."


def test_stop_strings() -> None:
    assert ask(stop="END").stop == ("END",)
    assert ask(stop=[]).stop == ask(stop=None).stop == ()
    most = [str(number) for number in range(MOST_STOPS)]
    assert len(ask(stop=[*most, *most]).stop) == MOST_STOPS
    assert ask(stop="x" * LONGEST_STOP).stop
    stop: Any
    for stop in ("", ["a", ""], [1], [None], ["x" * (LONGEST_STOP + 1)]):
        with pytest.raises(
            OptionError, match=r"^stop was .*; expected texts of 1 to 256 characters"
        ):
            ask(stop=stop)
    for stop in (5, {"a": 1}, b"a"):
        with pytest.raises(OptionError, match=r"^stop was .*; expected a text or texts, in a list"):
            ask(stop=stop)
    with pytest.raises(OptionError, match=r"^stop was '17 texts'; expected at most 16\.$"):
        ask(stop=[*most, "one more"])
    with pytest.raises(OptionError, match="UTF-8"):
        ask(stop="a\udcff")


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(
        OptionError, match=r"^stop was 'END'; expected none: this model has no token"
    ):
        asked({"stop": "END"}, readable=False)
    assert asked({"stop": ()}, readable=False).stop == ()


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, None), (False, None), (True, 0), (0, 0), (1, 1), (20, 20)],
)
def test_logprobs(given: object, found: int | None) -> None:
    assert ask(logprobs=given).logprobs == found


@pytest.mark.parametrize("given", [-1, 21, 1.0, "1", [1]])
def test_logprobs_out_of_range(given: object) -> None:
    with pytest.raises(OptionError) as refused:
        ask(logprobs=given)
    assert str(refused.value) == f"logprobs was {given!r}; expected a whole number from 0 to 20."


def test_no_more_tokens_are_named_than_there_are() -> None:
    assert check_options({"logprobs": 20}, Settings(), vocab=8).logprobs == 8


def test_an_unknown_option_is_named_and_the_known_are_listed() -> None:
    with pytest.raises(OptionError) as refused:
        ask(topk=5)
    assert str(refused.value) == f"topk was 5; expected one of {', '.join(NAMES)}."
    assert set(NAMES) == set(RequestOptions.__annotations__)


NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "typical_p": 1.0,
    "repetition_penalty": 1,
    "presence_penalty": -0.0,
    "frequency_penalty": 0,
    "logit_bias": {3: 0.0},
    "banned_tokens": [],
    "allowed_tokens": range(VOCAB),
}


@pytest.mark.parametrize("option", NEUTRAL)
@pytest.mark.parametrize("value", ["neutral", None])
def test_an_option_that_changes_nothing_leaves_greedy_decoding_plain(
    option: str, value: object
) -> None:
    request = ask(**{option: NEUTRAL[option] if value else None})
    assert request.sampling.plain
    assert sampling(**{option: NEUTRAL[option]}) == sampling()


FILTERS: dict[str, Any] = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9}
OTHERS: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1},
    "banned_tokens": [3],
    "allowed_tokens": [3],
}


def test_filters_of_sampled_tokens_change_nothing_at_temperature_zero() -> None:
    assert ask(**FILTERS).sampling.plain
    for option, value in FILTERS.items():
        assert getattr(sampling(**{option: value}), option) == value
    for option, value in OTHERS.items():
        assert not ask(**{option: value}).sampling.plain
    assert sampling(top_k=VOCAB) == sampling(top_k=VOCAB + 9) == sampling()
    for option in FILTERS:
        with pytest.raises(OptionError):  # and they are checked all the same
            ask(**{option: -1})


def test_settings_are_the_defaults() -> None:
    given = Settings(max_tokens=11, temperature=0.5, seed=3)
    request = asked({}, given)
    assert (request.max_tokens, request.sampling) == (11, Sampling(0.5, 3))
    request = asked({"max_tokens": 5, "temperature": 0, "seed": 0}, given)
    assert (request.max_tokens, request.sampling) == (5, Sampling())
    assert asked({"max_tokens": None, "temperature": None, "seed": None}, given).max_tokens == 11
    assert ask(max_tokens=1000).max_tokens == 97, "what the context has left"
    drawn = {ask().sampling.seed for _ in range(5)}
    assert len(drawn) == 5
