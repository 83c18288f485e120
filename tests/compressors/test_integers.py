"""Whole numbers as they travel: what comes out went in, in the bits that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors import integers, make_compressor
from compressors.base import Mark, Packet, parse_packet
from compressors.container import write_coded
from compressors.integers import BLOCK, LARGEST, pack_integers, unpack_integers
from compressors.model_file import read_sums, write_sums
from strategies.fixed import Accumulator, Grid
from strategies.sums import Contribution, Term


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "int64")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3 * BLOCK + 5), st.integers(0, 61), st.integers(0, 2**32))
def test_what_comes_out_went_in(size: int, width: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    most = draw.integers(0, 2**width, size, dtype=np.int64, endpoint=True).clip(0, LARGEST)
    array = np.where(draw.random(size) < 0.5, -most, most)
    packet = pack_integers(array)
    again = parse_packet(packet.header, bytes(packet.payload))
    assert np.array_equal(unpack_integers(again, meta(size)), array)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3, 5), (BLOCK,), (4, BLOCK)])
def test_every_shape_comes_back(shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) - 3
    found = unpack_integers(pack_integers(array), meta(*shape))
    assert found.shape == shape
    assert np.array_equal(found, array)


def test_large_tensors_go_by_pieces_of_their_own_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "PIECE", 4 * BLOCK)
    draw = np.random.default_rng(0)
    for size in (4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 11 * BLOCK + 7):
        array = draw.integers(-(2**20), 2**20, size) << draw.integers(0, 30, size)
        packet = pack_integers(array)
        assert np.array_equal(unpack_integers(packet, meta(size)), array)
        for cut in (1, 3 * BLOCK):
            with pytest.raises(BadFrame):
                unpack_integers(Packet("integers", meta(size), packet.payload[:-cut]), meta(size))


def test_the_extremes_travel_and_what_lies_beyond_is_refused() -> None:
    edge = np.array([LARGEST, -LARGEST, 0, 1, -1], np.int64)
    assert np.array_equal(unpack_integers(pack_integers(edge), meta(5)), edge)
    for bad in (np.array([LARGEST + 1]), np.array([-LARGEST - 1]), np.array([-(2**63)]), np.zeros(2)):
        with pytest.raises(ValueError, match="beyond"):
            pack_integers(bad)


def test_a_block_takes_the_bits_of_its_largest_number_and_one_wide_block_does_not_widen_the_rest() -> None:
    array = np.tile(np.array([2**26 - 1, -(2**26)]), 50 * BLOCK // 2)  # 27 bits as zigzag
    assert len(pack_integers(array).payload) == 51 + 50 * BLOCK * 27 // 8
    array[0] = 2**60
    assert len(pack_integers(array).payload) == 51 + 49 * BLOCK * 27 // 8 + BLOCK * 62 // 8


def test_a_sum_of_fifty_clients_takes_about_one_model_in_float32() -> None:
    draw = np.random.default_rng(1)
    held = Accumulator(Grid({"t": 50 * 200.0}, {}))
    scale = np.exp(draw.normal(-5, 1.5, 100_000))  # layers and channels move by very different amounts
    for _ in range(50):
        delta = (scale * draw.normal(size=100_000)).astype(np.float32)
        held.add(Contribution({"t": Term(float(draw.integers(20, 200)), {"x": delta})}, {}))
    size = len(pack_integers(held.sums().arrays["t"]["x"]).payload)
    assert size < 4 * 100_000


@pytest.mark.parametrize("seed", range(4))
def test_no_packet_however_made_gives_anything_but_numbers_or_a_refusal(seed: int) -> None:
    draw = np.random.default_rng(seed)
    array = draw.integers(-(2**20), 2**20, 2 * BLOCK + 40)
    good = bytes(pack_integers(array).payload)
    refused = 0
    for _ in range(300):
        bad = bytearray(good)
        match draw.integers(4):
            case 0:
                bad[draw.integers(len(bad))] ^= 1 << draw.integers(8)
            case 1:
                bad[draw.integers(3)] = draw.integers(256)
            case 2:
                del bad[draw.integers(len(bad)) :]
            case _:
                bad += draw.bytes(int(draw.integers(1, 9)))
        try:
            found = unpack_integers(Packet("integers", meta(array.size), bytes(bad)), meta(array.size))
        except BadFrame:
            refused += 1
        else:
            assert found.shape == array.shape
            assert np.abs(found).max() <= LARGEST + 1
    assert refused > 150


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "none"},
        {"meta": meta(4)},
        {"params": b"1"},
        {"marks": Mark.ZERO, "payload": b""},
        {"payload": b""},
        {"payload": bytes([63])},
    ],
)
def test_a_packet_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    packet = pack_integers(np.array([1, 2, 3]))
    with pytest.raises(BadFrame):
        unpack_integers(Packet(**{**vars(packet), **change}), meta(3))


def test_a_file_of_sums_is_read_back_and_only_as_what_was_expected(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = {"sum/t/b": draw.integers(-9, 9, (3, 700)), "sum/t/a": draw.integers(-(2**40), 2**40, 5)}
    stored = write_sums(tmp_path / "sums", arrays)
    assert write_sums(tmp_path / "again", dict(reversed(arrays.items()))) == stored
    metas = {name: meta(*array.shape) for name, array in arrays.items()}
    found = read_sums(tmp_path / "sums", metas)
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
    for expected in ({"sum/t/a": meta(5)}, {**metas, "sum/t/a": meta(6)}, {**metas, "sum/t/c": meta(5)}):
        with pytest.raises(BadFrame):
            read_sums(tmp_path / "sums", expected)
    plain, _ = make_compressor("none").compress(torch.zeros(5, dtype=torch.int64))
    write_coded(tmp_path / "other", iter([("sum/t/a", plain)]))
    with pytest.raises(BadFrame, match="a packet of none"):
        read_sums(tmp_path / "other", {"sum/t/a": meta(5)})
