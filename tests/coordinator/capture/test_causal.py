"""Masks of attention that say no more than "causal" are no tensors any more; all others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from coordinator.capture.capture import Captured, capture
from coordinator.capture.self_check import self_check

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, TOKENS, WIDTH = 2, 6, 4
Mask = Callable[["Masked", Tensor], Tensor]


class Masked(nn.Module):
    """A layer of attention whose mask is made by ``mask``."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.mask = nn.Linear(WIDTH, 3 * WIDTH), mask
        self.register_buffer("held", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.mix(x).chunk(3, dim=2))
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(self, x), scale=0.7)
        return found.square().mean()


def by_positions(m: Masked, x: Tensor) -> Tensor:
    at = torch.arange(TOKENS)
    return (at[None, :] <= at[:, None]).expand(ROWS, 1, -1, -1)


def of_infinities(m: Masked, x: Tensor) -> Tensor:
    return torch.full((TOKENS, TOKENS), float("-inf")).triu(1)


def of_least_numbers(m: Masked, x: Tensor) -> Tensor:
    return torch.where(by_positions(m, x), 0.0, torch.finfo(torch.float32).min)


def of_a_window(m: Masked, x: Tensor) -> Tensor:
    at = torch.arange(TOKENS)
    return by_positions(m, x) & (at[:, None] - at[None, :] < 3)


def of_mild_numbers(m: Masked, x: Tensor) -> Tensor:
    return torch.full((TOKENS, TOKENS), -10.0).triu(1)


def of_an_input(m: Masked, x: Tensor) -> Tensor:
    return by_positions(m, x) & (x[:, None, None, :, 0] < 1e9)


def of_a_buffer(m: Masked, x: Tensor) -> Tensor:
    return m.held


def written_in_place(m: Masked, x: Tensor) -> Tensor:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    view = mask[0]
    view[2:] = False  # not what its own ops alone would give
    return mask.tril()


def example() -> Tensor:
    return torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def captured(mask: Mask) -> tuple[nn.Module, Captured]:
    module = Masked(mask)
    return module, capture(module, {"x": example()})


@pytest.mark.parametrize("mask", [by_positions, of_infinities, of_least_numbers])
def test_a_causal_mask_is_no_tensor_any_more(mask: Mask) -> None:
    module, found = captured(mask)
    for dag in (found.train, found.evaluation):
        (node,) = (node for node in dag.ops if "scaled_dot_product" in node.target)
        assert node.args[3:] == (None, 0.0, True)
        assert node.kwargs == (("scale", 0.7),)
        assert not any(len(o.shape) > 1 and o.shape[-2:] == (TOKENS,) * 2 for n in dag.ops for o in n.outputs)
    self_check(module, found, {"x": example()})


@pytest.mark.parametrize("mask", [of_a_window, of_mild_numbers, of_an_input, of_a_buffer, written_in_place])
def test_any_other_mask_and_one_that_may_change_stay(mask: Mask) -> None:
    module, found = captured(mask)
    (node,) = (node for node in found.train.ops if "scaled_dot_product" in node.target)
    assert "attn_mask" in dict(node.kwargs) or node.args[3] is not None
    self_check(module, found, {"x": example()})
