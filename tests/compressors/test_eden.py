"""EDEN: its error on Gaussians, what its mean over rotations is, and what it makes of odd blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.opdag import TensorMeta
from compressors import make_compressor
from compressors.base import Packet
from compressors.blocks import LEAST
from compressors.eden import LEVELS
from compressors.rates import EDEN_BLOCK, EDEN_SCALE_BYTES, SEED_BYTES, eden_widths
from tests.compressors.codec_cases import Doubles, doubles, eden_law, normal, round_trip

STATED = {1: 0.57, 2: 0.13, 3: 0.036, 4: 0.0096}
"""Bits -> |x - x'|^2 / |x|^2 of Gaussian coordinates, from the module's docstring."""
SCALE = 2.0**-8
"""A scale's rounding to bfloat16."""


def ratio_of(bits: int, longer: int = 0) -> float:
    """The ratio of ``bits`` a coordinate, and one more for ``longer`` of a block's 256."""
    ratio = 32.0 * EDEN_BLOCK / (EDEN_BLOCK * bits + longer + 8 * EDEN_SCALE_BYTES + 4)
    assert eden_widths(ratio) == (bits, longer)
    return ratio


def blocks(count: int, seed: int = 4711, power: int = 1) -> torch.Tensor:
    """[count, 256] Gaussian values to an odd power."""
    return normal(TensorMeta((count, EDEN_BLOCK), "float32"), seed) ** power


def rows(tensor: torch.Tensor) -> Doubles:
    return doubles(tensor).reshape(-1, EDEN_BLOCK)


def lost(ratio: float, x: torch.Tensor) -> float:
    """|x - x'|^2 / |x|^2."""
    error = doubles(x) - doubles(round_trip(make_compressor("eden", ratio), x, seed=3))
    return float(np.sum(error**2) / np.sum(doubles(x) ** 2))


def means(ratio: float, x: torch.Tensor, draws: int) -> tuple[Doubles, Doubles]:
    """Of what arrives of ``x`` over seeds, and its standard errors."""
    codec = make_compressor("eden", ratio)
    arrived = np.stack([doubles(round_trip(codec, x, seed)) for seed in range(draws)])
    return arrived.mean(axis=0), arrived.std(axis=0, ddof=1) / draws**0.5


# ---------------------------------------------------------------- the error


@pytest.mark.parametrize(("power", "near"), [(1, 0.03), (3, 0.1)], ids=["gaussian", "heavy tails"])
@pytest.mark.parametrize("bits", STATED)
def test_the_error_at_whole_bits_is_the_stated_one_whatever_the_values_were(
    bits: int, power: int, near: float
) -> None:
    law = eden_law(ratio_of(bits)) ** 2
    assert law == pytest.approx(STATED[bits], rel=0.025)  # two digits are stated
    assert lost(ratio_of(bits), blocks(1000, power=power)) == pytest.approx(law, rel=near)


@pytest.mark.parametrize(("bits", "longer"), [(1, 240), (2, 152), (3, 240)])
def test_between_whole_bits_some_coordinates_have_one_more(bits: int, longer: int) -> None:
    error = lost(ratio_of(bits, longer), blocks(1000))
    assert error == pytest.approx(eden_law(ratio_of(bits, longer)) ** 2, rel=0.03)
    assert lost(ratio_of(bits + 1), blocks(1000)) < error < lost(ratio_of(bits), blocks(1000))


@pytest.mark.parametrize("longer", [8, 120, 248])
def test_below_one_bit_what_is_left_out_is_lost(longer: int) -> None:
    arrives = longer / EDEN_BLOCK * 2 / np.pi
    assert lost(ratio_of(0, longer), blocks(1000)) == pytest.approx(1 - arrives, rel=0.01)


@pytest.mark.parametrize("bits", STATED)
def test_each_level_is_the_mean_of_its_cell_of_a_gaussian(bits: int) -> None:
    magnitudes = np.abs(np.random.default_rng(4711).standard_normal(1_000_000))
    levels = np.array(LEVELS[bits])
    cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, magnitudes)
    found = [magnitudes[cells == cell].mean() for cell in range(len(levels))]
    assert found == pytest.approx(list(levels), rel=0.005)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, EDEN_BLOCK), st.sampled_from([1.0, 8.0, 12.0, 20.0, 60.0, 900.0])
)
def test_no_block_ends_farther_away_than_zeros_would(seed: int, elements: int, ratio: float) -> None:
    x = blocks(1, seed, power=5)
    x[0, elements:] = 0.0  # few elements are what no rotation of signs makes Gaussian
    error = doubles(x) - doubles(round_trip(make_compressor("eden", ratio), x, seed))
    assert np.linalg.norm(error) <= np.linalg.norm(doubles(x)) * (1 + SCALE)


# ---------------------------------------------------------------- the mean


@pytest.mark.parametrize("power", [1, 5], ids=["gaussian", "heavy tails"])
@pytest.mark.parametrize("ratio", [ratio_of(1), 16.0, 12.0, 8.0, 1.0], ids="{:.3g}".format)
def test_what_arrives_has_all_of_the_length_along_the_block(ratio: float, power: int) -> None:
    x = blocks(200, power=power)
    arrived = rows(round_trip(make_compressor("eden", ratio), x, seed=5))
    along = (rows(x) * arrived).sum(axis=1) / (rows(x) ** 2).sum(axis=1)
    # t stops at 1.9, which a block reaches at one bit where its coordinates are far from Gaussian.
    assert (along <= 1 + SCALE).all()
    assert np.quantile(along, 0.05) >= 1 - SCALE


@pytest.mark.parametrize("ratio", [ratio_of(1), 12.0, 8.0], ids="{:.3g}".format)
def test_the_mean_over_rotations_is_the_tensor_where_many_elements_make_up_a_block(ratio: float) -> None:
    x = blocks(2)
    mean, error = means(ratio, x, draws=1000)
    assert (np.abs(mean - doubles(x)) <= 4.0 * error + SCALE / 16 * np.abs(doubles(x))).all()
    # As a whole: of so many elements the squares of these errors come near their expectation.
    assert np.mean(((mean - doubles(x)) / error) ** 2) <= 1.3


def test_the_mean_over_rotations_is_not_the_tensor_where_few_elements_make_up_a_block() -> None:
    x = torch.zeros(1, EDEN_BLOCK)
    x[0, 17], x[0, 200] = 2.0, 1.0
    expected = torch.zeros(1, EDEN_BLOCK)
    expected[0, 17] = 2.5
    for seed in range(20):
        arrived = round_trip(make_compressor("eden", ratio_of(1)), x, seed)
        assert torch.allclose(arrived, expected, atol=2.5 * SCALE)


# ---------------------------------------------------------------- blocks that are no numbers, or hardly


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(bad: float) -> None:
    x = blocks(3)
    x[1, 100] = bad
    arrived = round_trip(make_compressor("eden", 8.0), x)
    assert arrived[1].isnan().all()
    assert torch.isfinite(arrived[[0, 2]]).all()


def test_a_block_too_small_to_scale_is_zero_and_the_least_that_is_not_arrives() -> None:
    x = torch.ones(2, EDEN_BLOCK) * float(LEAST)
    x[0] *= 0.99
    arrived = round_trip(make_compressor("eden", 8.0), x)
    assert not arrived[0].any()
    assert torch.linalg.vector_norm(arrived[1] - x[1]) <= 0.2 * torch.linalg.vector_norm(x[1])


def test_a_last_block_that_is_short_arrives_as_well_as_a_whole_one() -> None:
    x = normal(TensorMeta((1000 * EDEN_BLOCK + 77,), "float32"))
    arrived = round_trip(make_compressor("eden", 8.0), x)
    error = float((arrived - x)[-77:].norm() / x[-77:].norm())
    assert error == pytest.approx(eden_law(8.0), rel=0.5)


def test_a_packet_says_its_rotation() -> None:
    codec, x = make_compressor("eden", 8.0), blocks(4)
    packet, _ = codec.compress(x, seed=1)
    other, _ = codec.compress(x, seed=2)
    assert bytes(packet.payload[:SEED_BYTES]) != bytes(other.payload[:SEED_BYTES])
    turned = bytes(other.payload[:SEED_BYTES]) + bytes(packet.payload[SEED_BYTES:])
    wrong = codec.decompress(Packet("eden", packet.meta, turned))
    assert (wrong - x).norm() > 0.5 * x.norm()
