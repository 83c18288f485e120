"""The lossless codec: the same bits and strides, fewer bytes, and nothing that a peer can break."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors import CODECS, make_compressor
from compressors.base import DTYPES, Packet, meta_of, parse_packet
from compressors.byte_planes import BLOCK
from compressors.lossless import MIN_GAIN
from compressors.packing import TORCH_DTYPES

CODEC = make_compressor("lossless")
SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4), (64, 130), (3, BLOCK // 2 + 1)]


def noise(meta: TensorMeta, seed: int = 4711) -> torch.Tensor:
    """Any bits at all, so NaNs with payloads, infinities, subnormals and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    if meta.dtype == "bool":
        return torch.randint(0, 2, meta.shape, generator=generator).bool()
    raw = torch.randint(0, 256, (max(meta.nbytes, 1),), generator=generator, dtype=torch.uint8)
    return raw[: meta.nbytes].view(TORCH_DTYPES[meta.dtype]).reshape(meta.shape)


def gaussian(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 4711) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def there_and_back(tensor: torch.Tensor) -> tuple[torch.Tensor, Packet]:
    packet, state = CODEC.compress(tensor, seed=1)
    assert state is None
    assert len(packet.payload) <= CODEC.max_payload_bytes(packet.meta)
    return CODEC.decompress(parse_packet(packet.header, bytes(packet.payload))), packet


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_survives_even_of_noise(shape: tuple[int, ...], dtype: str) -> None:
    tensor = noise(TensorMeta(shape, dtype))
    back, _ = there_and_back(tensor)
    assert meta_of(back) == meta_of(tensor)
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("elements", [1024, 65536, BLOCK + 17, 3 * BLOCK])
def test_every_bit_of_a_coded_tensor_survives(elements: int, dtype: torch.dtype) -> None:
    tensor = gaussian((elements,), dtype)
    back, packet = there_and_back(tensor)
    assert bits(back) == bits(tensor)
    assert len(packet.payload) < (1 - MIN_GAIN) * tensor.nbytes


def test_the_memory_layout_survives() -> None:
    base = gaussian((4, 64, 96), torch.float32)
    columns = base[:, :, 32:64]
    odd = gaussian((4001,), torch.float32)[1:]
    for tensor in (base, base.transpose(0, 2), columns, base[:, :1].expand(4, 64, 96), odd):
        back, packet = there_and_back(tensor)
        assert len(packet.payload) < tensor.numel() * 4
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
        assert back.data_ptr() % 64 == tensor.data_ptr() % 64


def test_a_gaussian_comes_near_the_entropy_of_its_exponent() -> None:
    """2.55 bits of exponent: bounds 0.830 (fp32) and 0.659 (bf16), papers/compression.md 1.1."""
    for dtype, bound in ((torch.float32, 0.830), (torch.bfloat16, 0.659)):
        _, packet = there_and_back(1e-3 * gaussian((1 << 20,), dtype))
        assert bound < len(packet.payload) / packet.meta.nbytes < 1.01 * bound


def test_what_does_not_shrink_is_stored_raw_and_shares_memory() -> None:
    tensor = noise(TensorMeta((65536,), "float32"))
    packet, _ = CODEC.compress(tensor)
    assert len(packet.payload) == tensor.nbytes
    tensor.zero_()
    assert not any(bytes(packet.payload))


def test_a_sample_that_misleads_costs_time_but_no_bytes() -> None:
    """Zeros where the sample looks: the mantissas seem to shrink, then do not."""
    tensor = gaussian((1 << 17,), torch.float32)
    eighth = len(tensor) // 8
    for i in range(8):
        middle = eighth * i + eighth // 2
        tensor[middle - 200 : middle + 200] = 0
    back, packet = there_and_back(tensor)
    assert torch.equal(back, tensor)
    assert len(packet.payload) < 0.84 * tensor.nbytes


def test_zeros_and_small_integers_shrink_a_lot() -> None:
    half = gaussian((1000, 512), torch.float32)
    half[::2] = 0
    for tensor, most in (
        (torch.zeros(1 << 16), 0.001),
        (half, 0.47),
        (torch.arange(1 << 14), 0.5),
    ):
        back, packet = there_and_back(tensor)
        assert torch.equal(back, tensor)
        assert len(packet.payload) < most * tensor.nbytes


def test_the_catalogue_counts_what_a_gaussian_takes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _, packet = there_and_back(gaussian((1 << 18,), dtype))
        expected = CODECS["lossless"].payload_bytes(packet.meta, 1.0)
        assert abs(len(packet.payload) / expected - 1) < 0.05


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_packet_is_refused_or_a_valid_tensor(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    tensor = gaussian((40, 48), torch.float32)
    tensor = tensor.to(dtype).T if data.draw(st.booleans()) else tensor.to(dtype)
    packet, _ = CODEC.compress(tensor)
    payload, params = bytearray(packet.payload), bytearray(packet.params)
    for part in data.draw(st.lists(st.sampled_from([payload, params]), min_size=1, max_size=3)):
        if part:
            part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload)))]
    try:
        back = CODEC.decompress(Packet("lossless", packet.meta, bytes(payload), bytes(params)))
    except BadFrame:
        return
    assert meta_of(back) == packet.meta


def test_a_frame_that_claims_a_larger_plane_is_refused_before_anything_is_allocated() -> None:
    import struct

    import zstandard

    meta = TensorMeta((4096,), "float32")
    packet, _ = CODEC.compress(gaussian((4096,), torch.float32))
    bomb = zstandard.compress(bytes(1 << 24))
    sizes = struct.unpack_from("!3Q", packet.params, 1)
    forged = struct.pack("!B3Q", 1, *sizes[:2], len(bomb))  # raw planes go first, the exponent last
    payload = bytes(packet.payload)[: -sizes[2]] + bomb
    with pytest.raises(BadFrame, match="does not hold 4096 bytes"):
        CODEC.decompress(Packet("lossless", meta, payload, forged))
    huge = struct.pack("!B3Q", 1, *sizes[:2], 1 << 60)
    with pytest.raises(BadFrame, match="at most"):
        CODEC.decompress(Packet("lossless", meta, payload, huge))
