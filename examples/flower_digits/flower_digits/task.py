"""The model, the data and the loops: nothing here knows of Flower or of Atoll.

Data: scikit-learn's 1,797 images of 8 x 8 pixels, the first 360 of a fixed order held out. The others
go to clients by a Dirichlet split: of each class, client k gets the share p_k, p ~ Dir(alpha).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASSES = 10
HELD_OUT = 360
BATCH = 32
ORDER_SEED = 1234

torch.set_num_threads(1)  # clients share a machine, and sums repeat to the bit

Loss = Callable[[Tensor, Tensor], Tensor]


def make_model(seed: int, hidden: int = 128) -> nn.Module:
    """64 pixels to 10 classes; 75 hidden + 10 parameters, 9,610 by default, that follow from the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


@lru_cache(maxsize=1)
def images() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Pixels [n, 64] in [0, 1] and labels [n], in a fixed order."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(ORDER_SEED).permutation(len(labels))
    return (pixels / 16.0).astype(np.float32)[order], labels.astype(np.int64)[order]


def held_out(*, full_batches: bool = False) -> tuple[Tensor, Tensor]:
    """What the server evaluates on; ``full_batches``: as many as these hold, as Atoll's native job has it."""
    pixels, labels = images()
    n = HELD_OUT // BATCH * BATCH if full_batches else HELD_OUT
    return torch.from_numpy(pixels[:n]), torch.from_numpy(labels[:n])


def partition(client: int, clients: int, alpha: float, seed: int) -> tuple[Tensor, Tensor]:
    """The images of one client. Every client computes the whole split, from the seed."""
    pixels, labels = images()
    pixels, labels = pixels[HELD_OUT:], labels[HELD_OUT:]
    draw = np.random.default_rng(seed)
    owner = np.empty(len(labels), int)
    for kind in range(CLASSES):
        of_kind = np.flatnonzero(labels == kind)
        draw.shuffle(of_kind)
        shares = draw.dirichlet([alpha] * clients)
        ends = (np.cumsum(shares)[:-1] * len(of_kind)).astype(int)
        for k, part in enumerate(np.split(of_kind, ends)):
            owner[part] = k
    mine = owner == client
    return torch.from_numpy(pixels[mine]), torch.from_numpy(labels[mine])


def train(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    epochs: int,
    lr: float,
    seed: int,
    loss_of: Loss | None = None,
    at_epoch: Callable[[int], Any] = lambda epoch: None,
    before_step: Callable[[], Any] = lambda: None,
    batches_of: Callable[[int], Iterable[Tensor]] | None = None,
) -> tuple[float, int]:
    """SGD in an order that follows from ``seed``: the last batch's loss, and the steps taken.

    ``before_step`` may change gradients, ``at_epoch`` buffers; ``batches_of`` an epoch gives the images of
    each of its batches.
    """
    pixels, labels = data
    find = loss_of or (lambda x, y: F.cross_entropy(model(x), y))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    order = torch.Generator().manual_seed(seed)

    def shuffled(_: int) -> Iterable[Tensor]:
        return torch.split(torch.randperm(len(pixels), generator=order), BATCH)

    loss, steps = torch.zeros(()), 0
    for epoch in range(epochs):
        at_epoch(epoch)
        for batch in (batches_of or shuffled)(epoch):
            optimizer.zero_grad()
            loss = find(pixels[batch], labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            before_step()
            optimizer.step()
            steps += 1
    return float(loss.detach()), steps


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """(mean cross-entropy, accuracy)."""
    pixels, labels = data
    logits = model(pixels)
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())
