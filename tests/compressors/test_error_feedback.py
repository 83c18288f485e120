"""Error feedback: nothing is lost, only late; states are committed after delivery."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compressors import make_compressor
from compressors.base import Compressor, meta_of
from compressors.contrib.sparse.chunk_topk import ChunkTopK
from compressors.contrib.sparse.gaussian_k import GaussianK
from compressors.error_feedback import ErrorFeedback, Residual
from compressors.random_k import RandomK
from compressors.topk import TopK


def normal(*shape: int, seed: int = 4711) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def residual_of(state: Residual) -> Tensor:
    assert state.error is not None
    return state.error


CODECS = [
    TopK(density=0.05, rows=False),
    TopK(density=0.05, rows=False, selection="reused"),
    RandomK(density=0.05, unbiased=False),
    make_compressor("sign"),
    make_compressor("int8_block"),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_what_arrived_and_what_waits_add_up_to_all_that_was_given(codec: Compressor) -> None:
    feedback = ErrorFeedback(codec=codec)
    arrived, given = torch.zeros(40, 100), torch.zeros(40, 100)
    state: Residual | None = None
    for step in range(20):
        gradient = normal(40, 100, seed=step)
        packet, state = feedback.compress(gradient, state, seed=step)
        arrived += feedback.decompress(packet)
        given += gradient
    assert state is not None
    assert torch.allclose(arrived + residual_of(state).view(40, 100), given, atol=1e-4)


def test_a_constant_gradient_arrives_in_the_mean() -> None:
    feedback, gradient = ErrorFeedback(codec=TopK(density=0.1, rows=False)), normal(1000)
    state, arrived = None, torch.zeros(1000)
    for _ in range(200):
        packet, state = feedback.compress(gradient, state)
        arrived += feedback.decompress(packet)
    assert (arrived / 200 - gradient).norm() <= 0.1 * gradient.norm()


def test_compressing_again_with_the_old_state_gives_the_same_packet() -> None:
    feedback = ErrorFeedback(30.0)
    _, state = feedback.compress(normal(5000), feedback.init(None))  # type: ignore[arg-type]
    one, _ = feedback.compress(normal(5000, seed=2), state)
    two, _ = feedback.compress(normal(5000, seed=2), state)
    assert (one.header, bytes(one.payload)) == (two.header, bytes(two.payload))


def test_a_tensor_that_is_not_finite_does_not_stay_in_the_residual() -> None:
    feedback = ErrorFeedback(codec=TopK(density=0.05, rows=False))
    _, state = feedback.compress(normal(1000))
    hurt = normal(1000, seed=2)
    hurt[17] = torch.nan
    packet, after = feedback.compress(hurt, state)
    assert feedback.decompress(packet).isnan().any()
    assert torch.equal(residual_of(after), residual_of(state))


def test_halves_keep_what_rounding_took() -> None:
    feedback = ErrorFeedback(codec=make_compressor("none"))
    gradient = normal(500).to(torch.bfloat16)
    _, state = feedback.compress(gradient, Residual(torch.full((500,), 1e-3), None))
    assert residual_of(state).abs().max() > 0


@pytest.mark.parametrize("name", ["acp_sgd", "powersgd", "error_feedback"])
def test_a_codec_with_its_own_residual_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} keeps its own residual"):
        ErrorFeedback(codec=make_compressor(name, 8.0))


# ---------------------------------------------------------------- codecs that send some elements alone


SCATTERED: dict[str, Callable[[], Compressor]] = {
    "exact": lambda: TopK(density=0.05, rows=False),
    "rows": lambda: TopK(20.0),
    "sampled": lambda: TopK(density=0.05, rows=False, selection="sampled"),
    "reused": lambda: TopK(density=0.05, rows=False, selection="reused"),
    "full values": lambda: TopK(density=0.05, values="fp32"),
    "two bits": lambda: make_compressor("topk2", 20.0),
    "gaussian_k": lambda: GaussianK(density=0.05),
    "random_k": lambda: RandomK(density=0.05, unbiased=False),
    "chunks": lambda: ChunkTopK(kept=64),
    "chunks by sign": lambda: ChunkTopK(kept=8, values="1bit"),
}
every_scattered = pytest.mark.parametrize("name", SCATTERED)


@every_scattered
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_residual_has_the_bits_of_a_dense_subtraction(name: str, dtype: torch.dtype) -> None:
    feedback = ErrorFeedback(codec=SCATTERED[name]())
    state = feedback.init(meta_of(normal(90, 100)))
    for step in range(3):
        gradient = normal(90, 100, seed=step).to(dtype)
        before = torch.zeros(9000) if state.error is None else state.error.clone()
        packet, state = feedback.compress(gradient, state, seed=step)
        arrived = feedback.decompress(packet).reshape(-1).float()
        expected = before + gradient.reshape(-1).float() - arrived
        assert torch.equal(residual_of(state).view(torch.int32), expected.view(torch.int32))


@every_scattered
def test_no_tensor_is_decoded_to_find_what_was_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = SCATTERED[name]()

    def decompress(*_: object) -> Tensor:
        raise AssertionError("decoded as a whole")

    monkeypatch.setattr(codec, "decompress", decompress)
    _, state = ErrorFeedback(codec=codec).compress(normal(90, 100), seed=1)
    assert 0.0 < float(residual_of(state).norm()) < float(normal(90, 100).norm())


def test_where_values_are_exact_the_residual_is_zero_at_the_kept_positions() -> None:
    codec = TopK(density=0.05, values="fp32")
    packet, state = ErrorFeedback(codec=codec).compress(normal(2000))
    kept = codec.support(replace(packet, codec=codec.name)).positions
    expected = normal(2000)
    expected[kept] = 0.0
    assert kept.numel() == 100
    assert torch.equal(residual_of(state), expected)


@every_scattered
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_leaves_the_residual_as_it_was_wherever_it_stands(name: str, bad: float) -> None:
    feedback = ErrorFeedback(codec=SCATTERED[name]())
    _, state = feedback.compress(normal(90, 100), seed=1)
    waiting = residual_of(state).clone()
    for at in (0, 4567, 8999):
        hurt = normal(90, 100, seed=2)
        hurt.view(-1)[at] = bad
        packet, after = feedback.compress(hurt, state, seed=2)
        assert not torch.isfinite(feedback.decompress(packet)).all()
        assert torch.equal(residual_of(after), waiting)
    assert torch.equal(residual_of(state), waiting)


def test_a_sum_beyond_the_dtype_leaves_the_residual_as_it_was() -> None:
    feedback = ErrorFeedback(codec=TopK(density=0.05, rows=False))
    near = torch.full((1000,), 6e4, dtype=torch.float16)
    packet, state = feedback.compress(near)
    _, after = feedback.compress(near, state)  # 50 arrived, the others are at 120,000
    assert torch.isfinite(feedback.decompress(packet)).all()
    assert torch.equal(residual_of(after), residual_of(state))


# ---------------------------------------------------------------- papers/compression.md 1.5, in small


WORKERS, BATCH, CLASSES, INPUTS, HIDDEN = 8, 16, 10, 32, 32
STEPS, RATE = 1500, 0.05
SIZES = [INPUTS * HIDDEN, HIDDEN, HIDDEN * CLASSES, CLASSES]


def task(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Labels of a random teacher with noise; training and test."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16_000, INPUTS, generator=generator)
    hidden = torch.tanh(x @ torch.randn(INPUTS, 24, generator=generator))
    scores = hidden @ torch.randn(24, CLASSES, generator=generator)
    y = (scores + torch.randn(scores.shape, generator=generator)).argmax(1)
    return x[:8000], y[:8000], x[8000:], y[8000:]


def views(flat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parameters of the MLP in one vector."""
    w1, b1, w2, b2 = torch.split(flat, SIZES)
    return w1.view(INPUTS, HIDDEN), b1, w2.view(HIDDEN, CLASSES), b2


def gradients(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[workers, parameters]: of each worker's mean cross-entropy, [workers, batch, inputs]."""
    w1, b1, w2, b2 = views(flat)
    hidden = torch.relu(x @ w1 + b1)
    error = (torch.softmax(hidden @ w2 + b2, -1) - torch.nn.functional.one_hot(y, CLASSES)) / BATCH
    inner = (error @ w2.T) * (hidden > 0)
    parts = (x.mT @ inner, inner.sum(1), hidden.mT @ error, error.sum(1))
    return torch.cat([part.reshape(WORKERS, -1) for part in parts], 1)


def accuracy(seed: int, make: Callable[[], Compressor] | None) -> float:
    """Of an MLP that WORKERS train, one averaged packet each a step."""
    x, y, test_x, test_y = task(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    flat = torch.randn(sum(SIZES), generator=generator) * INPUTS**-0.5
    codecs = [make() for _ in range(WORKERS)] if make else []
    states: list[object] = [None] * WORKERS
    for step in range(STEPS):
        at = torch.randint(0, len(x), (WORKERS, BATCH), generator=generator)
        updates = gradients(flat, x[at], y[at])
        for worker, codec in enumerate(codecs):
            packet, states[worker] = codec.compress(updates[worker], states[worker], seed=step)
            updates[worker] = codec.decompress(packet)
        flat -= RATE * updates.mean(0)
    w1, b1, w2, b2 = views(flat)
    found = (torch.relu(test_x @ w1 + b1) @ w2 + b2).argmax(1)
    return float((found == test_y).float().mean())


@pytest.mark.slow
def test_error_feedback_keeps_dense_accuracy_and_top_k_without_it_does_not() -> None:
    dense = accuracy(1, None)
    with_feedback = {
        "top-k": accuracy(1, lambda: ErrorFeedback(codec=TopK(density=0.01, rows=False))),
        "random-k": accuracy(1, lambda: ErrorFeedback(codec=RandomK(density=0.01, unbiased=False))),
        "sign": accuracy(1, lambda: ErrorFeedback(codec=make_compressor("sign"))),
    }
    assert min(with_feedback.values()) >= dense - 0.01, (dense, with_feedback)
    without = accuracy(1, lambda: TopK(density=0.01, rows=False))
    assert without <= dense - 0.05
