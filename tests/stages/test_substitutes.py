"""Substitutes: finite, as large as planned, and near the matrix they stand for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stages.formats import FORMATS, substitute_bytes
from stages.nf4_kernels import bitsandbytes
from stages.substitutes import Substitute, quantize

WEIGHT_ERROR = {"int4": 0.11, "int8": 0.02, "int6": 0.03, "nf4": 0.085, "int3": 0.18, "int2": 0.37}
"""Largest relative error of normally distributed weights."""

SHAPES = [(64, 64), (192, 576), (80, 128), (50, 100), (1, 1), (130, 65)]


def _weights(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def _blocks(weight: torch.Tensor, rows: int = 64) -> Iterator[torch.Tensor]:
    yield from weight.split(rows)


def _made(weight: torch.Tensor, form: str, rows: int = 64) -> Substitute:
    return quantize(_blocks(weight, rows), (weight.shape[0], weight.shape[1]), form)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_holds_what_the_planner_counted(form: str, shape: tuple[int, int]) -> None:
    assert _made(_weights(shape), form).nbytes == substitute_bytes(shape, form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_stands_for_its_matrix(form: str, shape: tuple[int, int]) -> None:
    weight = _weights(shape)
    got = _made(weight, form).dequantize()
    assert got.shape == shape
    assert got.dtype == torch.float32
    assert _error(got, weight) < WEIGHT_ERROR[form]


def _skewed(cols: int) -> torch.Tensor:
    """Mean squares as a model's are: some columns hundreds of times as large."""
    return torch.randn(cols, generator=torch.Generator().manual_seed(3)).mul(2).exp()


GAIN = {"int6": 0.8, "int4": 0.8, "nf4": 0.9, "int3": 0.75, "int2": 0.75}


@pytest.mark.parametrize("form", GAIN)
def test_errors_count_by_what_they_are_multiplied_by(form: str) -> None:
    weight, inputs = _weights((128, 200)), _skewed(200)
    made = quantize(_blocks(weight), (128, 200), form, inputs)
    weighed, even = (
        float(((one.dequantize() - weight).square() * inputs).sum())
        for one in (made, _made(weight, form))
    )
    assert weighed < GAIN[form] * even
    assert _error(made.dequantize(), weight) < 1.5 * WEIGHT_ERROR[form], "the others count too"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1e-30, 1.0, 1e30])
def test_where_all_inputs_are_alike_they_change_little(form: str, value: float) -> None:
    weight = _weights((64, 130))
    made = quantize(_blocks(weight), (64, 130), form, torch.full((130,), value))
    assert _error(made.dequantize(), weight) < WEIGHT_ERROR[form]


@pytest.mark.parametrize("form", FORMATS)
def test_one_column_that_outweighs_all_does_not_spoil_the_others(form: str) -> None:
    weight, inputs = _weights((64, 64)), torch.zeros(64)
    inputs[5] = 1e12
    got = quantize(_blocks(weight), (64, 64), form, inputs).dequantize()
    assert _error(got[:, 5], weight[:, 5]) < WEIGHT_ERROR[form]
    assert got.isfinite().all() and _error(got, weight) < 1.0


def test_nf4_scales_are_fitted() -> None:
    """Less error than with the largest of 64 weights as their scale: here 0.82 of its square."""
    weight = _weights((64, 576))
    packed, state = bitsandbytes().quantize_4bit(weight, blocksize=64, quant_type="nf4")
    others = _error(bitsandbytes().dequantize_4bit(packed, state), weight)
    assert _error(_made(weight, "nf4").dequantize(), weight) ** 2 < 0.84 * others**2


def test_what_is_no_number_does_not_spoil_the_others_in_nf4() -> None:
    weight = _weights((64, 128))
    weight[3, 5], weight[4, 100] = torch.nan, torch.inf
    sane = torch.ones(64, 2, dtype=torch.bool)
    sane[3, 0] = sane[4, 1] = False
    got = _made(weight, "nf4").dequantize().view(64, 2, 64)
    assert got.isfinite().all()
    assert _error(got[sane], weight.view(64, 2, 64)[sane]) < WEIGHT_ERROR["nf4"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 64, 67])
@pytest.mark.parametrize("shape", [(192, 576), (50, 100)])
def test_multiplies_by_what_it_stands_for(form: str, rows: int, shape: tuple[int, int]) -> None:
    made = _made(_weights(shape), form)
    x = _weights((rows, shape[1]))
    out = made.matmul(x)
    assert out.shape == (rows, shape[0])
    assert _error(out, x @ made.dequantize().T) < 0.01


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_takes_any_float_dtype(form: str, dtype: torch.dtype) -> None:
    weight = _weights((64, 128), dtype)
    made = _made(weight, form)
    x = _weights((4, 128), dtype)
    out = made.matmul(x)
    assert out.dtype == dtype
    assert _error(out, x.float() @ made.dequantize().T) < 0.01


@pytest.mark.parametrize("form", FORMATS)
def test_takes_activations_that_are_not_contiguous(form: str) -> None:
    made = _made(_weights((64, 128)), form)
    x = _weights((128, 6)).T
    assert _error(made.matmul(x), made.matmul(x.contiguous())) < 1e-5


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("block", [64, 128])
def test_the_cut_into_blocks_does_not_show(form: str, block: int) -> None:
    weight = _weights((200, 192))
    x = _weights((5, 192))
    whole, cut = _made(weight, form, rows=200), _made(weight, form, rows=block)
    assert torch.equal(whole.dequantize(), cut.dequantize())
    assert _error(cut.matmul(x), whole.matmul(x)) < 1e-6


def test_packed_int4_blocks_join_to_what_packing_the_whole_gives() -> None:
    codes = torch.arange(192 * 128, dtype=torch.int32).view(192, 128) * 7 % 16
    pack = torch._convert_weight_to_int4pack_for_cpu
    assert torch.equal(torch.cat([pack(part, 1) for part in codes.split(64)]), pack(codes, 1))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 1e-20])
def test_a_group_without_range_stays_finite(form: str, value: float) -> None:
    weight = torch.full((64, 128), value)
    weight[1] = _weights((1, 128))
    made = _made(weight, form)
    out = made.matmul(torch.ones(2, 128))
    assert out.isfinite().all()
    assert made.dequantize()[0] == pytest.approx(value, rel=0.01, abs=1e-6)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_counts_as_zero(form: str, bad: float) -> None:
    weight = _weights((64, 128))
    mended = weight.clone()
    weight[3, 5], mended[3, 5] = bad, 0.0
    assert torch.equal(_made(weight, form).dequantize(), _made(mended, form).dequantize())


@pytest.mark.parametrize("form", FORMATS)
def test_missing_rows_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match="rows"):
        quantize(_blocks(_weights((64, 64))), (128, 64), form)


@pytest.mark.parametrize("form", FORMATS)
def test_surplus_rows_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match="rows"):
        quantize(_blocks(_weights((192, 64))), (128, 64), form)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="int5"):
        quantize([], (64, 64), "int5")
