"""Vectors: parts, ordered sums, the strongest, and packets that survive hostile bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import BadFrame
from compressors import make_compressor
from compressors.indices import max_bytes
from compressors.sparse_sizes import most_vector_bytes
from compressors.vector import (
    UNCOMPRESSED,
    Vector,
    chosen,
    dense,
    empty_vector,
    joined,
    pack,
    strongest,
    total,
    unpack,
)


def sparse(size: int, seed: int, kept: int) -> Vector:
    generator = torch.Generator().manual_seed(seed)
    at = torch.randperm(size, generator=generator)[:kept].sort().values
    return Vector(size, torch.randn(kept, generator=generator), at)


@given(st.integers(1, 200), st.lists(st.integers(0, 99), min_size=1, max_size=5))
def test_sparse_sums_are_the_dense_ones_bit_for_bit(size: int, seeds: list[int]) -> None:
    parts = [sparse(size, seed, size // 3) for seed in seeds]
    expected = torch.zeros(size)
    for part in parts:
        expected += part.dense()
    assert torch.equal(total(parts).dense(), expected)
    assert total(parts).sparse
    mixed = [dense(parts[0].dense()), *parts[1:]]
    assert torch.equal(total(mixed).dense(), expected)


def test_vectors_of_different_sizes_are_not_added() -> None:
    with pytest.raises(ValueError, match="cannot be added"):
        total([empty_vector(3), empty_vector(4)])


@given(st.integers(1, 60), st.data())
def test_parts_join_to_the_whole(size: int, data: st.DataObject) -> None:
    vector = sparse(size, 1, size // 2)
    border = data.draw(st.integers(0, size))
    parts = [(0, vector.part(0, border)), (border, vector.part(border, size))]
    assert torch.equal(joined(size, parts).dense(), vector.dense())
    whole = dense(vector.dense())
    parts = [(0, whole.part(0, border)), (border, vector.part(border, size))]
    assert torch.equal(joined(size, parts).dense(), vector.dense())


@given(st.integers(1, 60), st.integers(0, 70))
def test_the_strongest_and_the_rest_are_the_whole(size: int, kept: int) -> None:
    vector = sparse(size, 3, size)
    best, rest = strongest(vector, kept)
    assert torch.equal(best.dense() + rest.dense(), vector.dense())
    assert len(best.values) == min(kept, size)
    if len(best.values) and len(rest.values):
        assert best.values.abs().min() >= rest.values.abs().max()


@given(st.integers(0, 300), st.integers(0, 9))
def test_packets_of_sparse_vectors_come_back(size: int, seed: int) -> None:
    vector = sparse(size, seed, size // 4)
    back = unpack(pack(vector, UNCOMPRESSED), size, UNCOMPRESSED)
    assert back.sparse
    assert torch.equal(back.dense(), vector.dense())


def test_packets_of_dense_vectors_come_back_through_their_codec() -> None:
    vector = dense(torch.randn(5000, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(unpack(pack(vector, UNCOMPRESSED), 5000, UNCOMPRESSED).values, vector.values)
    topk = make_compressor("topk", 50.0)
    assert unpack(pack(vector, topk), 5000, topk).sparse
    int8 = make_compressor("int8_block")
    assert torch.allclose(unpack(pack(vector, int8), 5000, int8).values, vector.values, atol=0.03)


def test_other_packets_are_refused() -> None:
    vector = chosen(dense(torch.arange(100.0)), torch.tensor([3, 5, 50]))
    packet = pack(vector, UNCOMPRESSED)
    for bad in (
        replace(packet, params=b""),
        replace(packet, params=(101).to_bytes(8, "little")),
        replace(packet, params=(2).to_bytes(8, "little")),
        replace(packet, payload=bytes(packet.payload)[:5]),
        replace(packet, payload=bytes(packet.payload) + bytes(4000)),
        replace(packet, codec="topk"),
    ):
        with pytest.raises(BadFrame):
            unpack(bad, 100, UNCOMPRESSED)
    with pytest.raises(BadFrame):
        unpack(packet, 99, UNCOMPRESSED)
    with pytest.raises(BadFrame):
        unpack(pack(dense(torch.zeros(4)), UNCOMPRESSED), 5, UNCOMPRESSED)


def test_no_sparse_vector_of_fewer_elements_is_longer_than_its_bound() -> None:
    """For any number of positions, also where the stream of fewer is the longer one."""
    for size in (*range(1, 70), 127, 300, 1000):
        lengths = [max_bytes(kept, size) + 4 * kept for kept in range(size + 1)]
        for most in range(size + 1):
            assert max(lengths[: most + 1]) <= most_vector_bytes(most, size)
    draw = np.random.default_rng(5)
    for size in (10**5, 3 * 10**6):
        for most in draw.integers(1, size, 20).tolist():
            bound = most_vector_bytes(most, size)
            fewer = draw.integers(0, most, 200, endpoint=True).tolist()
            assert all(max_bytes(kept, size) + 4 * kept <= bound for kept in fewer)
            assert bound < 1.2 * (max_bytes(min(most, size // 2), size) + 4 * most) + 8
