"""The same population in pfl's simulation; run by a Python that has pfl and torch, and nothing of Atoll.

    python benchmarks/rivals/pfl_population.py DATA '{"clients": 1000, "drawn": 100, ...}'

Prints seconds of every central iteration as one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent / "flower_population"))

from flower_population import task
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Net(task.LeNet):
    """LeNet with the two methods that pfl asks for."""

    def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
        return F.cross_entropy(self(torch.as_tensor(x)), torch.as_tensor(y).long())

    def metrics(self, x: Any, y: Any, eval: bool = True) -> dict[str, Any]:
        return {"loss": Weighted(self.loss(x, y).item() * len(x), len(x))}


class Clock(TrainingProcessCallback):
    """Moments at which central iterations end."""

    def __init__(self) -> None:
        self.at_s = [time.monotonic()]

    def after_central_iteration(self, *args: Any, **named: Any) -> tuple[bool, Metrics]:
        self.at_s.append(time.monotonic())
        return False, Metrics()


def main() -> None:
    """Train and print."""
    folder, asked = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(asked["seed"])
    np.random.seed(asked["seed"])

    def user(client: int) -> Dataset:
        return Dataset(raw_data=list(task.images_of(folder, client)))

    sampler = get_user_sampler("minimize_reuse", list(range(asked["clients"])))
    data = FederatedDataset(user, sampler)
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])
    net, clock = Net(), Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=asked["rounds"],
            evaluation_frequency=asked["rounds"] + 1,
            train_cohort_size=asked["drawn"],
            val_cohort_size=0,
        ),
        backend=backend,
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None,
            local_learning_rate=asked["lr"],
            local_batch_size=asked["batch"],
            local_num_steps=asked["steps"],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    print(json.dumps({"round_s": np.diff(clock.at_s).tolist()}))


if __name__ == "__main__":
    main()
