"""Kernels of all formats: the product that their weights stand for, within what is lost."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import affine_kernels, int8, int8_kernels, nf4, nf4_kernels
from stages.affine import Affine
from stages.compiled import COMPILED, compiled_part
from stages.formats import BITS, FORMATS, GROUP
from stages.int8 import Int8
from stages.nf4 import Nf4
from stages.substitutes import Substitute

SHAPES = [(64, 64), (8, 128), (50, 100), (1, 1), (130, 65), (203, 576), (67, 130)]
FORMS: dict[str, tuple[Any, Any]] = {
    "int8": (Int8, int8_kernels),
    "nf4": (Nf4, nf4_kernels),
    **{form: (partial(Affine, form), affine_kernels) for form in affine_kernels.OTHERS},
}
OTHERS: dict[str, Any] = {
    "int8": int8_kernels.TorchKernel,
    "nf4": nf4_kernels.BitsandbytesKernel,
    **affine_kernels.OTHERS,
}
FLOAT32 = (nf4_kernels.BitsandbytesKernel, affine_kernels.PlainKernel)
"""Kernels that multiply decoded weights."""


class Kernel:
    """A format with one of its kernels. Called with a matrix, it makes a substitute of it."""

    def __init__(self, form: str, kernel: Any) -> None:
        self.form, self.kernel = form, kernel
        self.ours = kernel is FORMS[form][1].CompiledKernel

    def __call__(self, weight: torch.Tensor) -> Substitute:
        made: Substitute = FORMS[self.form][0]([weight], tuple(weight.shape), kernel=self.kernel)
        return made

    def empty(self, shape: tuple[int, int], stored: int) -> Any:
        """The kernel alone."""
        affine = (self.form,) if self.form in affine_kernels.OTHERS else ()
        return self.kernel(*affine, shape, stored)


@pytest.fixture(params=[(form, way) for form in FORMATS for way in ("best", "avx2", "other")])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Ours as the processor has it and held to AVX2, and the other one."""
    form, way = request.param
    if way == "other":
        yield Kernel(form, OTHERS[form])
        return
    yield from _compiled(form, plain=way == "avx2")


@pytest.fixture(params=[(form, way) for form in FORMATS for way in ("best", "avx2")])
def ours(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    form, way = request.param
    yield from _compiled(form, plain=way == "avx2")


def _compiled(form: str, *, plain: bool) -> Iterator[Kernel]:
    if COMPILED is None:
        pytest.skip("the compiled part is not there")
    compiled_part.plain(plain)
    yield Kernel(form, FORMS[form][1].CompiledKernel)
    compiled_part.plain(False)


def _random(*shape: int, tails: float = 1.0) -> torch.Tensor:
    """Normal; with `tails` above 1 a few values are many times the others."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return made * made.abs() ** (tails - 1)


def _loss(x: torch.Tensor, weight: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """The most that each output may be off, (rows, out) float64.

    Ours: half a step, of which 127 make a group's largest activation. torch's: in bfloat16 2^-9 of
    each activation, as much of the output, and of weights twice (int4's are rounded as it
    multiplies). On top a float32 sum's own error, which is all that the others' have.
    """
    x, weight = x.double().abs(), weight.double().abs()
    reach = x.sum(dim=1, keepdim=True) * weight.amax()
    if kernel.kernel in FLOAT32:
        return 1e-6 * reach
    if not kernel.ours:
        return 2 * 2.0**-9 * (x @ weight.T) + 2 * 2.0**-9 * reach
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).view(x.shape[0], -1, GROUP)
    step = (padded.amax(dim=2) / 127).repeat_interleave(GROUP, dim=1)[:, : x.shape[1]]
    return step / 2 @ weight.T + 1e-6 * reach


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("tails", [1.0, 3.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_within_the_bound(
    kernel: Kernel, shape: tuple[int, int], rows: int, tails: float
) -> None:
    made = kernel(_random(*shape))
    x = _random(rows, shape[1], tails=tails)
    out, weight = made.matmul(x), made.dequantize()
    assert out.shape == (rows, shape[0]) and out.dtype == torch.float32
    off = (out.double() - x.double() @ weight.double().T).abs()
    assert (off <= _loss(x, weight, kernel)).all()


@pytest.mark.parametrize("tails", [1.0, 3.0])
def test_what_activations_lose_is_little_beside_what_weights_lose(
    kernel: Kernel, tails: float
) -> None:
    weight = _random(256, 576)
    x = _random(64, 576, tails=tails)
    out = kernel(weight).matmul(x)
    exact = kernel(weight).dequantize()
    wanted = x.double() @ weight.double().T
    error = [float((y.double() - wanted).norm()) for y in (out, x.double() @ exact.double().T)]
    # Weights of more bits lose as little as activations do.
    assert error[0] < ({"int8": 2.0, "int6": 1.3}.get(kernel.form, 1.05)) * error[1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_kernels_stand_for_the_same_matrix(form: str, shape: tuple[int, int]) -> None:
    weight = _random(*shape)
    kernels = (FORMS[form][1].CompiledKernel, OTHERS[form])
    ours, others = (Kernel(form, kernel)(weight).dequantize() for kernel in kernels)
    # bfloat16 weights in torch's int4; levels that are rounded in our nf4.
    assert (ours - others).abs().max() <= 2.0**-8 * weight.abs().max()


def _whole(form: str, kernel: Any, codes: torch.Tensor) -> torch.Tensor:
    """Put (64, 192) `codes` as they are, with scales that are exact: the weights."""
    if form in affine_kernels.OTHERS:
        scale, offset = torch.full((64, 3), 0.5), torch.arange(192.0).view(64, 3) - 96
        kernel.put(0, codes, scale.bfloat16(), offset.bfloat16())
        half = 2 ** (BITS[form] - 1)
        return (codes - half) * 0.5 + offset.repeat_interleave(GROUP, dim=1)
    if form == "int8":
        scale = 2.0 ** (torch.arange(64) % 5 - 2)
        kernel.put(0, codes.to(torch.int8), scale.bfloat16())
        return codes * scale[:, None]
    largest = 127 * 2.0 ** (torch.arange(192).view(64, 3) % 5 - 2)
    kernel.put(0, codes.to(torch.uint8), largest)
    levels = torch.tensor(nf4_kernels.LEVELS)[codes.long()]
    return levels * (largest / 127).repeat_interleave(GROUP, dim=1)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 15])
def test_whole_numbers_are_multiplied_exactly(ours: Kernel, rows: int) -> None:
    """Each code in its place: where the activations' scale is 1 nothing is lost."""
    made = ours.empty((64, 192), 64)
    low, high = (-127, 128) if ours.form == "int8" else (0, 2 ** BITS[ours.form])
    codes = torch.randint(low, high, (64, 192), dtype=torch.int32)
    weight = _whole(ours.form, made, codes)
    x = torch.randint(-127, 128, (rows, 192)).float()
    x[:, ::64] = 127
    assert torch.equal(made.dequantize(), weight)
    assert torch.equal(made.matmul(x), (x.double() @ weight.double().T).float())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("extreme", [0, 1])
def test_the_largest_sums_fit(ours: Kernel, sign: int, extreme: int) -> None:
    made = ours.empty((64, 192), 64)
    code = ((-127, 127) if ours.form == "int8" else (0, 2 ** BITS[ours.form] - 1))[extreme]
    weight = _whole(ours.form, made, torch.full((64, 192), code, dtype=torch.int32))
    x = torch.full((4, 192), sign * 127.0)
    assert torch.equal(made.matmul(x), (x.double() @ weight.double().T).float())


def test_zero_activations_and_constant_groups(kernel: Kernel) -> None:
    weight = torch.full((64, 128), -0.375)
    made = kernel(weight)
    assert torch.equal(made.matmul(torch.zeros(3, 128)), torch.zeros(3, 64))
    half = torch.cat((torch.zeros(2, 64), torch.ones(2, 64)), dim=1)
    assert torch.allclose(made.matmul(half), torch.full((2, 64), -24.0), rtol=0.01)


def test_tiny_and_huge_activations(ours: Kernel) -> None:
    made = ours(_random(64, 128))
    x = _random(2, 128)
    out = made.matmul(x)
    for factor in (2.0**-100, 2.0**100):
        assert torch.allclose(made.matmul(x * factor) / factor, out, rtol=1e-4, atol=1e-4)
    assert torch.equal(made.matmul(torch.full((1, 128), 1e-40)), torch.zeros(1, 64))
    x[0] = 3e38  # sums overflow, as they would in float32
    assert torch.equal(made.matmul(x)[1], out[1])


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 77, 129])
def test_an_activation_that_is_not_finite_spoils_its_row_alone(
    ours: Kernel, bad: float, at: int
) -> None:
    made = ours(_random(50, 130))
    x = _random(6, 130)
    whole = made.matmul(x)
    x[4, at] = bad
    out = made.matmul(x)
    assert out[4].isnan().all()
    others = [0, 1, 2, 3, 5]
    assert torch.equal(out[others], whole[others])


@pytest.mark.parametrize("rows", [5, 64, 130])
def test_a_row_does_not_depend_on_its_neighbors(ours: Kernel, rows: int) -> None:
    made = ours(_random(72, 200))
    x = _random(rows, 200)
    alone = torch.cat([made.matmul(x[i : i + 1]) for i in range(rows)])
    assert torch.equal(made.matmul(x), alone)
    assert made.matmul(x[:0]).shape == (0, 72)


def test_two_threads_give_what_one_gives(ours: Kernel) -> None:
    made = ours(_random(2051, 576))
    x = _random(5, 576)
    one = made.matmul(x)
    torch.set_num_threads(2)
    assert torch.equal(made.matmul(x), one)


def test_a_wrong_width_is_refused(ours: Kernel) -> None:
    made = ours(_random(64, 128))
    for width in (64, 127, 129):
        with pytest.raises(ValueError, match="128"):
            made.matmul(torch.zeros(1, width))
    with pytest.raises(ValueError, match="cpu"):
        made.matmul(torch.zeros(1, 128, device="meta"))


def test_the_module_refuses_what_is_no_number(ours: Kernel) -> None:
    few, wrong = (0, 1, 2), (0, 1, 2, 3, 4, 5, "6")
    for arguments in ((), few, wrong, (0, 1, 2, 3, 4, 5, -6), (9, 1, 2, 3, 4, 5, 6)):
        with pytest.raises((TypeError, OverflowError, ValueError)):
            compiled_part.product(*arguments)


@pytest.mark.parametrize("form", FORMATS)
def test_without_the_compiled_part_others_are_used(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form in affine_kernels.OTHERS:
        monkeypatch.setitem(affine_kernels.KERNELS, form, OTHERS[form])
    else:
        monkeypatch.setattr({"int8": int8, "nf4": nf4}[form], "KERNEL", OTHERS[form])
    made = FORMS[form][0]([_random(64, 64)], (64, 64))
    assert isinstance(made._kernel, OTHERS[form]) and made.compiled is None


def test_the_compiled_part_is_there_where_it_can_be() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{platform.machine()}: there is no compiled kernel for it")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C compiler ({compiler}) to build it")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("Python's headers, which it is built with, are not installed")
    again = "python setup.py build_ext --inplace builds it and shows what is wrong"
    assert importlib.util.find_spec("stages._draft") is not None, again
    if COMPILED is None:
        pytest.skip("this processor has no AVX2")
    assert int8.KERNEL is int8_kernels.CompiledKernel
    assert nf4.KERNEL is nf4_kernels.CompiledKernel
    assert set(affine_kernels.KERNELS.values()) == {affine_kernels.CompiledKernel}
