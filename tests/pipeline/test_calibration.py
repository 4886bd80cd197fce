"""What this machine computes is measured once a day, and kept."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pipeline import calibration, preparation
from pipeline.calibration import COMPILED_LAYER_S, DRAFT_S, KEPT_S, LEAST_WEIGHTS, calibrated
from pipeline.predictions import Compute
from pipeline.preparation import look
from pipeline.settings import Settings
from stages.formats import FORMATS
from stages.product_rates import ProductRates
from stages.progress import Progress, SilentProgress
from stages.shapes import MatrixShape, ModelShape
from tests.made import make_model
from tests.stages.made_stages import made_shape

FORMS = ("int4", "int8")
RATES = ProductRates(full_gbps=7.0, gflops=42.0, low_gbps={"int4": 3.5, "int8": 6.5})


class Measured:
    """Stands in for measure_products and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.rates = RATES

    def __call__(self, name: str, forms: Sequence[str], progress: Progress) -> ProductRates:
        self.asked.append((name, tuple(forms)))
        return self.rates


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    made = Measured()
    monkeypatch.setattr(calibration, "measure_products", made)
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def shape(weights: int = LEAST_WEIGHTS) -> ModelShape:
    """Of a model that has so many weights, a multiple of 100, all of them in its head."""
    head = MatrixShape("lm_head.weight", 2, weights // 100, 100, 4 * weights)
    return msgspec.structs.replace(made_shape(), head=head)


def compute(dtype: str = "torch.float32", forms: Sequence[str] = FORMS) -> Compute:
    return calibrated(shape(), dtype, forms, SilentProgress())


def files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_what_was_measured_is_what_is_planned_with(measured: Measured) -> None:
    found, usual = compute(), Compute()
    assert measured.asked == [("float32", FORMS)]
    assert found.measured and not usual.measured
    assert (found.memory_gbps, found.gflops) == (7.0, 42.0)
    assert found.low_gbps == usual.low_gbps | RATES.low_gbps, "what was not measured is as usual"
    assert found.draft_s == DRAFT_S > usual.draft_s
    assert (found.flat_rows, found.layer_s) == (usual.flat_rows, usual.layer_s)


@pytest.mark.parametrize("part", [None, "avx2"])
def test_layers_besides_their_products_are_quicker_where_they_are_compiled(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, part: str | None
) -> None:
    monkeypatch.setattr(calibration, "COMPILED", part)
    expected = Compute().draft_layer_s if part is None else COMPILED_LAYER_S
    assert compute().draft_layer_s == expected


def test_small_models_are_planned_with_usual_figures(measured: Measured, cache: Path) -> None:
    found = calibrated(shape(LEAST_WEIGHTS - 100), "torch.float32", FORMS, SilentProgress())
    assert found == Compute()
    assert not measured.asked and not cache.exists()


def test_it_is_measured_once_and_then_read(measured: Measured, cache: Path) -> None:
    first = compute()
    measured.rates = ProductRates(1.0, 1.0, {"int4": 1.0, "int8": 1.0})
    assert [compute(), compute()] == [first, first]
    assert len(measured.asked) == 1
    (file,) = files(cache)
    assert file.parent == cache / "calibrations"


@pytest.mark.parametrize("age", [KEPT_S + 60, -3600], ids=["yesterday", "a clock set back"])
def test_it_is_measured_anew_the_next_day(measured: Measured, cache: Path, age: int) -> None:
    """The machine may have been busy."""
    first = compute()
    measured.rates = ProductRates(1.0, 1.0, {"int4": 1.0, "int8": 1.0})
    (file,) = files(cache)
    then = file.stat().st_mtime - age
    os.utime(file, (then, then))
    second = compute()
    assert second.gflops == 1.0 != first.gflops
    assert compute() == second
    assert len(measured.asked) == 2
    assert files(cache) == [file]


def test_each_dtype_and_each_set_of_formats_is_measured_by_itself(
    measured: Measured, cache: Path
) -> None:
    kinds: list[tuple[str, tuple[str, ...]]] = [
        ("torch.float32", FORMS),
        ("torch.bfloat16", FORMS),
        ("torch.float32", ("int4",)),
    ]
    for number, (dtype, forms) in enumerate(kinds, 1):
        measured.rates = msgspec.structs.replace(RATES, gflops=float(number))
        compute(dtype, forms)
    assert [compute(*kind).gflops for kind in kinds] == [1.0, 2.0, 3.0]
    assert len(measured.asked) == len(files(cache)) == 3


@pytest.mark.parametrize("other", ["COMPILED", "_VERSION"])
def test_another_program_measures_anew(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    compute()
    monkeypatch.setattr(calibration, other, "another")
    compute()
    assert len(measured.asked) == 2


WHOLE: dict[str, Any] = {
    "memory_gbps": 1.0,
    "gflops": 1.0,
    "low_gbps": {"int4": 1.0, "int8": 1.0},
    "measured": True,
}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[1, 2]",
        b"{}",
        b'{"rates": [1, 2]}',
        b'{"memory_gbps": "quick"}',
        json.dumps(WHOLE)[:-9].encode(),
        json.dumps(WHOLE | {"measured": False}).encode(),
        json.dumps(WHOLE | {"low_gbps": {"int4": 1.0}}).encode(),
        json.dumps(WHOLE | {"gflops": 0.0}).encode(),
        json.dumps(WHOLE | {"memory_gbps": -1.0}).encode(),
    ],
    ids=str,
)
def test_a_file_that_is_damaged_or_not_ours_is_replaced(
    measured: Measured, cache: Path, content: bytes
) -> None:
    right = compute()
    (file,) = files(cache)
    sound = file.read_bytes()
    file.write_bytes(content)
    assert compute() == right
    assert len(measured.asked) == 2
    assert files(cache) == [file] and file.read_bytes() == sound


def test_a_file_that_is_sound_is_believed(measured: Measured, cache: Path) -> None:
    """So that the test above is one of what is wrong with its files."""
    compute()
    (file,) = files(cache)
    file.write_text(json.dumps(WHOLE))
    assert compute().gflops == 1.0
    assert len(measured.asked) == 1


@pytest.mark.parametrize("place", ["cache", "cache/calibrations"])
def test_a_cache_that_cannot_be_written_costs_a_measurement_and_no_more(
    measured: Measured, tmp_path: Path, place: str
) -> None:
    """Something else lies there; a model that is a directory needs no cache itself."""
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("a file")
    first, second = compute(), compute()
    assert first == second and first.gflops == 42.0
    assert len(measured.asked) == 2
    assert files(tmp_path) == [tmp_path / place]


def test_a_disk_that_is_full_leaves_nothing_half_written(
    measured: Measured, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibration.os, "replace", full)
    assert compute().measured
    assert files(cache) == []


@pytest.mark.parametrize("there", [True, False])
def test_a_model_is_planned_with_it_bitsandbytes_or_not(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """nf4 cannot be made without, and other formats do not need it."""
    measured.rates = ProductRates(7.0, 42.0, dict.fromkeys(FORMATS, 5.0))
    model = make_model(tmp_path / "model", "llama", layers=1, dtype=torch.float32)
    monkeypatch.setattr(calibration, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(preparation, "find_spec", lambda _: "a spec" if there else None)
    given = {"model": str(model), "context": 64, "memory": "64MiB", "link_gbps": 1.0}
    opened, plan = look(Settings.from_environment({}, **given), SilentProgress())
    opened.close()
    forms = tuple(form for form in FORMATS if there or form != "nf4")
    assert measured.asked == [("float32", forms)]
    assert not any("not measured here" in one for one in plan.assumptions)
