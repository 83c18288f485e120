"""The net, the clients' images and a client's local steps: nothing here knows of Flower, pfl or Atoll.

A folder has x.npy, y.npy, rows.npy (sample numbers, client after client) and ends.npy (where each client's
end). Images are mapped, not read: whoever maps them shares the pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from numpy.typing import NDArray

torch.set_num_threads(1)  # as every other system that is compared


class LeNet(nn.Module):
    """Images [B, 1, 28, 28] -> logits [B, 10]; 44,426 weights, as ``benchmarks.federated_mnist.LeNet``."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.mid = nn.Sequential(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        self.head = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.mid(self.low(x).flatten(1)))
        return out


def images_of(folder: str, client: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Images and labels of one client."""
    path = Path(folder)
    x, y = np.load(path / "x.npy", mmap_mode="r"), np.load(path / "y.npy", mmap_mode="r")
    ends = np.load(path / "ends.npy")
    rows = np.load(path / "rows.npy", mmap_mode="r")[ends[client - 1] if client else 0 : ends[client]]
    return x[rows], y[rows]


def write(folder: Path, x: NDArray[Any], y: NDArray[Any], parts: list[NDArray[Any]]) -> None:
    """Write what ``images_of`` reads."""
    for name, array in (
        ("x", x),
        ("y", y),
        ("rows", np.concatenate(parts)),
        ("ends", np.cumsum([*map(len, parts)])),
    ):
        np.save(folder / f"{name}.npy", array)


def train(net: nn.Module, x: Tensor, y: Tensor, *, steps: int, batch: int, lr: float, seed: int) -> float:
    """So many steps of SGD over shuffled batches; the last loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    order = torch.Generator().manual_seed(seed)
    rows: list[Tensor] = []
    loss = torch.zeros(())
    for _ in range(steps):
        rows = rows or list(torch.split(torch.randperm(len(x), generator=order), batch))
        chosen = rows.pop(0)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x[chosen]), y[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return float(loss.detach())
