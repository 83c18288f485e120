"""Conformance: what every codec must keep, and what no received packet may break."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame, UsageError
from atoll.opdag import DTYPE_BYTES, TensorMeta
from compressors import CODECS, make_compressor
from compressors.base import (
    DTYPES,
    MAX_HEADER_BYTES,
    TORCH_DTYPES,
    Packet,
    check_packet,
    meta_of,
    parse_packet,
    zero_packet,
)
from compressors.catalogue import FLOATS

SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 4, 5)]


def sample(meta: TensorMeta, seed: int = 4711) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPES[meta.dtype]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(meta.shape, generator=generator).to(dtype)
    return torch.randint(0, 2, meta.shape, generator=generator).to(dtype)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_and_dtype_survive_the_wire_within_the_stated_bound(
    name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    codec = make_compressor(name)
    meta = TensorMeta(shape, dtype)
    if not CODECS[name].exact and dtype not in FLOATS:
        pytest.skip("lossy codecs take floats")
    packet, _ = codec.compress(sample(meta), seed=1)
    received = parse_packet(packet.header, bytes(packet.payload))
    check_packet(received, name, meta, codec.max_payload_bytes(meta))
    assert meta_of(codec.decompress(received)) == meta
    assert packet.wire_bytes == len(packet.header) + len(packet.payload)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_the_same_seed_gives_the_same_packet(name: str) -> None:
    tensor = sample(TensorMeta((64, 8), "float32"))
    one, two = (make_compressor(name).compress(tensor, seed=7)[0] for _ in range(2))
    assert (one.header, bytes(one.payload)) == (two.header, bytes(two.payload))


@pytest.mark.parametrize("dtype", DTYPES)
def test_none_is_bit_exact_for_every_dtype_and_layout(dtype: str) -> None:
    codec = make_compressor("none")
    tensor = sample(TensorMeta((6, 4), dtype)).T[1:]
    packet, _ = codec.compress(tensor, seed=0)
    assert len(packet.payload) == packet.meta.nbytes == codec.payload_bytes(packet.meta)
    restored = codec.decompress(parse_packet(packet.header, bytes(packet.payload)))
    assert torch.equal(restored, tensor)


def test_none_shares_memory_both_ways() -> None:
    codec = make_compressor("none")
    tensor = torch.arange(8, dtype=torch.float32)
    restored = codec.decompress(codec.compress(tensor, seed=0)[0])
    tensor[3] = 99
    assert restored[3] == 99


def test_a_zero_gradient_is_a_mark_without_payload() -> None:
    meta = TensorMeta((3, 2), "bfloat16")
    packet = zero_packet("none", meta)
    received = parse_packet(packet.header, b"")
    assert received.zero
    assert torch.equal(make_compressor("none").decompress(received), torch.zeros(3, 2, dtype=torch.bfloat16))
    with pytest.raises(BadFrame, match="zero gradient with 4 bytes"):
        parse_packet(packet.header, b"four")


def test_a_packet_that_differs_from_the_plan_is_refused_with_both_sides_named() -> None:
    meta = TensorMeta((4,), "float32")
    packet = Packet("none", meta, bytes(16))
    check_packet(packet, "none", meta, 16)
    for codec, other, limit in (
        ("topk", meta, 16),
        ("none", TensorMeta((5,), "float32"), 16),
        ("none", meta, 8),
    ):
        with pytest.raises(BadFrame):
            check_packet(packet, codec, other, limit)
    with pytest.raises(BadFrame, match="15 bytes"):
        make_compressor("none").decompress(Packet("none", meta, bytes(15)))


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="none"):
        make_compressor("zip")


def test_every_dtype_of_the_vocabulary_has_a_wire_code() -> None:
    assert set(DTYPES) == set(DTYPE_BYTES)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 63), st.integers(0, 255))
def test_no_header_breaks_the_parser(noise: bytes, at: int, value: int) -> None:
    good = bytearray(Packet("none", TensorMeta((2, 3), "float32"), params=b"abc").header)
    good[at % len(good)] = value
    for header in (noise, bytes(good), bytes(good[: at % len(good)]), bytes(MAX_HEADER_BYTES + 1)):
        try:
            packet = parse_packet(header, b"")
        except BadFrame:
            continue
        assert len(packet.meta.shape) <= 16
