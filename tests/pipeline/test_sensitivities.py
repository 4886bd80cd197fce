"""What substitutes of each layer cost is measured at a model's first load, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import torch

from pipeline import preparation, sensitivities
from pipeline.calibration import LEAST_WEIGHTS
from pipeline.planner import Plan, plan
from pipeline.predictions import Compute
from pipeline.preparation import Prepared, look, prepare
from pipeline.sensitivities import Sensitivities
from pipeline.settings import Settings
from stages.loading import OpenedModel
from stages.progress import SilentProgress
from stages.sensitivity import Sensitivity
from tests.made import make_model

LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model"
    return make_model(path, "llama", layers=LAYERS, dtype=torch.float32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, models that are never too small, and drafts that pay: all plans have some."""
    quick = Compute(draft_layer_s=0.0)
    monkeypatch.setattr(preparation, "calibrated", lambda *_: quick)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sensitivities, "LEAST_WEIGHTS", 1)
    return tmp_path / "cache"


class Measured:
    """Counts measurements, and notes what is planned with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.planned: list[Sequence[float] | None] = []
        costs = Sensitivity.costs

        def measure(measuring: Sensitivity, parts: Any) -> tuple[float, ...] | None:
            self.count += 1
            return costs(measuring, parts)

        def planning(*given: Any, sensitivity: Sequence[float] | None, **more: Any) -> Plan:
            self.planned.append(sensitivity)
            return plan(*given, sensitivity=sensitivity, **more)

        monkeypatch.setattr(Sensitivity, "costs", measure)
        monkeypatch.setattr(preparation, "plan", planning)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def asked(model: Path, **more: object) -> Settings:
    given = {"model": str(model), "context": 64, "memory": "64MiB", "link_gbps": 4.0}
    return Settings.from_environment({}, **given, **more)


async def load(model: Path, substitute: str = "int8") -> Prepared:
    """Load it, and close it again."""
    prepared = await prepare(asked(model, substitute=substitute), SilentProgress())
    prepared.runtime.close()
    return prepared


def files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


async def test_it_is_measured_once_and_then_planned_with(
    model: Path, cache: Path, measured: Measured
) -> None:
    first, second = await load(model), await load(model, "int4")
    assert measured.count == 1
    assert first.runtime.sensitivity is not None and second.runtime.sensitivity is None
    opened, _ = look(asked(model), SilentProgress())
    opened.close()
    assert measured.planned == [None, first.runtime.sensitivity, first.runtime.sensitivity]
    (file,) = files(cache)
    assert file.parent == cache / "sensitivities"
    assert len(first.runtime.sensitivity) == LAYERS


async def test_looking_measures_nothing(model: Path, cache: Path, measured: Measured) -> None:
    opened, _ = look(asked(model), SilentProgress())
    opened.close()
    assert measured.planned == [None] and not files(cache)


@pytest.mark.parametrize("substitute", ["none", "lookup"])
async def test_where_there_are_no_substitutes_nothing_is_measured(
    model: Path, cache: Path, measured: Measured, substitute: str
) -> None:
    await load(model, substitute)
    assert measured.count == 0 and not files(cache)
    await load(model)
    assert measured.count == 1 and len(files(cache)) == 1


async def test_each_model_has_its_own(
    model: Path, tmp_path: Path, cache: Path, measured: Measured
) -> None:
    other = make_model(tmp_path / "other", "llama", layers=LAYERS, dtype=torch.float32, seed=1)
    kept = [(await load(path)).runtime.sensitivity for path in (model, other)]
    assert kept[0] != kept[1]
    assert len(files(cache)) == measured.count == 2
    await load(model)
    await load(other)
    assert measured.planned == [None, None, *kept]


async def test_a_model_that_was_moved_is_the_same(
    model: Path, tmp_path: Path, measured: Measured
) -> None:
    moved = make_model(tmp_path / "moved", "llama", layers=LAYERS, dtype=torch.float32)
    await load(model)
    await load(moved)
    assert measured.count == 1


async def test_another_way_of_measuring_measures_anew(
    model: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(model)
    monkeypatch.setattr(sensitivities, "_VERSION", 1000)
    await load(model)
    assert measured.count == 2


WRONG = [
    b"",
    b"not json",
    b"{}",
    b"[]",
    b"[1, 2]",
    b"[1, 2, 3, 4]",
    b"[1, 2, -1]",
    b"[1, 2, null]",
    b"[1, 2, 1e999]",
    b"[1, 2, NaN]",
    b'[1, 2, "3"]',
    b"[1, 2, 3",
    b"\xff\xfe",
]


@pytest.mark.parametrize("content", WRONG, ids=str)
async def test_a_file_that_is_damaged_or_not_ours_is_replaced(
    model: Path, cache: Path, measured: Measured, content: bytes
) -> None:
    await load(model)
    (file,) = files(cache)
    sound = file.read_bytes()
    file.write_bytes(content)
    await load(model)
    assert measured.planned == [None, None] and measured.count == 2
    assert files(cache) == [file] and file.read_bytes() == sound


@pytest.mark.parametrize("costs", [(1.0, 2.0, 3.0), (0.0, 0.0, 0.0)])
async def test_a_file_that_is_sound_is_believed(
    model: Path, cache: Path, measured: Measured, costs: tuple[float, ...]
) -> None:
    """So that the test above is one of what is wrong with its files."""
    await load(model)
    (file,) = files(cache)
    file.write_bytes(msgspec.json.encode(costs))
    await load(model)
    assert measured.planned == [None, costs] and measured.count == 1


@pytest.mark.parametrize("place", ["cache", "cache/sensitivities"])
async def test_a_cache_that_cannot_be_written_costs_a_measurement_at_most(
    model: Path, tmp_path: Path, measured: Measured, place: str
) -> None:
    """Something else lies there. Where it is known beforehand nothing is measured."""
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("a file")
    await load(model)
    await load(model)
    assert measured.count == (0 if place == "cache" else 2)
    assert measured.planned == [None, None]
    assert files(tmp_path) == [tmp_path / place]


async def test_a_disk_that_is_full_leaves_nothing_half_written(
    model: Path, cache: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeline.whole_file.os.replace", full)
    await load(model)
    assert measured.count == 1 and not files(cache)


async def test_a_small_model_has_answered_before_it_pays(
    model: Path, cache: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivities, "LEAST_WEIGHTS", LEAST_WEIGHTS)
    await load(model)
    assert measured.count == 0 and not files(cache)


async def test_what_is_no_number_is_not_kept(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sensitivity, "costs", lambda *_: None)
    assert (await load(model)).runtime.sensitivity is None
    assert not files(cache)


def test_what_is_kept_is_known_at_once(model: Path) -> None:
    with closing(OpenedModel(model)) as opened:
        known = Sensitivities(opened)
        assert known.wanted and known.layers is None
        known.keep((1.0, 2.0, 3.0))
        assert not known.wanted and known.layers == (1.0, 2.0, 3.0)
        assert Sensitivities(opened).layers == known.layers
