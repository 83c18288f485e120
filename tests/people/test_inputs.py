"""Example inputs as people give them: one tensor twice, views, expanded, not contiguous, a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.job import Job
from tests.people.loop import compare, job_of


def rows() -> dict[str, Tensor]:
    """Mask and weight are equal in the first rows and differ later."""
    g = torch.Generator().manual_seed(5)
    x, y = torch.randn(48, 6, generator=g), torch.randint(0, 4, (48,), generator=g)
    mask, weight = torch.ones(48), torch.ones(48)
    weight[8:] = 3.0 * (y[8:] == 0)
    return {"x": x, "y": y, "mask": mask, "weight": weight}


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x)) * mask[:, None]
        return (F.cross_entropy(self.b(hidden), y, reduction="none") * weight).mean()


class Overwrites(Weighted):
    """Writes one input, which a plain loop's other inputs do not see."""

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        mask.mul_(0.5)
        return super().forward(x, y, mask, weight)


ONES = torch.ones(4)
BOTH = torch.ones(2, 4)
EXAMPLES: dict[str, Callable[[], Mapping[str, Tensor]]] = {
    "one tensor twice": lambda: {"mask": ONES, "weight": ONES},
    "views of one tensor": lambda: {"mask": BOTH[0], "weight": BOTH[1]},
    "overlapping views": lambda: {"mask": BOTH.view(-1)[:4], "weight": BOTH.view(-1)[2:6]},
    "expanded": lambda: {"mask": torch.ones(1).expand(4), "weight": torch.ones(()).expand(4)},
    "not contiguous": lambda: {"mask": torch.ones(4, 2)[:, 0], "x": torch.zeros(6, 4).T},
    "requires grad": lambda: {"x": torch.zeros(4, 6, requires_grad=True), "mask": nn.Parameter(ONES.clone())},
}


def job(net: Callable[[], nn.Module], name: str, order: tuple[int, ...]) -> Job:
    data = {key: value[list(order)] for key, value in rows().items()}
    made = job_of(net(), data, steps=6)
    return replace(made, example_inputs={**made.example_inputs, **EXAMPLES[name]()})


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("net", [Weighted, Overwrites])
def test_each_input_is_its_own(net: Callable[[], nn.Module], name: str, one_thread: None) -> None:
    compare(lambda: job(net, name, tuple(range(48))))


def test_inputs_that_share_an_example_may_differ_in_the_first_batch(one_thread: None) -> None:
    compare(lambda: job(Weighted, "one tensor twice", tuple(reversed(range(48)))))


def test_a_parameter_given_as_an_example_is_an_input(one_thread: None) -> None:
    def made() -> Job:
        plain = job(Weighted, "one tensor twice", tuple(range(48)))
        bias = plain.module.get_parameter("b.bias")
        return replace(plain, example_inputs={**plain.example_inputs, "weight": bias})

    compare(made)
