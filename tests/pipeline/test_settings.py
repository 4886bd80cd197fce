from __future__ import annotations

import math

import pytest

from pipeline.settings import DEFAULT_CONTEXT, Settings, parse_size
from routing.errors import OptionError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("200MiB", 200 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1.1 GB", 1_100_000_000),
        ("2GiB", 2**31),
        ("64kib", 65536),
        ("3KB", 3000),
        ("3MB", 3_000_000),
        ("17B", 17),
        (" 4096 ", 4096),
        (4096, 4096),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "nonsense",
    [
        *("", "MiB", "lots", "-1MB", "0", "0.0GB", "0.1B", "1e9", "1,5GB", "12 34", "5TB", "200M"),
        *("nan", "inf", "1_000", "٣MB", "9" * 30, "1.2.3GB", "200 i B"),
        *(0, -5, True, 2**70),
    ],
)
def test_sizes_that_are_none(nonsense: str | int) -> None:
    with pytest.raises(OptionError) as caught:
        parse_size(nonsense, "PACELINE_MEMORY")
    assert caught.value.option == "PACELINE_MEMORY"
    assert caught.value.given == nonsense
    assert "200MiB" in str(caught.value)


def test_defaults_need_no_environment() -> None:
    settings = Settings.from_environment({})
    assert settings == Settings()
    assert settings.memory is None
    assert settings.temperature == 0.0
    assert settings.seed is None, "each request draws its own"


def test_every_variable_is_read() -> None:
    environment = {
        "PACELINE_MODEL": "some/model",
        "PACELINE_MEMORY": "200MiB",
        "PACELINE_HOST_MEMORY": "1GB",
        "PACELINE_MAX_TOKENS": "12",
        "PACELINE_CTX_SIZE": "345",
        "PACELINE_SEED": "6",
        "PACELINE_TEMP": "0.7",
        "PACELINE_SESSIONS": "8",
        "PACELINE_QUEUE": "9",
        "PACELINE_DEVICE": "simulated",
        "PACELINE_SUBSTITUTE": "nf4",
        "PACELINE_DRAFT_AHEAD": "false",
        "PACELINE_OVERLAP": "false",
        "PACELINE_LINK_GBPS": "2.5",
    }
    assert Settings.from_environment(environment) == Settings(
        model="some/model",
        memory=200 * 2**20,
        host_memory=10**9,
        max_tokens=12,
        context=345,
        seed=6,
        temperature=0.7,
        sessions=8,
        queue=9,
        device="simulated",
        substitute="nf4",
        draft_ahead=False,
        overlap=False,
        link_gbps=2.5,
    )


def test_explicit_values_win_and_none_is_not_given() -> None:
    environment = {"PACELINE_MEMORY": "1GB", "PACELINE_SEED": "5", "PACELINE_TEMP": " "}
    settings = Settings.from_environment(environment, memory="2GB", seed=None, temperature=1)
    assert settings.memory == 2 * 10**9
    assert settings.seed == 5
    assert settings.temperature == 1.0


def test_an_explicit_value_hides_a_bad_variable() -> None:
    assert Settings.from_environment({"PACELINE_SEED": "x"}, seed=1).seed == 1


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [
        ("max_tokens", "--max-tokens", 0),
        ("max_tokens", "--max-tokens", -3),
        ("max_tokens", "--max-tokens", "5"),
        ("max_tokens", "--max-tokens", True),
        ("context", "--ctx-size", 0),
        ("seed", "--seed", -1),
        ("seed", "--seed", 1.5),
        ("temperature", "--temp", -0.1),
        ("temperature", "--temp", 0.009),
        ("temperature", "--temp", math.nan),
        ("temperature", "--temp", math.inf),
        ("sessions", "--sessions", 0),
        ("queue", "--queue", 0),
        ("device", "--device", "tpu"),
        ("substitute", "--substitute", "int5"),
        ("overlap", "--overlap", "no"),
        ("link_gbps", "--link-gbps", 0),
        ("link_gbps", "--link-gbps", 1e-300),
        ("link_gbps", "--link-gbps", math.nan),
        ("memory", "--memory", "plenty"),
        ("memory", "--memory", 1.5),
        ("host_memory", "--host-memory", -1),
        ("model", "--model", ""),
    ],
)
def test_bad_values_name_the_option(name: str, flag: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        Settings.from_environment({}, **{name: value})
    assert caught.value.option == flag
    assert caught.value.given is value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PACELINE_SEED", "two"),
        ("PACELINE_SESSIONS", "null"),
        ("PACELINE_TEMP", "nan"),
        ("PACELINE_LINK_GBPS", "-1"),
        ("PACELINE_MEMORY", "0"),
        ("PACELINE_DEVICE", "cuda:9"),
    ],
)
def test_bad_variables_are_named(variable: str, value: str) -> None:
    with pytest.raises(OptionError) as caught:
        Settings.from_environment({variable: value})
    assert caught.value.option == variable
    assert caught.value.given == value


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(OptionError, match="memroy"):
        Settings.from_environment({}, memroy="1GB")


def test_host_memory_is_refused_where_nothing_is_staged() -> None:
    with pytest.raises(OptionError, match="--host-memory"):
        Settings.from_environment({}, device="cpu", host_memory="1GB")
    settings = Settings.from_environment({}, host_memory="1GB")
    with pytest.raises(OptionError, match="use --memory"):
        settings.refuse_host_memory("cpu")
    Settings.from_environment({}).refuse_host_memory("cpu")
    assert Settings.from_environment({}, device="simulated", host_memory=7).host_memory == 7


def test_context_for_a_model() -> None:
    assert Settings().context_for(8192) == DEFAULT_CONTEXT
    assert Settings().context_for(512) == 512
    assert Settings(context=100).context_for(512) == 100
    with pytest.raises(OptionError, match="512"):
        Settings(context=513).context_for(512)
