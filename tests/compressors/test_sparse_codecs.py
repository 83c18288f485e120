"""Random-k, Gaussian-k, chunks, DCT and chains: what each promises beyond conformance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors import CODECS, make_compressor
from compressors.base import Compressor, Packet, meta_of
from compressors.contrib.chain import Chain, DefaultChain, KeepLargest, Zstd
from compressors.contrib.sparse.chunk_topk import ChunkTopK
from compressors.contrib.sparse.dct_topk import DctTopK
from compressors.contrib.sparse.gaussian_k import GaussianK
from compressors.random_k import RandomK, draw_positions
from compressors.selection import all_finite
from compressors.topk import TopK


def normal(*shape: int, seed: int = 4711) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- random_k


def test_a_seed_draws_the_same_positions_on_every_machine() -> None:
    drawn = draw_positions(100_000, 1000, seed=4711)
    # From this file's first run: another figure here means that links between versions break.
    assert drawn[:5].tolist() == FIRST_DRAWN
    assert (len(drawn), int(drawn.sum())) == DRAWN_SUM


FIRST_DRAWN = [302, 454, 501, 551, 571]
DRAWN_SUM = (889, 44_102_562)


def test_every_element_is_drawn_with_probability_k_over_d() -> None:
    total, kept, draws = 400, 20, 6000
    counts = np.zeros(total)
    pairs = 0
    for seed in range(draws):
        drawn = draw_positions(total, kept, seed)
        counts[drawn] += 1
        pairs += len(drawn) * (len(drawn) - 1)
    share = kept / total
    assert np.abs(counts / draws - share).max() <= 5 * (share * (1 - share) / draws) ** 0.5
    expected = total * (total - 1) * share**2  # independent of each other
    assert pairs / draws == pytest.approx(expected, rel=0.03)


def test_seeds_differ_and_a_full_draw_is_everything() -> None:
    assert draw_positions(5000, 50, 1).tolist() != draw_positions(5000, 50, 2).tolist()
    assert draw_positions(7, 7, 1).tolist() == list(range(7))
    assert len(draw_positions(0, 0, 1)) == 0


def test_no_index_travels_and_values_keep_their_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = normal(100_000).to(dtype)
        codec = RandomK(density=0.01, unbiased=False)
        packet, _ = codec.compress(tensor, seed=3)
        positions = codec.support(packet).positions
        assert len(packet.payload) == positions.numel() * tensor.element_size()
        decoded = codec.decompress(packet)
        assert torch.equal(decoded[positions], tensor[positions])
        assert int(torch.count_nonzero(decoded)) <= positions.numel()


def test_a_count_that_the_seed_does_not_draw_is_refused() -> None:
    codec = RandomK(100.0)
    packet, _ = codec.compress(normal(10_000), seed=3)
    fewer = packet.params[:9] + (len(packet.payload) // 4 - 1).to_bytes(8, "little")
    with pytest.raises(BadFrame, match="draws"):
        codec.decompress(Packet("random_k", packet.meta, packet.payload[4:], fewer))
    with pytest.raises(BadFrame):
        codec.decompress(Packet("random_k", packet.meta, packet.payload[1:], packet.params))


def test_a_finite_sum_is_not_needed_for_finite_elements() -> None:
    assert all_finite(torch.full((10,), 3e38))
    assert not all_finite(torch.tensor([torch.inf, -torch.inf, 1.0]))


# ---------------------------------------------------------------- gaussian_k


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("power", [1, 5], ids=["normal", "heavy-tailed"])
def test_gaussian_k_keeps_its_budget_where_the_published_form_misses_it(density: float, power: int) -> None:
    tensor = normal(300_000) ** power
    codec = GaussianK(density=density)
    packet, _ = codec.compress(tensor)
    count = codec.support(packet).positions.numel()
    assert count == pytest.approx(density * 300_000, rel=0.05)
    assert bytes(packet.payload) == bytes(TopK(density=density, rows=False).compress(tensor)[0].payload)


def test_gaussian_k_survives_tensors_without_a_deviation() -> None:
    for tensor in (torch.zeros(500), torch.full((500,), 2.0), torch.full((500,), torch.inf), torch.ones(1)):
        codec = GaussianK(20.0)
        decoded = codec.decompress(codec.compress(tensor)[0])
        assert torch.isfinite(decoded).all() == torch.isfinite(tensor).all()


# ---------------------------------------------------------------- chunk_topk


@pytest.mark.parametrize("elements", [4096 * 300, 4096 * 2000])
def test_64_of_4096_take_at_most_7_6_bits_a_position_and_200_times_fewer_bytes(
    elements: int,
) -> None:
    """SparseLoCo's own format: 12 bits a position, 146 times."""
    tensor = normal(elements)
    packet, _ = ChunkTopK(kept=64).compress(tensor)
    chunks = elements // 4096
    positions = 8 * len(packet.payload) - 2 * 64 * chunks - 8 * chunks - 8 * 8  # values, scales, levels
    assert positions / (64 * chunks) <= 7.6
    assert tensor.numel() * 4 / packet.wire_bytes >= 200


@pytest.mark.parametrize("elements", [4096 * 300, 4096 * 2000])
def test_signs_of_8_of_4096_with_8_bits_of_scale_take_1300_times_fewer_bytes(elements: int) -> None:
    """Psyche: 16 bits a position, 964 times without a scale."""
    tensor = normal(elements)
    packet, _ = ChunkTopK(kept=8, values="1bit").compress(tensor)
    chunks = elements // 4096
    assert 8 * len(packet.payload) <= chunks * (81 + 8 + 8) + 8 * 8
    assert tensor.numel() * 4 / packet.wire_bytes >= 1300


@pytest.mark.parametrize("kept", [1, 8, 64, 1000])
@pytest.mark.parametrize("elements", [1, 100, 4096, 4097, 10_000])
@pytest.mark.parametrize("values", ["2bit", "1bit", "fp16"])
def test_chunks_keep_their_largest_whatever_the_length(elements: int, kept: int, values: str) -> None:
    tensor = normal(elements)
    codec = ChunkTopK(kept=kept, values=values)
    packet, _ = codec.compress(tensor)
    assert len(packet.payload) <= codec.max_payload_bytes(packet.meta)
    decoded = codec.decompress(packet)
    for at in range(0, elements, 4096):
        part, whole = decoded[at : at + 4096], tensor[at : at + 4096]
        found = part.nonzero().view(-1)
        count = min(kept, len(whole))
        assert set(found.tolist()) == set(whole.abs().topk(count).indices.tolist())
        assert torch.equal(part[found].sign(), whole[found].sign())


def test_chunk_scales_are_within_4_5_percent() -> None:
    tensor = normal(4096 * 50) * torch.logspace(-6, 3, 50).repeat_interleave(4096)
    codec = ChunkTopK(kept=8, values="1bit")
    decoded = codec.decompress(codec.compress(tensor)[0]).view(50, 4096)
    largest = tensor.view(50, 4096).abs().topk(8).values.mean(1)
    assert torch.allclose(decoded.abs().max(1).values, largest, rtol=0.045)


# ---------------------------------------------------------------- dct_topk


@pytest.mark.parametrize("shape", [(128, 256), (64,), (1000,), (3, 5, 70), (97, 101), (7, 2)])
def test_all_coefficients_give_the_tensor_back(shape: tuple[int, ...]) -> None:
    tensor = normal(*shape)
    decoded = DctTopK(1.0).decompress(DctTopK(1.0).compress(tensor)[0])
    assert torch.allclose(decoded, tensor, atol=4e-3)


def test_smooth_tensors_need_few_coefficients() -> None:
    ramp = torch.linspace(-1, 1, 128)[:, None] * torch.linspace(0, 2, 256)[None]
    dct, plain = DctTopK(60.0), TopK(60.0, rows=False)
    dct_error = (dct.decompress(dct.compress(ramp)[0]) - ramp).norm()
    assert dct_error <= 0.1 * (plain.decompress(plain.compress(ramp)[0]) - ramp).norm()
    assert dct_error <= 0.05 * ramp.norm()


def test_the_transform_keeps_lengths_so_the_error_is_what_was_left_out() -> None:
    tensor = normal(256, 256)
    decoded = DctTopK(20.0).decompress(DctTopK(20.0).compress(tensor)[0])
    assert (tensor - decoded).norm() ** 2 + decoded.norm() ** 2 == pytest.approx(
        float(tensor.norm() ** 2), rel=1e-3
    )


# ---------------------------------------------------------------- chain


@pytest.mark.parametrize(
    "name", ["fp16", "bf16", "int8_block", "int4_block", "sign", "qsgd", "natural", "none"]
)
def test_any_codec_may_take_the_values_of_a_split(name: str) -> None:
    tensor = normal(30, 256)
    codec = Chain([KeepLargest(20.0)], make_compressor(name), [Zstd()])
    packet, _ = codec.compress(tensor, seed=5)
    assert len(packet.payload) <= codec.max_payload_bytes(packet.meta)
    decoded = codec.decompress(packet)
    kept = KeepLargest(20.0).kept(meta_of(tensor)).elements
    assert int(torch.count_nonzero(decoded)) <= kept
    assert (decoded - tensor).norm() < tensor.norm()


def test_splits_follow_each_other_and_chains_need_none() -> None:
    tensor = normal(64, 256)
    twice = Chain([KeepLargest(4.0), KeepLargest(4.0)], make_compressor("fp16"))
    decoded = twice.decompress(twice.compress(tensor)[0])
    assert 0 < int(torch.count_nonzero(decoded)) < tensor.numel() / 3
    bare = Chain([], make_compressor("lossless"), [Zstd(), Zstd()])
    assert torch.equal(bare.decompress(bare.compress(tensor)[0]), tensor)


def test_zstd_makes_the_default_chain_smaller() -> None:
    tensor = normal(500, 512)
    bare = Chain([KeepLargest(50.0)], make_compressor("fp16"))
    coded = DefaultChain(50.0)
    packet, _ = coded.compress(tensor)
    assert len(packet.payload) <= coded.max_payload_bytes(packet.meta)
    assert len(packet.payload) < 0.97 * len(bare.compress(tensor)[0].payload)


def test_a_chain_around_a_codec_with_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="powersgd"):
        Chain([], make_compressor("powersgd", 8.0))


def test_a_part_that_claims_more_than_its_bound_is_refused() -> None:
    codec = DefaultChain(20.0)
    packet, _ = codec.compress(normal(64, 256))
    payload = bytearray(packet.payload)
    payload[2] = 0xFF
    with pytest.raises(BadFrame):
        codec.decompress(Packet("chain", packet.meta, bytes(payload)))
    with pytest.raises(BadFrame, match="behind the last"):
        codec.decompress(Packet("chain", packet.meta, bytes(packet.payload) + b"\0"))


# ---------------------------------------------------------------- what the planner counts

ACTIVATIONS = TensorMeta((4, 64, 512), "float32")


@pytest.mark.parametrize("ratio", [8.0, 30.0, 100.0])
@pytest.mark.parametrize("name", ["random_k", "gaussian_k", "dct_topk", "chain", "chunk_topk"])
def test_the_planned_size_is_met(name: str, ratio: float) -> None:
    tensor = normal(*ACTIVATIONS.shape)
    sizes = [len(make_compressor(name, ratio).compress(tensor, seed=seed)[0].payload) for seed in range(4)]
    planned = CODECS[name].payload_bytes(ACTIVATIONS, ratio)
    assert np.mean(sizes) == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(
    "make",
    [lambda: ChunkTopK(100.0), lambda: DctTopK(30.0), lambda: DefaultChain(30.0), lambda: GaussianK(30.0)],
)
def test_a_codec_of_other_settings_refuses_the_packet(make: Callable[[], Compressor]) -> None:
    codec = make()
    packet, _ = codec.compress(normal(40, 512))
    other = TensorMeta((20, 512), "float32")
    with pytest.raises(BadFrame):
        codec.decompress(Packet(codec.name, other, packet.payload, packet.params))
