"""Activations in 8 or 4 bits: how far off, in how many bytes, and which tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.few_bits import BLOCK, LEAST, PIECE, pack, takes, unpack
from atoll.job import packed_bytes


def drawn(*shape: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * scale + offset


def bound(values: Tensor, bits: int) -> Tensor:
    """Half of the largest step that each block may have, and what float32 rounds."""
    flat = values.float().reshape(-1, BLOCK)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return (high - low + low.abs() / 128) / (2**bits - 1) * (65 / 64) / 2 + flat.abs() * 2**-22


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1e-30, 0.0), (1e30, -1e31), (0.01, 100.0)])
def test_values_come_back_within_half_a_step(bits: int, scale: float, offset: float) -> None:
    values = drawn(64, BLOCK * 3, scale=scale, offset=offset)
    back = unpack(pack(values, bits), values.dtype).view(values.shape)
    assert ((back - values).abs().reshape(-1, BLOCK) <= bound(values, bits)).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("elements", [1, BLOCK, BLOCK + 1, PIECE + 5])
def test_any_number_of_elements_takes_the_bytes_that_plans_count(bits: int, elements: int) -> None:
    values = drawn(elements)
    packed = pack(values, bits)
    assert packed.data.nbytes == packed_bytes(-(-elements // BLOCK) * BLOCK, bits)
    assert (unpack(packed, values.dtype) - values).abs().max() < 0.3


def test_constants_are_exact_or_nearly_so() -> None:
    assert torch.equal(unpack(pack(torch.zeros(64), 4), torch.float32), torch.zeros(64))
    back = unpack(pack(torch.full((64,), 7.0), 8), torch.float32)
    assert (back - 7.0).abs().max() < 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_other_blocks_are_untouched(bad: float) -> None:
    values = drawn(2 * BLOCK)
    values[3] = bad
    back = unpack(pack(values, 8), values.dtype)
    assert not back[:BLOCK].isfinite().any()
    assert back[BLOCK:].isfinite().all()


def test_the_order_is_the_tensors_own_and_the_type_comes_back() -> None:
    values = drawn(32, 48).bfloat16()
    packed = pack(values.t(), 8)
    assert torch.equal(packed.data, pack(values.t().contiguous(), 8).data)
    assert unpack(packed, values.dtype).dtype is torch.bfloat16


def test_activations_are_taken_and_statistics_masks_and_casts_of_weights_are_not() -> None:
    values = drawn(64, 64)
    assert takes(values, values.numel(), ())
    assert not takes(values[:4], 256, ())  # small
    assert values[:16].numel() == LEAST
    assert takes(values[:16], LEAST, ())
    assert not takes(values[:16], 16 * LEAST, ())  # one number for sixteen of the argument
    assert not takes(values > 0, values.numel(), ())
    assert not takes(values.bfloat16(), values.numel(), [(values.numel(), torch.float32)])
    assert takes(values, values.numel(), [(values.numel(), torch.float32)])
