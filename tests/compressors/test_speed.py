"""Measuring a codec: plausible figures for every one of the catalogue, and the break-even formula."""

from __future__ import annotations

import math

import pytest

from compressors import CODECS
from compressors.speed import WIDTH, break_even_bps, measure_on, sample


@pytest.mark.parametrize("name", sorted(CODECS))
def test_every_codec_can_be_measured(name: str) -> None:
    ratio = 16.0 if CODECS[name].rated else 1.0
    rate = measure_on(name, sample(64 * WIDTH, 4711), ratio, 4711)
    assert 0 < rate.encode_bytes_per_s < math.inf
    assert 0 < rate.decode_bytes_per_s < math.inf
    assert 0 < rate.bytes_per_element <= 4.1


def test_break_even_is_the_formula_of_the_notes() -> None:
    """compression.md 1.4: (1-r) / (1/C + 1/D); half the bytes at 1 and 1 GB/s pays below 2 Gbit/s."""
    assert break_even_bps(0.5, 1e9, 1e9) == pytest.approx(2e9)
    assert break_even_bps(1.01, 1e9, 1e9) == 0
    assert break_even_bps(0.5, 0, 1e9) == 0


def test_samples_are_seeded_rows_of_features() -> None:
    assert sample(4 * WIDTH, 1).equal(sample(4 * WIDTH, 1))
    assert sample(4 * WIDTH, 1).shape == (4, WIDTH)
    assert sample(100, 1).shape == (100,)
