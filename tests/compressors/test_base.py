"""Packets: headers, marks, and what is refused. What every codec keeps: test_compressor_conformance.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame, UsageError
from atoll.opdag import DTYPE_BYTES, TensorMeta
from compressors import make_compressor
from compressors.base import (
    DTYPES,
    MAX_HEADER_BYTES,
    Packet,
    check_packet,
    parse_packet,
    zero_packet,
)


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
