"""Top-k: which elements it keeps, how many bytes it takes, and what a reused threshold does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame, UsageError
from atoll.opdag import TensorMeta
from compressors import CODECS, make_compressor
from compressors.base import Packet, Support, meta_of
from compressors.selection import bits_of, kth_largest, largest, largest_in_rows, magnitude
from compressors.sparse_sizes import rows_of
from compressors.topk import Threshold, TopK


def normal(*shape: int, seed: int = 4711) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heavy(*shape: int, seed: int = 4711) -> torch.Tensor:
    return normal(*shape, seed=seed) ** 5 * 1e-3


def kept_of(codec: TopK, tensor: torch.Tensor, state: Threshold | None = None) -> torch.Tensor:
    return codec.support(codec.compress(tensor, state)[0]).positions


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 400), st.integers(1, 12), st.data())
def test_selection_is_that_of_a_sort_with_the_first_of_equals(
    width: int, rows: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, width))
    spread = data.draw(st.sampled_from([3, 2**31 - 1]))
    seed = data.draw(st.integers(0, 2**32))
    bits = np.random.default_rng(seed).integers(-spread, spread, width * rows).astype(np.int32)
    keys = magnitude(bits).astype(np.int64).reshape(rows, width)
    order = np.argsort(-keys, axis=1, kind="stable")[:, :kept]
    wanted = np.sort(order + np.arange(rows)[:, None] * width, axis=1).reshape(-1)
    assert largest_in_rows(bits, width, kept).tolist() == wanted.tolist()
    whole = np.sort(np.argsort(-keys.reshape(-1), kind="stable")[:kept])
    assert largest(bits, kept).tolist() == whole.tolist()


def test_a_long_tensor_and_long_rows_are_selected_exactly() -> None:
    tensor = heavy(700_000)
    for kept in (1, 700, 70_000, 300_000):
        found = largest(bits_of(tensor), kept)
        least = tensor.abs()[torch.from_numpy(found)].min()
        assert len(found) == kept
        assert int((tensor.abs() > least).sum()) < kept
    rows = largest_in_rows(bits_of(tensor), 350_000, 50)
    assert [int((rows < 350_000).sum()), len(rows)] == [50, 100]


@pytest.mark.parametrize(
    "order", ["random", "rising", "few values", "every 97th is zero", "only every 97th is not"]
)
def test_long_tensors_in_any_order_keep_what_a_sort_keeps(order: str) -> None:
    values = np.random.default_rng(4711).integers(0, 2**31 - 1, 400_000).astype(np.int32)
    if order == "rising":
        values.sort()
    elif order == "few values":
        values %= 5
    elif order == "every 97th is zero":
        values[::97] = 0
    elif order == "only every 97th is not":
        values *= np.arange(len(values)) % 97 == 0
    by_size = np.argsort(-values.astype(np.int64), kind="stable")
    for kept in (1, 900, 16_000, 17_000, 150_000, 399_999):
        assert np.array_equal(largest(values, kept), np.sort(by_size[:kept]))
        assert kth_largest(values, kept) == values[by_size[kept - 1]]


def test_every_row_keeps_the_same_number_of_its_own_largest() -> None:
    tensor = normal(6, 40, 256) * torch.linspace(0.01, 100.0, 40)[:, None]
    positions = kept_of(TopK(30.0), tensor)
    rows = positions.view(240, -1) // 256
    assert torch.equal(rows, torch.arange(240)[:, None].expand_as(rows))


@pytest.mark.parametrize(
    ("shape", "rows"), [((3, 64), 3), ((3, 63), 1), ((), 1), ((0,), 1), ((2, 0, 64), 1), ((2, 3, 100), 6)]
)
def test_short_rows_select_over_the_whole_tensor(shape: tuple[int, ...], rows: int) -> None:
    assert rows_of(TensorMeta(shape, "float32"))[0] == rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ratio", [4.0, 12.0, 50.0, 150.0])
def test_packets_of_activations_are_within_3_percent_of_the_plan_and_reach_the_ratio(
    dtype: str, ratio: float
) -> None:
    channels = torch.exp(normal(512, seed=1))  # a few columns are large in every token
    tensor = (normal(4, 64, 512) * channels).to(getattr(torch, dtype))
    packet, _ = TopK(ratio).compress(tensor)
    meta = meta_of(tensor)
    planned = CODECS["topk"].payload_bytes(meta, ratio)
    assert len(packet.payload) <= 1.005 * planned
    assert len(packet.payload) >= 0.9 * planned  # columns that all tokens share cost less
    assert meta.nbytes / planned >= 0.999 * ratio
    gaussian, _ = TopK(ratio).compress(normal(4, 64, 512).to(tensor.dtype))
    assert len(gaussian.payload) == pytest.approx(planned, rel=0.01)


def test_the_values_come_back_as_halves_however_small_or_large() -> None:
    for scale in (1e-38, 1e-20, 1.0, 1e20, 1e37):
        tensor = normal(50, 128) * scale
        decoded = TopK(20.0).decompress(TopK(20.0).compress(tensor)[0])
        kept = decoded != 0
        assert torch.allclose(decoded[kept], tensor[kept], rtol=2.0**-11, atol=0.0)


def test_halves_stay_exact_and_the_largest_floats_finite() -> None:
    halves = normal(40, 128).half()
    decoded = TopK(10.0).decompress(TopK(10.0).compress(halves)[0])
    assert torch.equal(decoded[decoded != 0], halves[decoded != 0])
    largest_float = torch.full((4, 64), torch.finfo(torch.float32).max)
    for values in ("fp16", "2bit", "1bit"):
        codec = TopK(10.0, values=values)
        assert torch.isfinite(codec.decompress(codec.compress(largest_float)[0])).all()


@pytest.mark.parametrize("values", ["fp32", "fp16", "2bit", "1bit"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_selected_first_and_seen(values: str, bad: float) -> None:
    tensor = normal(20, 128) * 1e30
    tensor[7, 3] = bad
    codec = TopK(60.0, values=values)  # type: ignore[arg-type]
    decoded = codec.decompress(codec.compress(tensor)[0])
    assert not torch.isfinite(decoded[7]).all()
    assert torch.isfinite(decoded[:7]).all()


@pytest.mark.parametrize(("values", "most"), [("fp32", 0.0), ("fp16", 0.0003), ("2bit", 0.12), ("1bit", 0.3)])
def test_fewer_bits_a_value_cost_their_error_on_what_is_kept(values: str, most: float) -> None:
    tensor = normal(64, 256)
    codec = TopK(density=0.05, values=values)  # type: ignore[arg-type]
    decoded = codec.decompress(codec.compress(tensor)[0])
    kept = decoded != 0
    assert (decoded - tensor)[kept].norm() <= most * tensor[kept].norm()


def test_the_error_is_no_larger_than_what_was_left_out_at_random() -> None:
    tensor = heavy(100_000)
    decoded = TopK(density=0.01, rows=False).decompress(TopK(density=0.01, rows=False).compress(tensor)[0])
    assert (decoded - tensor).norm() ** 2 <= (1 - 0.01) * tensor.norm() ** 2


# ---------------------------------------------------------------- thresholds


@pytest.mark.parametrize("make", [normal, heavy], ids=["normal", "heavy"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_a_reused_threshold_follows_tensors_that_change_and_never_exceeds_its_budget(
    make: object, density: float
) -> None:
    codec, state, total = TopK(density=density, rows=False, selection="reused"), None, 200_000
    counts = []
    for step in range(30):
        scale = 1.03**step if step < 20 else 50.0  # drifts, then jumps
        packet, state = codec.compress(make(total, seed=step) * scale, state)  # type: ignore[operator]
        counts.append(codec.support(packet).positions.numel() / (density * total))
        assert len(packet.payload) <= codec.max_payload_bytes(packet.meta)
    assert max(counts) <= 1.25
    assert min(counts) >= 0.5
    assert np.mean(counts) == pytest.approx(1.0, abs=0.2)


def test_a_sampled_threshold_lands_near_its_count() -> None:
    tensor = heavy(1_000_000)
    count = kept_of(TopK(density=0.01, rows=False, selection="sampled"), tensor).numel()
    assert count == pytest.approx(10_000, rel=0.1)


@pytest.mark.parametrize("selection", ["sampled", "reused"])
def test_thresholds_send_no_zero_and_survive_odd_tensors(selection: str) -> None:
    codec = TopK(density=0.1, rows=False, selection=selection)  # type: ignore[arg-type]
    sparse = torch.zeros(10_000)
    sparse[[5, 4000, 9999]] = torch.tensor([1.0, -2.0, 3.0])
    state = None
    for tensor in (sparse, torch.zeros(500), torch.full((3000,), 0.5), torch.full((300,), torch.nan), sparse):
        packet, state = codec.compress(tensor, state)
        assert len(packet.payload) <= codec.max_payload_bytes(packet.meta)
        decoded = codec.decompress(packet)
        assert decoded.isnan().any() == tensor.isnan().any()
        positions = codec.support(packet).positions
        assert (tensor.view(-1)[positions] != 0).all()
    assert torch.equal(codec.decompress(codec.compress(sparse, None)[0]), sparse)


def test_rows_select_exactly() -> None:
    with pytest.raises(ValueError, match="rows=False"):
        TopK(10.0, selection="reused")


# ---------------------------------------------------------------- the gradient's side


def test_values_at_agreed_positions_take_two_bytes_each() -> None:
    value, gradient = normal(30, 256), heavy(30, 256)
    codec = TopK(40.0)
    support = codec.support(codec.compress(value)[0])
    packet = codec.compress_on(gradient, support)
    assert len(packet.payload) == 2 + 2 * support.positions.numel()
    decoded = codec.decompress_on(packet, support)
    at = support.positions
    assert torch.allclose(decoded.view(-1)[at], gradient.view(-1)[at], rtol=2.0**-11, atol=1e-9)
    decoded.view(-1)[at] = 0.0
    assert not decoded.any()


def test_a_gradient_of_another_size_is_refused() -> None:
    codec = TopK(40.0)
    support = codec.support(codec.compress(normal(30, 256))[0])
    packet = codec.compress_on(normal(30, 256), support)
    with pytest.raises(BadFrame):
        codec.decompress_on(packet, Support(support.meta, support.positions[1:]))
    with pytest.raises(BadFrame):
        codec.decompress_on(replace(packet, meta=TensorMeta((256, 30), "float32")), support)
    with pytest.raises(BadFrame):
        codec.decompress(packet)
    with pytest.raises(BadFrame):
        codec.decompress_on(codec.compress(normal(30, 256))[0], support)


def test_integers_are_not_taken() -> None:
    with pytest.raises(UsageError, match="int64"):
        TopK(10.0).compress(torch.arange(5000))


@pytest.mark.parametrize("params", [b"", b"\x00" * 17, b"\xff" * 18, b"\x00\x01" + b"\xff" * 16])
def test_hostile_parameters_are_refused(params: bytes) -> None:
    packet, _ = TopK(10.0).compress(normal(100, 128))
    with pytest.raises(BadFrame):
        TopK(10.0).decompress(Packet("topk", packet.meta, packet.payload, params))


@pytest.mark.parametrize("ratio", [8.0, 12.0, 20.0, 50.0, 150.0])
def test_two_bits_a_value_lose_less_of_an_activation_in_the_same_bytes(ratio: float) -> None:
    tensor = normal(4, 64, 512)
    meta, errors = meta_of(tensor), []
    for name in ("topk", "topk2"):
        codec = make_compressor(name, ratio)
        packet, _ = codec.compress(tensor)
        planned = CODECS[name].payload_bytes(meta, ratio)
        assert len(packet.payload) == pytest.approx(planned, rel=0.01)
        assert meta.nbytes / planned >= 0.999 * ratio
        errors.append(float((codec.decompress(packet) - tensor).norm()))
    assert errors[1] < errors[0]
