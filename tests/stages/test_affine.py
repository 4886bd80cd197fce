"""Fitting codes, scales and offsets, and the order of codes in bytes."""

from __future__ import annotations

import hashlib

import pytest
import torch

from stages.affine import quantize_groups
from stages.formats import BITS, GROUP
from stages.packed import pack_codes, unpack_codes
from stages.quantized import group_shares

SHA256 = "62743049318c33938d1ca8bd770f671f30a642cabe6cfe3c4395619b4a853f19"


def _exact(rows: int, groups: int) -> torch.Tensor:
    """Weights whose int4 fit rounds nowhere but in divisions, so alike on every processor."""
    made = torch.arange(rows * groups * GROUP).view(rows, groups, GROUP).pow(2) * 7 % 121
    made[..., 0], made[..., 1] = 0, 120
    return (made / 8.0).flatten(1)


def test_int4_is_fitted_as_it_was_before_there_were_others() -> None:
    """Of what the int4-only fit gave."""
    codes, scale, offset = quantize_groups(4, group_shares(None, 3 * GROUP), _exact(16, 3))
    digest = hashlib.sha256(codes.to(torch.uint8).numpy().tobytes())
    for part in (scale, offset):
        digest.update(part.view(torch.int16).numpy().tobytes())
    assert digest.hexdigest() == SHA256


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_fit_beats_the_range_cut_evenly(bits: int) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(bits))
    codes, scale, offset = quantize_groups(bits, group_shares(None, weight.shape[1]), weight)
    assert codes.min() == 0 and codes.max() == (1 << bits) - 1
    groups = weight.view(64, -1, GROUP)
    low, high = groups.aminmax(dim=2, keepdim=True)
    step = (high - low) / ((1 << bits) - 1)
    even = ((groups - low) / step).round() * step + low
    half = 1 << bits - 1
    fitted = (codes.view(groups.shape) - half) * scale.float()[..., None] + offset.float()[
        ..., None
    ]
    assert (fitted - groups).norm() < (0.97, 0.95, 0.9)[4 - bits] * (even - groups).norm()


@pytest.mark.parametrize("bits", sorted(set(BITS.values())))
def test_codes_come_back(bits: int) -> None:
    codes = torch.arange(24 * 192).pow(2).view(24, 192) * 5 % 257 % (1 << bits)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 3, GROUP * bits)
    assert torch.equal(unpack_codes(packed, bits), codes.to(torch.uint8))


def test_three_bits_stand_in_two_planes() -> None:
    """The byte of an output and a column has 4 columns' low bits, 8 columns' high bits."""
    codes = torch.zeros(8, 64, dtype=torch.int32)
    codes[5, 16 + 4 * 3 + 2] = 0b111
    (packed,) = pack_codes(codes, 3).flatten(0, 1)
    assert packed.nonzero().flatten().tolist() == [32 + 4 * 5 + 2, 128 + 4 * 5 + 2]
    assert packed[32 + 4 * 5 + 2] == 0b11 << 6 and packed[128 + 4 * 5 + 2] == 1 << 7
