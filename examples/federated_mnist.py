"""Handwritten digits that never leave their owners: a federated job, with a strategy for unlike clients.

On each data owner's machine (docs/federated.md leads through it step by step):

    atoll-worker data add mnist FILE --schema-file schema.txt --accept any
    atoll-worker join HOST:PORT --token TOKEN

On the model owner's machine:

    atoll data fetch mnist                       # the test images, for central evaluation
    atoll submit examples/federated_mnist.py --set STRATEGY=feddyn --watch

The data set "mnist" has fields image:float32[1,28,28] in [0, 1] and label:int64. For an experiment on one
machine `atoll data split mnist --out clients` makes such files with few labels a client.
Dims: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Federated, Job, Optimizer, OptimizerName, Registered, TrainingSpec
from experiments.datasets import corpora, download
from strategies.fedimpro_module import FedImpro
from strategies.vhl_module import Vhl, VhlLoss
from strategies.virtual_data import VirtualSpec

# ---------------------------------------------------------------- knobs

STRATEGY = "fedavgm"  # fedavg, fedavgm, fedprox, feddyn, scaffold, fednova, vhl, fedimpro
ROUNDS = 40
CLIENTS = 0  # a round; 0: all that hold the data
LOCAL_EPOCHS = 1
MICRO_BATCH = 64
LEARNING_RATE = 0.02
DEADLINE_S = 300.0
UPLINK = "off"  # or lossless, int8_block, topk:32, bcrs, bcrs:32
TEST_IMAGES = 4_096
SEED = 0

CLASSES = 10
MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels; in the net, so that data owners need not know
OPTIONS: dict[str, dict[str, float]] = {
    "fedavgm": {"beta": 0.7, "server_lr": 0.5},
    "feddyn": {"alpha": 0.1},
}


class Net(nn.Module):
    """Images [B, 1, 28, 28] in [0, 1] -> logits [B, 10]; 44,426 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.mid = nn.Sequential(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        self.head = nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mid(self.low((x - MEAN) / STD).flatten(1)))
        return logits


def scored(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What evaluation reports."""
    accuracy = (logits.argmax(1) == y).float().mean()
    return {"loss": F.cross_entropy(logits, y), "accuracy": accuracy}


class Classifier(nn.Module):
    """The loss in training; loss and accuracy in evaluation."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:
        logits = self.net(x)
        return F.cross_entropy(logits, y) if self.training else scored(logits, y)


class VhlClassifier(Vhl):
    """VHL's loss in training; the net's own loss and accuracy in evaluation."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:  # type: ignore[override]
        return super().forward(x, y) if self.training else scored(self.net(x), y)


class FedImproClassifier(FedImpro):
    """FedImpro's loss in training; the net's own loss and accuracy in evaluation."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:  # type: ignore[override]
        return super().forward(x, y) if self.training else scored(self.net(x), y)


def wrapped(net: nn.Module, images: Tensor) -> nn.Module:
    """The net with the loss that the strategy needs."""
    if STRATEGY == "vhl":
        # A small net has little room for images that it need not know. Mirrored digits would be other ones.
        virtual = VirtualSpec(seed=7, classes=CLASSES, shape=(1, 28, 28), spread=0.2)
        loss = VhlLoss(virtual=0.5, batch=16, pad=0, flip=False)
        return VhlClassifier(net, "head", virtual, loss)
    if STRATEGY == "fedimpro":
        return FedImproClassifier(net, "low", CLASSES, images)
    return Classifier(net)


def held_out() -> Mapping[str, object]:
    """The owner's own images, for central evaluation."""
    data = corpora.mnist(download.read("mnist"))
    images = data.test_images[:TEST_IMAGES, None].astype(np.float32) / np.float32(255.0)
    return {"x": images, "y": data.test_labels[:TEST_IMAGES].astype(np.int64)}


def job() -> Job:
    """What Atoll trains, where the data is."""
    torch.manual_seed(SEED)
    images = torch.zeros(MICRO_BATCH, 1, 28, 28)
    example = {"x": torch.rand(images.shape), "y": torch.arange(MICRO_BATCH) % CLASSES}
    return Job(
        module=wrapped(Net(), images),
        example_inputs=example,
        data=Registered("mnist", {"x": "image", "y": "label"}, held_out=held_out()),
        training=TrainingSpec(
            steps=ROUNDS,
            n_micro=1,
            seed=SEED,
            optimizer=Optimizer(OptimizerName.SGD, lr=LEARNING_RATE, momentum=0.9),
            eval_every=1,
            eval_batches=TEST_IMAGES // MICRO_BATCH,
        ),
        federated=Federated(
            STRATEGY,
            OPTIONS.get(STRATEGY, {}),
            local_epochs=LOCAL_EPOCHS,
            clients=CLIENTS,
            deadline_s=DEADLINE_S,
            evaluate_every=5,
            uplink=UPLINK,
        ),
        metrics=("accuracy",),
        name=f"mnist-{STRATEGY}",
    )
