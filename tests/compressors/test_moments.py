"""Moments in 8 bits: how near they are, and what stays as it is."""

from __future__ import annotations

import pytest
import torch

from atoll.errors import UsageError
from compressors.moments import (
    BLOCK,
    restored,
    round_in_place,
    round_signed,
    round_squares,
    rounded,
    signed,
    squares,
)


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
    assert float(found[7]) == pytest.approx(4.0, rel=0.02)
    assert not squares(*round_squares(torch.full((300,), 1e-40))).any()
    assert not signed(*round_signed(torch.zeros(300))).any()


def test_what_was_rounded_is_stored_and_restored_to_the_bit() -> None:
    """A worker that trains on and one that restores go on with the same moments."""
    draw = torch.Generator().manual_seed(2)
    for scale in (1.0, 1e-6, 1e-15, 1e4):
        for n in (1, 700, 4096):
            m = torch.randn(n, generator=draw) * scale
            spread = torch.exp(2.0 * torch.randn(n, generator=draw)) * scale
            state = {"exp_avg": m, "exp_avg_sq": spread.square(), "step": torch.tensor(3.0)}
            round_in_place(state)
            held = rounded(state)
            assert held["exp_avg"].dtype is torch.int8
            again = restored(held, (n,))
            assert again.keys() == state.keys()
            assert all(torch.equal(again[key], state[key]) for key in state), (scale, n)
            before = {key: value.clone() for key, value in state.items()}
            round_in_place(state)
            assert all(torch.equal(before[key], state[key]) for key in state)


def test_codes_that_do_not_fit_are_refused() -> None:
    held = rounded({"exp_avg": torch.ones(300), "exp_avg_sq": torch.ones(300)})
    assert restored({"value": torch.ones(3)}, (3,)).keys() == {"value"}
    with pytest.raises(UsageError, match="codes of exp_avg do not fit"):
        restored(held, (301,))
    with pytest.raises(UsageError, match="codes of exp_avg_sq"):
        restored({**held, "exp_avg_sq": held["exp_avg_sq"].float()}, (300,))
