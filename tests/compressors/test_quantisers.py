"""What each quantiser promises of its own; what all codecs must keep is in the conformance suite."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors import make_compressor, rates
from compressors.base import Packet
from compressors.contrib.quantised.planes import Planes
from compressors.contrib.quantised.stochastic import Dice, Rounder
from compressors.packing import (
    CHUNK,
    empty,
    flat,
    payload_array,
    read_floats,
    read_params,
    rebuild,
    require_length,
    write_floats,
)
from tests.compressors.codec_cases import FLOATS, normal, round_trip

GOLDEN = [9661, 24876, 60747, 5725, 47552, 3968]
"""The first rolls of seed 4711: two ends of other versions must draw the same."""
CODES = ("int8_block", "int4_block", "qsgd", "terngrad", "natural", "sign")


# ---------------------------------------------------------------- one each


def test_fp16_keeps_gradients_that_half_precision_alone_would_lose() -> None:
    tensor = normal(TensorMeta((4096,), "float32"), scale=1e-9)
    assert not tensor.to(torch.float16).any()
    assert torch.allclose(round_trip(make_compressor("fp16"), tensor), tensor, rtol=2.0**-11, atol=1e-17)


def test_fp16_scales_each_chunk_by_itself() -> None:
    tensor = torch.cat([normal(TensorMeta((CHUNK,), "float32"), scale=s) for s in (1e-20, 1e20, 1.0)])
    assert torch.allclose(round_trip(make_compressor("fp16"), tensor), tensor, rtol=2.0**-10, atol=0.0)


def test_fp16_clamps_finite_values_beside_an_infinity_and_keeps_the_infinity_and_nan() -> None:
    tensor = torch.tensor([1e6, -1e6, torch.inf, -torch.inf, torch.nan, 1.5])
    expected = torch.tensor([65504.0, -65504.0, torch.inf, -torch.inf, torch.nan, 1.5])
    assert torch.equal(round_trip(make_compressor("fp16"), tensor).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_fp16_refuses_a_shift_that_no_encoder_makes() -> None:
    packet, _ = make_compressor("fp16").compress(torch.ones(8))
    payload = bytearray(packet.payload)
    payload[-1] = 0x80
    with pytest.raises(BadFrame, match="-128"):
        make_compressor("fp16").decompress(Packet("fp16", packet.meta, payload))


@pytest.mark.parametrize(("name", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_a_cast_to_the_tensors_own_dtype_is_exact(name: str, dtype: str) -> None:
    tensor = normal(TensorMeta((70_000,), dtype), scale=1e-4)
    tensor[3], tensor[4] = torch.inf, torch.nan
    assert torch.equal(round_trip(make_compressor(name), tensor).nan_to_num(), tensor.nan_to_num())


def test_bf16_rounds_to_nearest_as_torch_does_but_never_to_an_infinity() -> None:
    tensor = normal(TensorMeta((5000,), "float32"))
    decoded = round_trip(make_compressor("bf16"), tensor)
    assert torch.equal(decoded, tensor.to(torch.bfloat16).float())
    huge = torch.tensor([3.4e38, -3.4e38, -torch.inf])
    largest = torch.finfo(torch.bfloat16).max
    expected = torch.tensor([largest, -largest, -torch.inf])
    assert torch.equal(round_trip(make_compressor("bf16"), huge), expected)


@pytest.mark.parametrize(("name", "block"), [("int8_block", 256), ("int4_block", 64), ("qsgd", 512)])
def test_one_bad_value_costs_its_block_alone(name: str, block: int) -> None:
    tensor = normal(TensorMeta((4 * block,), "float32"))
    tensor[block + 3] = torch.inf
    finite = torch.isfinite(round_trip(make_compressor(name), tensor))
    expected = torch.ones(4 * block, dtype=torch.bool)
    expected[block : 2 * block] = False
    assert torch.equal(finite, expected)


def test_int8_error_on_a_gaussian_is_that_of_the_notes() -> None:
    tensor = normal(TensorMeta((1 << 18,), "float32"), scale=1e-3)
    decoded = round_trip(make_compressor("int8_block"), tensor)
    assert float((decoded - tensor).norm() / tensor.norm()) == pytest.approx(0.0070, abs=2e-4)


@given(st.integers(1, 3000), st.integers(0, 2**32))
def test_sign_leaves_what_the_contraction_says(elements: int, seed: int) -> None:
    x = normal(TensorMeta((elements,), "float32"), seed).double()
    error = x - round_trip(make_compressor("sign"), x.float()).double()
    delta = x.abs().sum() ** 2 / (elements * x.square().sum())
    left = (1 - delta) * x.square().sum()
    assert float(error.square().sum()) == pytest.approx(float(left), rel=1e-3, abs=1e-5)


def test_terngrad_is_unbiased_where_nothing_is_clipped_and_sends_five_values_a_byte() -> None:
    x = torch.rand(500, generator=torch.Generator().manual_seed(3)) * 2 - 1  # at most 1.73 sigma
    codec = make_compressor("terngrad")
    decoded = np.stack([round_trip(codec, x, seed).numpy() for seed in range(600)])
    assert len(np.unique(decoded)) == 3
    error = np.abs(decoded.mean(axis=0) - x.numpy())
    assert (error <= 4.0 * decoded.std(axis=0) / np.sqrt(600) + 4e-3).all()
    assert codec.max_payload_bytes(TensorMeta((1000,), "float32")) == 204


def test_terngrad_clips_at_two_and_a_half_sigma() -> None:
    tensor = normal(TensorMeta((50_000,), "float32"))
    largest = float(round_trip(make_compressor("terngrad"), tensor).abs().max())
    assert largest == pytest.approx(2.5 * float(tensor.square().mean().sqrt()), rel=1e-5)


def test_terngrad_refuses_a_byte_that_is_no_five_digits() -> None:
    packet, _ = make_compressor("terngrad").compress(torch.ones(8))
    with pytest.raises(BadFrame, match="243"):
        make_compressor("terngrad").decompress(Packet("terngrad", packet.meta, b"\0" * 4 + b"\xf3\0"))


@pytest.mark.parametrize("dtype", FLOATS)
def test_natural_sends_one_of_the_two_nearest_powers_of_two(dtype: str) -> None:
    x = normal(TensorMeta((3000,), dtype)).float()
    y = round_trip(make_compressor("natural"), x.to(getattr(torch, dtype))).float()
    lower = torch.exp2(x.abs().log2().floor())
    assert bool(((y.abs() == lower) | (y.abs() == 2 * lower)).all())
    assert torch.equal(y.sign(), x.sign())


def test_natural_keeps_powers_of_two_and_zero_and_shows_what_is_not_finite() -> None:
    tensor = torch.tensor([0.0, 1.0, -2.0, 2.0**-60, torch.inf, -torch.inf, torch.nan])
    decoded = round_trip(make_compressor("natural"), tensor)
    assert torch.equal(decoded[:4], tensor[:4])
    assert torch.isnan(decoded[4:]).all()


def test_a_ratio_above_four_halves_qsgds_bytes() -> None:
    meta = TensorMeta((5120,), "float32")
    assert make_compressor("qsgd", 4.0).max_payload_bytes(meta) == 5120 + 40
    assert make_compressor("qsgd", 4.5).max_payload_bytes(meta) == 2560 + 40


@pytest.mark.parametrize("name", CODES)
def test_tiny_values_decode_to_tiny_values_and_zeros_to_what_the_codec_says(name: str) -> None:
    tiny = torch.full((300,), 1e-45)
    assert float(round_trip(make_compressor(name), tiny).abs().max()) <= 2.0**-100
    assert not round_trip(make_compressor(name), torch.zeros(300)).any()


# ---------------------------------------------------------------- what they share


def test_the_dice_are_the_same_on_every_machine_and_version() -> None:
    assert Dice(4711).roll(6).tolist() == GOLDEN
    assert Dice(4711 - 2**64).roll(6).tolist() == GOLDEN


def test_the_dice_are_even() -> None:
    rolls = Dice(7).roll(1 << 20).astype(np.float64)
    assert rolls.mean() == pytest.approx(32767.5, abs=4 * 65536 / np.sqrt(12 * 2**20))
    assert np.bincount((rolls / 4096).astype(np.int64), minlength=16).min() > 2**16 - 4 * 256


def test_rounding_keeps_whole_numbers_and_the_mean_of_the_others() -> None:
    whole = np.arange(-100, 101, dtype=np.float32)
    out = np.empty(201, np.int8)
    Rounder(1).round(whole * np.float32(Rounder.scale), out)
    assert (out == whole).all()
    half = np.full(40_000, -2.25, np.float32)
    out = np.empty(40_000, np.int8)
    Rounder(2).round(half * np.float32(Rounder.scale), out)
    assert set(out.tolist()) == {-3, -2}
    assert out.mean() == pytest.approx(-2.25, abs=4 * 0.433 / 200)


@given(st.sampled_from([2, 3, 5, 16]), st.integers(1, 700), st.integers(0, 2**32))
def test_digits_come_back_from_their_planes(base: int, elements: int, seed: int) -> None:
    planes = Planes(base)
    digits = np.random.default_rng(seed).integers(0, base, elements, np.uint8)
    packed = np.empty(rates.digit_bytes(elements, planes.digits), np.uint8)
    planes.pack(digits, packed)
    assert packed.max() < planes.codes or planes.codes == 256
    back = np.empty_like(digits)
    planes.unpack(packed, back)
    assert (back == digits).all()


def test_five_trits_and_two_nibbles_fit_a_byte() -> None:
    assert (Planes(3).digits, Planes(16).digits) == (rates.TRITS, rates.NIBBLES)
    assert Planes(3).codes == 243


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("elements", [0, 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_chunks_cover_a_tensor_of_any_layout_and_write_it_back(dtype: str, elements: int) -> None:
    tensor = normal(TensorMeta((elements, 2), dtype))[:, 1]
    target = empty(TensorMeta((elements,), dtype))
    read = [chunk.copy() for _, chunk in read_floats(tensor)]
    for (_, values), chunk in zip(write_floats(target), read, strict=True):
        values[:] = chunk
    assert torch.equal(target, tensor)
    assert torch.equal(
        rebuild(flat(tensor).to(torch.float32).numpy(), TensorMeta((elements,), dtype)), tensor
    )


def test_a_dense_tensor_is_not_copied_to_be_read() -> None:
    tensor = normal(TensorMeta((4, 5), "float32"))
    assert flat(tensor).data_ptr() == tensor.data_ptr()
    assert next(read_floats(tensor))[1].ctypes.data == tensor.data_ptr()


def test_what_a_packet_lacks_is_named() -> None:
    packet = Packet("sign", TensorMeta((8,), "float32"), bytes(5), b"abc")
    with pytest.raises(BadFrame, match=r"5 bytes .* 6"):
        require_length(packet, 6)
    with pytest.raises(BadFrame, match="3 bytes of parameters"):
        read_params(packet, struct.Struct("<I"))
    with pytest.raises(BadFrame, match="cut short"):
        payload_array(packet, np.float32, 2)
    with pytest.raises(BadFrame, match="it has none"):
        make_compressor("sign").decompress(packet)
    with pytest.raises(BadFrame, match="int64"):
        make_compressor("sign").decompress(Packet("sign", TensorMeta((8,), "int64"), bytes(5)))
