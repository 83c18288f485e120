"""Conformance: what every codec of the catalogue must keep, found by its name there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.opdag import TensorMeta
from compressors import CODECS
from compressors.base import DTYPES, Packet, SparseCompressor, meta_of, zero_packet
from compressors.contrib.low_rank.acp_sgd import AcpSGD
from compressors.packing import TORCH_DTYPES
from tests.compressors.codec_cases import (
    CASES,
    ELEMENTWISE,
    FLOATS,
    HEADROOM,
    MAY_VANISH,
    REACH,
    TWO_LEVELS,
    Case,
    assert_within_bound,
    doubles,
    normal,
    over_the_wire,
    round_trip,
    tensors,
)

SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 4, 5), (3, 200)]
ACTIVATION = TensorMeta((96, 512), "float32")
SIZE_TOLERANCE = 0.15
"""Of the catalogue's expected payload against a Gaussian's: codes of positions and entropy vary."""

every_case = pytest.mark.parametrize("case", CASES, ids=str)
lossy_case = pytest.mark.parametrize("case", [c for c in CASES if not CODECS[c.name].exact], ids=str)
exact_case = pytest.mark.parametrize("case", [c for c in CASES if CODECS[c.name].exact], ids=str)
sparse_case = pytest.mark.parametrize("case", [c for c in CASES if CODECS[c.name].size_on], ids=str)


def same(one: Packet, two: Packet) -> bool:
    return one.header == two.header and bytes(one.payload) == bytes(two.payload)


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_shape_and_dtype_survive_the_wire_or_the_codec_says_that_it_does_not_take_them(
    case: Case, dtype: str
) -> None:
    for shape in SHAPES:
        tensor = normal(TensorMeta(shape, dtype))
        if dtype in FLOATS or CODECS[case.name].exact:
            round_trip(case.make(), tensor)
            continue
        with pytest.raises(UsageError, match=dtype):
            case.make().compress(tensor)


@every_case
@settings(max_examples=40, deadline=None)
@given(tensors(), st.integers(0, 2**63))
def test_what_arrives_is_within_the_stated_bound(case: Case, tensor: torch.Tensor, seed: int) -> None:
    assert_within_bound(case, tensor, round_trip(case.make(), tensor, seed))


@every_case
@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_of_several_chunks_arrive_within_the_same_bound(case: Case, dtype: str) -> None:
    tensor = normal(TensorMeta((3, 50_001), dtype), scale=1e-3)
    assert_within_bound(case, tensor, round_trip(case.make(), tensor, 7), gaussian=True)


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "random_k"], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_decoder_of_zeros_would_be_noticed(case: Case, dtype: str) -> None:
    tensor = normal(TensorMeta((200, 512), dtype), scale=1e-3)
    with pytest.raises(AssertionError):
        assert_within_bound(case, tensor, torch.zeros_like(tensor), gaussian=True)


def test_a_tensor_of_which_nothing_arrives_is_one_that_may_vanish() -> None:
    vanishing: dict[str, tuple[Case, torch.Tensor]] = {
        "random_k": (Case("random_k", 60.0), torch.eye(1, 640)),
        "eden": (Case("eden", 60.0), torch.cat([torch.eye(1, 128), torch.eye(1, 128)], 1)),
    }
    basis = AcpSGD(8.0).init(TensorMeta((2, 640), "float32")).basis
    across = torch.eye(1, 640) - basis[0] @ basis.T
    vanishing["acp_sgd"] = Case("acp_sgd", 8.0), torch.cat([across, -2.0 * across])
    assert set(vanishing) == set(MAY_VANISH) - {"powersgd"}  # whose case no rounded product meets
    for name, (case, tensor) in vanishing.items():
        arrived = min(float(round_trip(case.make(), tensor, seed).norm()) for seed in range(20))
        assert arrived <= 1e-6 * float(tensor.norm()), name


@every_case
@settings(max_examples=20, deadline=None)
@given(tensors(), st.integers(0, 2**63))
def test_the_same_tensor_state_and_seed_give_the_same_packet_and_neither_is_changed(
    case: Case, tensor: torch.Tensor, seed: int
) -> None:
    before = tensor.clone()
    codec = case.make()
    state = codec.init(meta_of(tensor))
    first, after = codec.compress(tensor, state, seed=seed)
    # Frozen bytes: a payload may share the tensor's memory.
    kept = Packet(first.codec, first.meta, bytes(first.payload), first.params)
    assert same(kept, case.make().compress(tensor, state, seed=seed)[0])
    second, _ = codec.compress(tensor, after, seed=seed)
    assert same(second, case.make().compress(tensor, after, seed=seed)[0])
    assert torch.equal(tensor, before)


@every_case
@settings(max_examples=20, deadline=None)
@given(tensors())
def test_wire_bytes_are_those_on_the_wire_and_within_what_the_receiver_allows(
    case: Case, tensor: torch.Tensor
) -> None:
    codec = case.make()
    packet, _ = codec.compress(tensor, seed=1)
    assert packet.wire_bytes == len(packet.header + bytes(packet.payload))
    assert len(packet.payload) <= codec.max_payload_bytes(packet.meta)


@every_case
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_planner_counts_the_bytes_that_a_packet_really_takes(case: Case, dtype: str) -> None:
    meta = TensorMeta(ACTIVATION.shape, dtype)
    codec, facts = case.make(), CODECS[case.name]
    one, state = codec.compress(normal(meta, 1, scale=1e-3), codec.init(meta), seed=1)
    two, _ = codec.compress(normal(meta, 2, scale=1e-3), state, seed=2)  # acp_sgd's sides alternate
    expected = facts.size(meta, case.ratio)
    assert (len(one.payload) + len(two.payload)) / 2 == pytest.approx(expected, rel=SIZE_TOLERANCE)
    assert facts.payload_bytes(meta, case.ratio) <= meta.nbytes


@exact_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_codecs_keep_every_bit_and_stride(case: Case, dtype: str) -> None:
    whole = normal(TensorMeta((6, 40, 8), dtype))
    for tensor in (whole, whole.transpose(0, 2)[1:], whole[:, ::3], whole[:1].expand(4, 40, 8)):
        decoded = round_trip(case.make(), tensor)
        assert torch.equal(decoded, tensor)
        assert decoded.stride() == tensor.stride()


@exact_case
@pytest.mark.parametrize("dtype", FLOATS)
def test_exact_codecs_keep_the_bits_of_nan_and_signed_zero(case: Case, dtype: str) -> None:
    size = torch.finfo(TORCH_DTYPES[dtype]).bits // 8
    noise = torch.from_numpy(np.random.default_rng(7).integers(0, 256, 4096 * size, np.uint8))
    tensor = noise.view(TORCH_DTYPES[dtype])
    assert torch.equal(round_trip(case.make(), tensor).view(torch.uint8), noise)


@every_case
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_element_that_is_not_finite_is_seen_at_the_other_end(case: Case, dtype: str) -> None:
    for shape in ((1,), (3, 5), (4, 300), (2000,)):
        tensor = normal(TensorMeta(shape, dtype))
        places = {0, tensor.numel() // 2, tensor.numel() - 1}
        for at, bad in itertools.product(places, (torch.inf, -torch.inf, torch.nan)):
            hurt = tensor.clone()
            hurt.view(-1)[at] = bad
            assert not torch.isfinite(round_trip(case.make(), hurt)).all(), (shape, at, bad)


@every_case
@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_values_stay_finite_up_to_the_largest_of_their_dtype(case: Case, dtype: str) -> None:
    largest = torch.finfo(TORCH_DTYPES[dtype]).max / HEADROOM.get(case.name, 1.0)
    largest = min(largest, REACH.get(case.name, torch.inf))
    signs = normal(TensorMeta((4, 100), "float32")).sign()
    extremes = (signs.double() * largest).to(TORCH_DTYPES[dtype])
    spread = extremes * torch.linspace(0.0, 1.0, 400).view(4, 100).to(extremes.dtype)
    for tensor in (extremes, spread):
        assert torch.isfinite(round_trip(case.make(), tensor)).all()


@every_case
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_zero_mark_is_a_tensor_of_zeros(case: Case, dtype: str) -> None:
    meta = TensorMeta((3, 70), dtype)
    codec = case.make()
    decoded = codec.decompress(over_the_wire(codec, zero_packet(case.name, meta)))
    assert meta_of(decoded) == meta
    assert not decoded.any()


UNBIASED = [c for c in CASES if CODECS[c.name].unbiased and not CODECS[c.name].exact]


@pytest.mark.parametrize("case", UNBIASED, ids=str)
def test_unbiased_codecs_give_the_tensor_in_the_mean_over_seeds(case: Case) -> None:
    draws = 1000
    tensor = normal(TensorMeta((5, 64), "float32"))
    x, codec = doubles(tensor), case.make()
    decoded = np.stack([doubles(round_trip(codec, tensor, seed)) for seed in range(draws)])
    # Two more draws at the largest error: of what is rarely rounded up no draw may show a variance.
    variance = decoded.var(axis=0, ddof=1) + 4.0 * ELEMENTWISE[case.name](x, case.ratio) ** 2 / draws
    floor = 2.0**-16 * np.abs(x).max()  # the dice's fixed point
    assert (np.abs(decoded.mean(axis=0) - x) <= 4.0 * np.sqrt(variance / draws) + floor).all()


@pytest.mark.parametrize("case", [c for c in CASES if CODECS[c.name].linear], ids=str)
def test_linear_codecs_decode_a_sum_as_the_sum_of_what_is_decoded(case: Case) -> None:
    codec, meta = case.make(), TensorMeta((48, 64), "float32")
    one, two = normal(meta, 1), normal(meta, 2)
    parts = round_trip(codec, one, seed=9) + round_trip(codec, two, seed=9)
    assert torch.allclose(round_trip(codec, one + two, seed=9), parts, atol=1e-5)


@every_case
def test_the_catalogue_says_whether_a_codec_has_a_state(case: Case) -> None:
    facts, codec, meta = CODECS[case.name], case.make(), TensorMeta((64, 96), "float32")
    state = codec.init(meta)
    packets = []
    for step in range(3):
        packet, state = codec.compress(normal(meta, step), state, seed=step)
        packets.append(packet)
    assert (state is not None) == facts.stateful
    if not facts.shared_state:
        for packet in packets:
            assert meta_of(codec.decompress(over_the_wire(codec, packet))) == meta


# ---------------------------------------------------------------- sparse codecs on agreed positions


@sparse_case
@settings(max_examples=40, deadline=None)
@given(tensors(), st.integers(0, 2**63))
def test_the_gradient_travels_at_the_positions_of_its_value(
    case: Case, tensor: torch.Tensor, seed: int
) -> None:
    codec: SparseCompressor = case.make()  # type: ignore[assignment]
    meta = meta_of(tensor)
    forward, _ = codec.compress(tensor, seed=seed)
    sender = codec.support(forward)
    receiver = codec.support(over_the_wire(codec, forward))
    assert torch.equal(sender.positions, receiver.positions)
    positions = sender.positions
    assert positions.numel() < 2 or bool((positions.diff() > 0).all())
    gradient = normal(meta, 3)
    packet = codec.compress_on(gradient, receiver, seed=seed)
    assert len(packet.payload) <= codec.max_payload_bytes_on(meta)
    decoded = codec.decompress_on(packet, sender)
    assert meta_of(decoded) == meta
    kept = torch.zeros(meta.elements, dtype=torch.bool)
    kept[positions] = True
    flat, wanted = decoded.reshape(-1), gradient.reshape(-1)
    assert not flat[~kept].any()
    assert_values_arrive(case, flat[kept].double(), wanted[kept].double())


def assert_values_arrive(case: Case, arrived: torch.Tensor, sent: torch.Tensor) -> None:
    """Gaussian values at agreed positions, to the value format's precision."""
    if case.name not in TWO_LEVELS:
        assert torch.allclose(arrived, sent, rtol=2.0**-7, atol=1e-6)
        return
    assert not (arrived * sent < 0).any()
    assert (arrived - sent).norm() <= TWO_LEVELS[case.name] * sent.norm()


@sparse_case
def test_the_planner_counts_the_bytes_of_a_gradient_at_agreed_positions(case: Case) -> None:
    codec: SparseCompressor = case.make()  # type: ignore[assignment]
    size_on = CODECS[case.name].size_on
    assert size_on is not None
    forward, _ = codec.compress(normal(ACTIVATION), seed=1)
    packet = codec.compress_on(normal(ACTIVATION, 2), codec.support(forward), seed=1)
    assert len(packet.payload) == pytest.approx(size_on(ACTIVATION, case.ratio), rel=SIZE_TOLERANCE)


@sparse_case
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_is_seen_wherever_it_is(case: Case, bad: float) -> None:
    codec: SparseCompressor = case.make()  # type: ignore[assignment]
    support = codec.support(codec.compress(normal(ACTIVATION), seed=1)[0])
    for at in (0, 777, ACTIVATION.elements - 1, int(support.positions[0])):
        gradient = normal(ACTIVATION, 2)
        gradient.view(-1)[at] = bad
        assert not torch.isfinite(codec.decompress_on(codec.compress_on(gradient, support), support)).all()
