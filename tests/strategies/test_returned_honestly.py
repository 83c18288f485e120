"""Honest graphs pass the check of what a client returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.federated import Federated
from coordinator.client.prepare import check_graphs
from examples.federated_brown import Letters
from examples.federated_mnist import Classifier
from examples.federated_mnist import Net as MnistNet
from strategies.fedimpro_module import FedImpro
from strategies.moon_module import Moon
from strategies.vhl_module import Vhl, VhlLoss
from tests import models
from tests.strategies.test_modules import SPEC, Net, batch, fedimpro
from tests.strategies.test_returned import ROWS, B, D, Rows, captured
from tests.worker.federated.test_trainer import Small


class Recurrent(nn.Module):
    """An LSTM classifier of sequences, batch or time first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=batch_first, dropout=0.2)
        self.head = nn.Linear(5, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out, _ = self.lstm(x if self.batch_first else x.transpose(0, 1))
        last = out[:, -1] if self.batch_first else out[-1]
        return F.cross_entropy(self.head(last), y)


class Captions(nn.Module):
    """Two towers, each sample's two sides against all others' (CLIP), with the mean similarity told."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(D, 4), nn.Linear(D, 4)

    def forward(self, x: Tensor, z: Tensor) -> Tensor | dict[str, Tensor]:
        left, right = F.normalize(self.left(x), dim=1), F.normalize(self.right(z), dim=1)
        logits = left @ right.T / 0.1
        mine = torch.arange(len(x))
        loss = (F.cross_entropy(logits, mine) + F.cross_entropy(logits.T, mine)) / 2
        return loss if self.training else {"loss": loss, "told": (left * right).sum(1).mean()}


class Denoising(nn.Module):
    """A diffusion step: noise of a level drawn for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D + 1, 16), nn.SiLU(), nn.Linear(16, D))
        self.register_buffer("levels", torch.linspace(0.1, 0.9, 10))

    def forward(self, x: Tensor) -> Tensor:
        level = self.levels[torch.randint(0, 10, (len(x),))][:, None]  # type: ignore[index]
        noise = torch.randn_like(x)
        guess = self.net(torch.cat([x * (1 - level) + noise * level, level], 1))
        return F.mse_loss(guess, noise)


def scored(self: Rows, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:
    """Figures that people report."""
    logits = self.head(self.normalise(x, self.mean, self.var) if self.training else x)
    loss = F.cross_entropy(logits, y)
    self.one.mul_(0.9).add_(0.1 * loss.detach())
    if self.training:
        return loss
    guess, top = logits.argmax(1), logits.topk(2, 1).indices
    hits = F.one_hot(y, 3).T.float() @ F.one_hot(guess, 3).float()  # confusion matrix
    recall = (hits.diagonal() / hits.sum(1).clamp(min=1.0)).mean()
    told = (guess == y).float().mean() + (top == y[:, None]).any(1).float().mean() + loss.exp() + recall
    return {"loss": loss, "told": told}


def images(size: int = B) -> dict[str, Tensor]:
    return {"x": torch.rand(size, 1, 28, 28), "y": torch.arange(size) % 10}


def sequences() -> dict[str, Tensor]:
    return {"x": torch.randn(B, 7, 4), "y": torch.arange(B) % 3}


HONEST: dict[str, Callable[[], tuple[nn.Module, Mapping[str, Tensor], str, tuple[str, ...]]]] = {
    "mnist": lambda: (Classifier(MnistNet()), images(), "feddyn", ("accuracy",)),
    "mnist, vhl": lambda: (
        Vhl(MnistNet(), "head", replace(SPEC, classes=10, shape=(1, 28, 28)), VhlLoss(batch=4)),
        images(), "vhl", (),
    ),
    "mnist, fedimpro": lambda: (FedImpro(MnistNet(), "low", 10, images()["x"]), images(), "fedimpro", ()),
    "brown": lambda: (Letters(8, 2), {"tokens": torch.randint(0, 256, (4, 32))}, "fedavgm", ("accuracy",)),
    "batch norm and dropout": lambda: (Small(dropout=0.5), batch(size=8), "fedbn", ()),
    "vhl and batch norm": lambda: (Vhl(Net(), "head", SPEC, VhlLoss(batch=5)), batch(size=8), "vhl", ()),
    "vhl without augmentation": lambda: (
        Vhl(Net(), "head", SPEC, VhlLoss(batch=5, pad=0, flip=False)), batch(size=8), "vhl", ()
    ),
    "moon": lambda: (Moon(Net(), "head"), batch(size=8), "moon", ()),
    "fedimpro": lambda: (fedimpro(), batch(size=6), "fedimpro", ()),
    "lstm, batch first": lambda: (Recurrent(True), sequences(), "fedavg", ()),
    "lstm, time first": lambda: (Recurrent(False), sequences(), "fedavg", ()),
    "clip": lambda: (Captions(), {"x": torch.randn(B, D), "z": torch.randn(B, D)}, "fedavg", ("told",)),
    "diffusion": lambda: (Denoising(), {"x": torch.randn(B, D)}, "fedavg", ()),
    "figures": lambda: (Rows(scored), ROWS, "fedavg", ("told",)),
    "resnet": lambda: (*_example(models.resnet()), "fedavg", ()),
    "gpt2": lambda: (*_example(models.gpt2(dropout=0.1)), "fedadam", ()),
    "llama": lambda: (*_example(models.llama()), "fedadam", ()),
    "bert": lambda: (*_example(models.bert(dropout=0.1)), "fedadam", ()),
}  # fmt: skip


def _example(example: models.Example) -> tuple[nn.Module, Mapping[str, Tensor]]:
    return example.module, {n: torch.cat([t, t]) for n, t in example.example_inputs.items()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("llama", "bert") else name for name in HONEST],
)
def test_an_honest_graph_passes(name: str) -> None:
    module, inputs, rule, metrics = HONEST[name]()
    check_graphs(Federated(rule), captured(module, inputs, metrics))
