"""Error feedback: nothing is lost, only late; states are committed after delivery."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compressors import make_compressor
from compressors.base import Compressor
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


def test_a_packet_that_was_given_up_loses_nothing() -> None:
    feedback = ErrorFeedback(codec=TopK(density=0.05, rows=False))
    state: Residual | None = None
    arrived, given = torch.zeros(2000), torch.zeros(2000)
    for step in range(12):
        gradient = normal(2000, seed=step)
        given += gradient
        packet, after = feedback.compress(gradient, state)
        if step % 3 == 1:  # no acknowledgement
            state = feedback.undelivered(gradient, state)
        else:
            arrived += feedback.decompress(packet)
            state = after
    assert state is not None
    assert torch.allclose(arrived + residual_of(state), given, atol=1e-4)


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
    assert torch.equal(residual_of(feedback.undelivered(hurt, state)), residual_of(state))


def test_halves_keep_what_rounding_took() -> None:
    feedback = ErrorFeedback(codec=make_compressor("none"))
    gradient = normal(500).to(torch.bfloat16)
    _, state = feedback.compress(gradient, Residual(torch.full((500,), 1e-3), None))
    assert residual_of(state).abs().max() > 0


def test_a_codec_with_its_own_residual_is_refused() -> None:
    with pytest.raises(ValueError, match="acp_sgd"):
        ErrorFeedback(codec=make_compressor("acp_sgd", 8.0))


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
