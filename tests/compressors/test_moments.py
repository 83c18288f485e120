"""Moments in 8 bits: how near they are, and what stays as it is."""

from __future__ import annotations

import pytest
import torch

from compressors.moments import BLOCK, round_signed, round_squares, signed, squares


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 5000])
def test_moments_keep_their_number_and_take_two_bytes_and_a_scale(n: int) -> None:
    draw = torch.Generator().manual_seed(n)
    m, v = torch.randn(n, generator=draw), torch.rand(n, generator=draw)
    (codes, scale), (codes_v, scale_v) = round_signed(m), round_squares(v)
    assert codes.nbytes + codes_v.nbytes == 2 * n
    assert len(scale) == len(scale_v) == -(-n // BLOCK)
    assert signed(codes, scale).shape == m.shape
    assert squares(codes_v, scale_v).shape == v.shape


def test_a_step_is_off_by_a_few_hundredths_of_its_rate() -> None:
    """m / sqrt(v) of moments that a training has: v spreads over decades within a block."""
    draw = torch.Generator().manual_seed(1)
    spread = torch.exp(1.0 * torch.randn(50_000, generator=draw))
    v = (spread * 1e-4).square()
    m = v.sqrt() * torch.randn(50_000, generator=draw)
    found = signed(*round_signed(m)) / squares(*round_squares(v)).sqrt()
    off = (found - m / v.sqrt()).abs()
    assert float(off.median()) < 0.03
    assert float(off.quantile(0.99)) < 0.25


def test_what_is_positive_stays_so_and_zeros_stay_zeros() -> None:
    v = torch.zeros(600)
    v[::3] = 1e-20
    v[7] = 4.0
    found = squares(*round_squares(v))
    assert ((found > 0) == (v > 0)).all()
    assert float(found[7]) == 4.0
    assert not signed(*round_signed(torch.zeros(300))).any()


def test_rounded_once_more_they_stay_as_they_are_to_a_millionth() -> None:
    draw = torch.Generator().manual_seed(2)
    m = torch.randn(3000, generator=draw)
    once = signed(*round_signed(m))
    assert torch.allclose(signed(*round_signed(once)), once, rtol=1e-6, atol=0.0)
