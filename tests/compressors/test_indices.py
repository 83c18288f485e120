"""Positions of kept elements: every encoding's round trip, size and refusals."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame
from compressors.bits import Ints, pack, packed_bytes, unpack, unpack_ones
from compressors.contrib.sparse.ranking import decode_ranks, encode_ranks, plan_ranks
from compressors.indices import (
    ENCODERS,
    MAX_POSITIONS,
    choose,
    decode_positions,
    encode_positions,
    encoded,
    expected_bytes,
    max_bytes,
    max_read_bytes,
    rice_parameter,
)

PARTIAL = [name for name in ENCODERS if name != "all"]
OLDER = {
    "elias": "029fc100010001058283bcbdcfd09f",
    "varint": "030000037c00b80400910a00ce0f",
}
"""Streams of version 0.7.0 in encodings that are no longer written."""
OF_OLDER = [0, 1, 5, 130, 131, 700, 701, 1999, 2000, 3999]


def stream_of(name: str) -> tuple[bytes, int, int]:
    """A stream in an encoding, the number of its positions, and the total."""
    if name in OLDER:
        return bytes.fromhex(OLDER[name]), len(OF_OLDER), 4000
    return encoded(np.append(uniform(80, 3000), 3999), 4000, name), 81, 4000


def uniform(kept: int, total: int, seed: int = 7) -> Ints:
    return np.sort(np.random.default_rng(seed).choice(total, kept, replace=False)).astype(np.int64)


@st.composite
def positions(draw: st.DrawFn) -> tuple[Ints, int]:
    total = draw(st.sampled_from([1, 2, 7, 64, 300, 5000, 2**20]))
    kept = draw(st.integers(0, min(total, 700)))
    chosen = uniform(kept, total, draw(st.integers(0, 2**32)))
    if kept and draw(st.booleans()):
        chosen = np.arange(kept) + draw(st.integers(0, total - kept))  # one run
    return chosen, total


@given(st.lists(st.integers(0, 2**40 - 1), max_size=50), st.integers(40, 62))
def test_packed_numbers_come_back_and_take_exactly_their_bytes(numbers: list[int], width: int) -> None:
    for bits in (width, max(1, max(numbers, default=0).bit_length())):
        packed = pack(np.array(numbers, np.int64), bits)
        assert len(packed) == packed_bytes(len(numbers), bits)
        assert unpack(packed, len(numbers), bits).tolist() == numbers


@given(st.integers(0, 9), st.lists(st.integers(0, 255), max_size=70))
def test_every_width_of_bits_comes_back(width: int, numbers: list[int]) -> None:
    small = np.array(numbers, np.int64) & ((1 << width) - 1)
    assert unpack(pack(small, width), len(small), width).tolist() == small.tolist()


def test_bits_behind_the_end_are_refused() -> None:
    packed = pack(np.array([1, 2, 3]), 3).copy()
    packed[-1] |= 0x80
    with pytest.raises(BadFrame, match="behind the end"):
        unpack(packed, 3, 3)
    with pytest.raises(BadFrame):
        unpack_ones(np.packbits([0, 1] + [0] * 7 + [1], bitorder="little"), 3)


@pytest.mark.parametrize("name", PARTIAL)
@settings(deadline=None, max_examples=60)
@given(positions())
def test_positions_come_back_from_every_encoding(name: str, drawn: tuple[Ints, int]) -> None:
    chosen, total = drawn
    if len(chosen):
        data = encoded(chosen, total, name)
        assert decode_positions(data, len(chosen), total).tolist() == chosen.tolist()
        assert len(data) <= max(max_read_bytes(len(chosen), total), 1 + -(-total // 8))


@pytest.mark.parametrize("name", OLDER)
def test_positions_of_an_older_version_are_read(name: str) -> None:
    assert decode_positions(*stream_of(name)).tolist() == OF_OLDER


@settings(deadline=None, max_examples=100)
@given(positions())
def test_the_chosen_encoding_is_within_its_bound(drawn: tuple[Ints, int]) -> None:
    chosen, total = drawn
    data = encode_positions(chosen, total)
    assert decode_positions(data, len(chosen), total).tolist() == chosen.tolist()
    assert len(data) <= max_bytes(len(chosen), total)


@pytest.mark.parametrize(
    ("share", "most"), [(0.001, 1.45), (0.01, 1.02), (0.1, 0.60), (0.5, 0.2502)], ids=str
)
def test_uniform_positions_take_what_the_notes_measured_and_the_planner_expects(
    share: float, most: float
) -> None:
    total = 1_000_000
    chosen = np.flatnonzero(np.random.default_rng(4711).random(total) < share)
    data = encode_positions(chosen, total)
    assert len(data) <= most * len(chosen)
    assert len(data) == pytest.approx(expected_bytes(len(chosen), total), rel=0.005)


def test_rice_is_at_most_half_a_percent_above_the_entropy_at_one_percent() -> None:
    kept, total = 10_000, 1_000_000
    bound = (math.lgamma(total + 1) - math.lgamma(kept + 1) - math.lgamma(total - kept + 1)) / math.log(256)
    assert expected_bytes(kept, total) <= 1.005 * bound


@pytest.mark.parametrize(("kept", "total"), [(1, 4096), (64, 4096), (500, 1000), (999, 1000), (3, 7)])
def test_the_parameter_of_rice_is_the_best_one(kept: int, total: int) -> None:
    def bits(b: int) -> float:
        return b - 1.0 / math.expm1(2.0**b * math.log1p(-kept / total))

    assert bits(rice_parameter(kept, total)) <= min(bits(b) for b in range(20)) + 1e-9


def test_clustered_positions_are_entropy_coded() -> None:
    rng = np.random.default_rng(3)
    rows = np.sort(rng.choice(10_000, 200, replace=False))[:, None] * 256
    chosen = (rows + np.arange(0, 256, 4)).reshape(-1).astype(np.int64)  # columns of few rows
    total = 2_560_000
    assert choose(chosen, total) == "zstd"
    assert len(encode_positions(chosen, total)) < 0.3 * len(encoded(chosen, total, "rice"))


def test_dense_positions_are_a_bitmap_and_all_of_them_nothing() -> None:
    assert choose(uniform(700, 1000), 1000) == "bitmap"
    assert encode_positions(np.arange(1000), 1000) == bytes((ENCODERS["all"][0],))


@pytest.mark.parametrize("name", [*PARTIAL, *OLDER])
def test_a_changed_stream_is_refused_or_holds_other_valid_positions(name: str) -> None:
    dice = random.Random(5)
    data, kept, total = stream_of(name)
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            changed[dice.randrange(len(changed))] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])
        if dice.random() < 0.3:
            changed = changed[: dice.randrange(len(changed))] + bytes(dice.randrange(4))
        try:
            decoded = decode_positions(bytes(changed), kept, total)
        except BadFrame:
            continue
        assert len(decoded) == kept
        assert bool((np.diff(decoded) > 0).all())
        assert 0 <= decoded[0] <= decoded[-1] < total


@pytest.mark.parametrize("name", [*PARTIAL, *OLDER])
def test_another_count_or_a_smaller_tensor_is_refused(name: str) -> None:
    data, kept, total = stream_of(name)
    for other, below in ((kept - 1, total), (kept + 1, total), (kept, 3999 if name == "bitmap" else 1500)):
        with pytest.raises(BadFrame):
            decode_positions(data, other, below)


@pytest.mark.parametrize(
    ("data", "kept", "total"),
    [
        (b"", 1, 10),
        (b"\x00", 3, 10),
        (b"\xff\x00", 1, 10),
        (b"\x01\x3f\x01", 1, 10),
        (b"\x01", 1, 10),
        (b"\x00", 0, 10),
        (b"\x00", 11, 10),
        (b"\x00", 1, MAX_POSITIONS),
        (b"\x03" + b"\xff" * 9 + b"\x01", 1, 10),
        (b"\x04\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + b"\x01\x00\x00", 1, 10),
    ],
)
def test_a_hostile_stream_is_refused_before_anything_is_allocated(data: bytes, kept: int, total: int) -> None:
    with pytest.raises(BadFrame):
        decode_positions(data, kept, total)


@pytest.mark.parametrize(("width", "kept"), [(4096, 8), (4096, 1), (100, 5), (64, 10), (3, 2)])
def test_ranked_positions_come_back_at_a_fixed_size_near_the_entropy(width: int, kept: int) -> None:
    plan = plan_ranks(width, kept)
    assert plan is not None
    local = np.stack([uniform(kept, width, seed) for seed in range(40)])
    local[0], local[1] = np.arange(kept), np.arange(width - kept, width)
    data = encode_ranks(local, plan)
    assert len(data) == plan.bytes_of(40)
    assert decode_ranks(data, 40, plan).tolist() == local.tolist()
    assert plan.bits <= math.log2(math.comb(width, kept)) + 3


def test_eight_of_4096_take_81_bits() -> None:
    plan = plan_ranks(4096, 8)
    assert plan is not None
    assert plan.bits == 81


def test_a_rank_beyond_the_last_or_equal_positions_are_refused() -> None:
    plan = plan_ranks(4096, 8)
    assert plan is not None
    data = encode_ranks(uniform(8, 4096)[None], plan)
    with pytest.raises(BadFrame):
        decode_ranks(np.full_like(data, 0xFF), 1, plan)
    with pytest.raises(BadFrame):
        decode_ranks(np.zeros_like(data), 1, plan)  # eight times position 0
    with pytest.raises(BadFrame):
        decode_ranks(data[:-1], 1, plan)
