"""PowerSGD, ACP-SGD and the low-rank cut: the algebra of their papers, and packets nobody can break."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors import CODECS, make_compressor
from compressors.base import Packet, meta_of, parse_packet
from compressors.contrib.low_rank import acp_sgd, powersgd
from compressors.contrib.low_rank.acp_sgd import AcpSGD
from compressors.contrib.low_rank.factors import orthonormal, sketch
from compressors.contrib.low_rank.low_rank import LowRank
from compressors.contrib.low_rank.powersgd import PowerSGD
from compressors.contrib.low_rank.ranks import MAX_RANK, acp_rank, cut_rank, powersgd_rank

NAMES = ("powersgd", "acp_sgd", "low_rank")
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (64, 96), (8, 16, 3, 3), (2, 40, 64)]


def gaussian(*shape: int, seed: int = 4711) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decaying(rows: int, columns: int, power: float = 1.0, seed: int = 4711) -> torch.Tensor:
    """Singular values falling like 1 / i**power, as those of gradients do."""
    left, _, right = torch.linalg.svd(gaussian(rows, columns, seed=seed), full_matrices=False)
    sizes = torch.arange(1, min(rows, columns) + 1) ** -power
    return (left * sizes) @ right


def sent(codec: Any, tensor: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any, Packet]:
    packet, after = codec.compress(tensor, state, seed=1)
    assert len(packet.payload) <= codec.max_payload_bytes(packet.meta)
    return codec.decompress(parse_packet(packet.header, bytes(packet.payload)), state), after, packet


@pytest.mark.parametrize("ratio", [1.0, 2.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_packets_have_the_size_that_the_catalogue_counts(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, ratio: float
) -> None:
    codec, tensor = make_compressor(name, ratio), gaussian(*shape).to(dtype)
    meta = meta_of(tensor)
    back, state, packet = sent(codec, tensor, codec.init(meta))
    second, _, again = sent(codec, tensor, state)
    assert meta_of(back) == meta_of(second) == meta
    mean = (len(packet.payload) + len(again.payload)) / 2
    assert mean == CODECS[name].size(meta, ratio)
    assert len(packet.payload) <= meta.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_the_ratio_is_kept_wherever_a_rank_above_one_fits(name: str) -> None:
    for shape in ((512, 512), (1024, 256), (64, 4096)):
        meta = TensorMeta(shape, "float32")
        for ratio in (4.0, 8.0, 16.0):
            taken = CODECS[name].payload_bytes(meta, ratio)
            assert 0.5 * meta.nbytes / ratio < taken <= meta.nbytes / ratio


def test_ranks_are_bounded_and_vectors_travel_dense() -> None:
    large, vector = TensorMeta((8192, 8192), "float32"), TensorMeta((8192,), "float32")
    for rank in (powersgd_rank, acp_rank, cut_rank):
        assert rank(large, 1.5) == MAX_RANK
        assert rank(large, 1e4) == 1
        assert rank(vector, 8.0) == 0
    for name in NAMES:
        values = gaussian(8192)
        back, _, _ = sent(make_compressor(name, 8.0), values)
        assert torch.equal(back, values)


def test_the_start_is_the_same_numbers_on_every_machine() -> None:
    assert sketch(2, 2, 7).flatten().tolist() == pytest.approx(
        [-0.67255, 0.74415, 0.94453, -0.40927], abs=1e-4
    )
    basis = orthonormal(gaussian(50, 8))
    assert torch.allclose(basis.T @ basis, torch.eye(8), atol=1e-5)
    assert torch.allclose(orthonormal(basis), basis, atol=1e-5)
    empty = orthonormal(torch.zeros(50, 8))
    assert torch.allclose(empty.T @ empty, torch.eye(8), atol=1e-5)


# ---------------------------------------------------------------- PowerSGD


def test_powersgd_recovers_a_matrix_of_its_rank() -> None:
    codec = PowerSGD(ratio=64 * 96 / (4 * 160))
    assert powersgd_rank(TensorMeta((64, 96), "float32"), codec.ratio) == 4
    tensor = gaussian(64, 4) @ gaussian(4, 96, seed=2)
    back, state, _ = sent(codec, tensor)
    assert torch.allclose(back, tensor, atol=1e-3)
    assert state.residual.abs().max() < 1e-3


@pytest.mark.parametrize("name", ["powersgd", "acp_sgd"])
def test_nothing_is_lost_only_delayed(name: str) -> None:
    """Error feedback: what was decoded and what is left add up to what went in."""
    codec, total_in, total_out = make_compressor(name, 8.0), torch.zeros(64, 96), torch.zeros(64, 96)
    state = codec.init(meta_of(total_in))
    for step in range(12):
        tensor = gaussian(64, 96, seed=step)
        back, state, _ = sent(codec, tensor, state)
        total_in += tensor
        total_out += back
    assert torch.allclose(total_out + state.residual, total_in, atol=1e-3)


@pytest.mark.parametrize("name", ["powersgd", "acp_sgd"])
def test_the_mean_of_what_arrives_tends_to_a_steady_gradient(name: str) -> None:
    codec, tensor = make_compressor(name, 8.0), decaying(64, 96)
    state, total = codec.init(meta_of(tensor)), torch.zeros_like(tensor)
    errors = []
    for step in range(1, 65):
        back, state, _ = sent(codec, tensor, state)
        total += back
        errors.append(float((total / step - tensor).norm() / tensor.norm()))
    assert errors[-1] < 0.1
    assert errors[-1] < 0.2 * errors[0]


def test_powersgd_s_phases_averaged_over_workers_compress_the_mean_gradient() -> None:
    gradients = [decaying(48, 80, seed=seed) for seed in range(4)]
    mean = torch.stack(gradients).mean(0)
    state = PowerSGD(6.0).init(meta_of(mean))
    p = torch.stack([powersgd.phase_p(g, state.q) for g in gradients]).mean(0)
    pairs = [powersgd.phase_q(g, p) for g in gradients]
    q = torch.stack([q for _, q in pairs]).mean(0)
    together = powersgd.restored(pairs[0][0], q)
    alone, _, _ = sent(PowerSGD(6.0), mean, state)
    assert torch.allclose(together, alone, atol=1e-5)


def test_the_warm_start_finds_the_leading_directions() -> None:
    codec, tensor = PowerSGD(8.0), decaying(64, 96, power=0.7)
    state, rank = codec.init(meta_of(tensor)), powersgd_rank(meta_of(tensor), 8.0)
    best = torch.linalg.svdvals(tensor)[rank:].norm()
    errors = []
    for _ in range(8):
        fresh = replace(state, residual=torch.zeros_like(state.residual))
        back, state, _ = sent(codec, tensor, fresh)
        errors.append(float((back - tensor).norm() / best))
    assert errors[-1] < 1.02 < errors[0]


def test_a_zero_gradient_keeps_the_span_found_so_far() -> None:
    codec, tensor = PowerSGD(8.0), decaying(64, 96)
    _, state, _ = sent(codec, tensor)
    nothing = replace(state, residual=torch.zeros_like(state.residual))
    back, after, _ = sent(codec, torch.zeros(64, 96), nothing)
    assert not back.any()
    assert torch.equal(after.q, state.q)


# ---------------------------------------------------------------- ACP-SGD


def test_acp_sends_half_of_powersgd_s_bytes_at_one_rank() -> None:
    meta = TensorMeta((256, 640), "float32")
    assert acp_rank(meta, 40.0) == powersgd_rank(meta, 20.0) == 9
    assert CODECS["acp_sgd"].size(meta, 40.0) == CODECS["powersgd"].size(meta, 20.0) / 2


def test_the_two_ends_of_acp_stay_in_step() -> None:
    codec = AcpSGD(8.0)
    sender = receiver = codec.init(TensorMeta((64, 96), "float32"))
    for step in range(10):
        packet, after = codec.compress(gaussian(64, 96, seed=step), sender)
        received = parse_packet(packet.header, bytes(packet.payload))
        assert torch.equal(codec.decompress(received, receiver), codec.decompress(received, sender))
        sender, receiver = after, codec.follow(received, receiver)
        assert torch.equal(sender.basis, receiver.basis)
        assert sender.step == receiver.step == step + 1


def test_acp_is_linear_for_one_basis() -> None:
    codec, one, two = AcpSGD(8.0), gaussian(64, 96, seed=1), gaussian(64, 96, seed=2)
    state = codec.init(meta_of(one))
    parts = [sent(codec, x, state)[0] for x in (one, two, one + two)]
    assert torch.allclose(parts[0] + parts[1], parts[2], atol=1e-5)


def test_acp_s_factors_are_summed_over_workers_without_an_answer() -> None:
    gradients = [decaying(48, 80, seed=seed) for seed in range(3)]
    basis = AcpSGD(6.0).init(meta_of(gradients[0])).basis
    for step in range(4):
        factors = [acp_sgd.phase(g, basis, step) for g in gradients]
        together = acp_sgd.restored(torch.stack(factors).sum(0), basis, step)
        alone = acp_sgd.restored(acp_sgd.phase(torch.stack(gradients).sum(0), basis, step), basis, step)
        assert torch.allclose(together, alone, atol=1e-5)
        basis = acp_sgd.next_basis(torch.stack(factors).sum(0))


def test_a_packet_of_another_step_is_refused() -> None:
    codec, tensor = AcpSGD(8.0), gaussian(64, 96)
    first, state = codec.compress(tensor)
    second, _ = codec.compress(tensor, state)
    with pytest.raises(BadFrame, match="step 1, this side is at 0"):
        codec.decompress(second)
    with pytest.raises(BadFrame, match="step 0, this side is at 1"):
        codec.decompress(first, state)


# ---------------------------------------------------------------- the low-rank cut


@pytest.mark.parametrize("shape", [(512, 256), (128, 1024), (4, 100, 48)])
def test_the_cut_is_nearly_as_good_as_the_best_of_its_rank(shape: tuple[int, ...]) -> None:
    matrix = decaying(torch.Size(shape[:-1]).numel(), shape[-1])
    codec = LowRank(8.0)
    back, _, _ = sent(codec, matrix.reshape(shape))
    rank = cut_rank(TensorMeta(shape, "float32"), 8.0)
    best = torch.linalg.svdvals(matrix)[rank:].norm()
    assert (back.reshape(matrix.shape) - matrix).norm() < 1.1 * best


def test_the_cut_halves_sft_s_bytes_a_token_and_adds_the_features() -> None:
    """SFT at rank 8 of 768 sends 32 bytes a token of 3072; here 16, and 16 a feature once a tensor."""
    meta = TensorMeta((32 * 66, 768), "float32")
    ratio = meta.nbytes / CODECS["low_rank"].size(meta, 132.0)
    assert cut_rank(meta, 132.0) == 8
    assert 132 < ratio < 150


@pytest.mark.parametrize("size", [1e-38, 1.0, 3e37])
def test_the_cut_takes_any_size_of_element(size: float) -> None:
    matrix = (decaying(96, 80, power=2.0) * size).clamp(-3e38, 3e38)
    back, _, _ = sent(LowRank(2.0), matrix)
    assert torch.isfinite(back).all()
    if size > 1e-30:
        assert ((back - matrix) / size).norm() < 2e-3 * (matrix / size).norm()


# ---------------------------------------------------------------- all three


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_visible_and_leaves_the_state_alone(name: str, value: float) -> None:
    codec, tensor = make_compressor(name, 8.0), gaussian(64, 96)
    _, state, _ = sent(codec, tensor, codec.init(meta_of(tensor)))
    tensor[3, 5] = value
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        meta = meta_of(tensor.to(dtype))
        before = state if dtype == torch.float32 else codec.init(meta)
        back, after, _ = sent(codec, tensor.to(dtype), before)
        assert not torch.isfinite(back).all()
        assert after is before


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_near_its_limit_stays_finite(name: str) -> None:
    tensor = (gaussian(64, 96).sign() * 65000).to(torch.float16)
    back, _, _ = sent(make_compressor(name, 4.0), tensor)
    assert torch.isfinite(back).all()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_packet_is_refused_or_a_valid_tensor(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    codec = make_compressor(name, 8.0)
    shape = data.draw(st.sampled_from([(48, 40), (8, 6, 40), (300,)]))
    packet, _ = codec.compress(gaussian(*shape))
    payload, params = bytearray(packet.payload), bytearray(packet.params)
    for part in data.draw(st.lists(st.sampled_from([payload, params]), min_size=1, max_size=3)):
        if part:
            part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload)))]
    try:
        back = codec.decompress(Packet(name, packet.meta, bytes(payload), bytes(params)))
    except BadFrame:
        return
    assert meta_of(back) == packet.meta
