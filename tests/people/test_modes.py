"""Modes of a module and of its parts: what the owner left in evaluation mode stays there in training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coordinator.client.prepare import prepare
from tests.people.loop import Case, case, compare, job_of, run


def rows() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    return {"x": torch.randn(32, 6, generator=g) + 2, "y": torch.randint(0, 4, (32,), generator=g)}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x)), y)


def frozen_batch_norm() -> nn.Module:
    """The kind of fine-tuning: statistics and affine of one layer are fixed."""
    net = Net().train()
    net.encoder[1].eval().requires_grad_(False)
    return net


def frozen_statistics_only() -> nn.Module:
    net = Net()
    net.encoder[1].eval()
    return net


def frozen_encoder_with_dropout() -> nn.Module:
    """Its dropout stays off, so that a plain loop gives the same numbers."""
    net = Net(dropout=0.5)
    net.encoder.eval().requires_grad_(False)
    return net


def evaluation_as_a_whole() -> nn.Module:
    """As ``from_pretrained`` returns a model; every loop begins with ``net.train()``."""
    return Net().eval()


def head_put_in_training() -> nn.Module:
    net = Net(dropout=0.5).eval()
    net.head.train()
    return net


def everything_in_evaluation_but_the_root() -> nn.Module:
    net = Net(dropout=0.5)
    for child in net.children():
        child.eval()
    return net


class FreezesInTrain(Net):
    """Keeps its batch norm in evaluation mode whatever its loop asks."""

    def train(self, mode: bool = True) -> FreezesInTrain:
        super().train(mode)
        self.encoder[1].eval()
        return self


def frozen_by_train() -> nn.Module:
    return FreezesInTrain().train()


CASES = [
    case(frozen_batch_norm, rows),
    case(frozen_statistics_only, rows),
    case(frozen_encoder_with_dropout, rows),
    case(evaluation_as_a_whole, rows),
    case(head_put_in_training, rows),
    case(everything_in_evaluation_but_the_root, rows),
    case(frozen_by_train, rows),
]


@pytest.mark.parametrize("kind", CASES)
def test_the_owners_modes_are_kept(kind: Case, one_thread: None) -> None:
    run(kind)


@pytest.mark.parametrize("make", [frozen_batch_norm, head_put_in_training])
def test_the_module_comes_back_in_the_modes_it_had(make: Callable[[], nn.Module], one_thread: None) -> None:
    job = compare(lambda: job_of(make(), rows()))
    assert [part.training for part in job.module.modules()] == [part.training for part in make().modules()]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (frozen_batch_norm, "left in evaluation mode, and trained in it: encoder.1"),
        (frozen_encoder_with_dropout, "left in evaluation mode, and trained in it: encoder"),
        (evaluation_as_a_whole, "trained in training mode, as after train()"),
    ],
)
def test_submit_says_in_which_modes_parts_are_trained(make: Callable[[], nn.Module], said: str) -> None:
    words: list[str] = []
    prepare(job_of(make(), rows()), tell=words.append)
    assert any(said in word for word in words)
    words.clear()
    prepare(job_of(Net(), rows()), tell=words.append)
    assert not any("evaluation mode" in word for word in words)
