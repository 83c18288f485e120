"""Attention whose keys and values go round: values and gradients of torch's own, and what is sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from atoll.mesh.ring import KERNELS, ring_attention
from tests.atoll.mesh.threads import ThreadGroup, together

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, TOKENS, FEATURES = 2, 24, 8


def example(heads: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys, values, and the gradient of the result."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(ROWS, n, TOKENS, FEATURES) for n in (heads, keys, keys, heads)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def whole(given: tuple[Tensor, ...], causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    """The result and gradients of one process."""
    leaves = [each.clone().requires_grad_() for each in given[:3]]
    found = functional.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale, enable_gqa=True)
    return (found.detach(), *torch.autograd.grad(found, leaves, given[3]))


def of_process(
    given: tuple[Tensor, ...], causal: bool, scale: float | None, group: ThreadGroup
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """A process's tokens of the same, and bytes that it sent forward and backward."""
    own = [each.chunk(group.size, 2)[group.rank].clone() for each in given]
    leaves = [each.requires_grad_() for each in own[:3]]
    found = ring_attention(*leaves, group, causal=causal, scale=scale)
    ahead = group.sent_bytes
    gradients = torch.autograd.grad(found, leaves, own[3])
    return (found.detach(), *gradients), (ahead, group.sent_bytes - ahead)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("keys", "scale"), [(4, None), (2, 0.3), (1, None)])
def test_results_and_gradients_are_those_of_one_process(
    size: int, causal: bool, keys: int, scale: float | None
) -> None:
    given = example(4, keys, torch.float32)
    expected = whole(given, causal, scale)
    found = together(size, lambda group: of_process(given, causal, scale, group))
    for at, one in enumerate(expected):
        joint = torch.cat([values[at] for values, _ in found], 2)
        torch.testing.assert_close(joint, one, rtol=1e-5, atol=2e-6)
    block = 2 * ROWS * keys * TOKENS // size * FEATURES * 4  # keys and values
    assert {sent for _, sent in found} == {((size - 1) * block, 2 * (size - 1) * block)}


def test_of_half_precision_running_results_are_sums_in_full_precision() -> None:
    given = example(4, 4, torch.bfloat16)
    exact = whole(tuple(each.double() for each in given), True, None)
    alone = whole(given, True, None)
    found = together(4, lambda group: of_process(given, True, None, group))
    for at, one in enumerate(exact):
        joint = torch.cat([values[at] for values, _ in found], 2)
        assert joint.dtype is torch.bfloat16
        error, least = ((each.double() - one).abs().mean() for each in (joint, alone[at]))
        assert error <= 1.5 * least


def test_under_autocast_blocks_travel_as_they_are_cast() -> None:
    given = example(4, 4, torch.float32)

    def run(group: ThreadGroup) -> tuple[torch.dtype, int]:
        own = [each.chunk(group.size, 2)[group.rank] for each in given[:3]]
        with torch.autocast("cpu", torch.bfloat16):
            found = ring_attention(own[0], own[1], own[2], group)
        return found.dtype, group.sent_bytes

    sent = 2 * ROWS * 4 * TOKENS // 2 * FEATURES * 2
    assert together(2, run) == [(torch.bfloat16, sent)] * 2


@pytest.mark.parametrize("features", [8, 20])
def test_calls_of_the_kernel_of_gpus_have_fitting_shapes(features: int) -> None:
    """On no device: shapes and signatures alone."""
    forward, backward = KERNELS["cuda"]
    query, key = (torch.empty(2, 4, n, features, device="meta", dtype=torch.bfloat16) for n in (40, 56))
    out, logsumexp = forward(query, key, key, False, 0.1)
    assert (out.shape, logsumexp.shape) == (query.shape, (2, 4, 40))
    found = backward(out, (query, key, key), (out, logsumexp), False, 0.1)
    assert [each.shape for each in found] == [query.shape, key.shape, key.shape]
