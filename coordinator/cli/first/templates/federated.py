"""Federated training: measurements of several owners, which never leave their machines.

    atoll dev job.py --workers 3           # three owners on this machine, with stand-in data

On machines of their own each owner registers a data set and joins, and you submit:

    atoll-worker data add readings FILE.safetensors --accept ask
    atoll-worker join HOST:PORT --token TOKEN
    atoll submit job.py --watch

A file holds `values`, float32 [N, 16], and `kind`, int64 [N]: one row a measurement.
Plain PyTorch: the model returns its loss in training, and an accuracy too in evaluation.
Dims: B batch, F values of a measurement.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Federated, Job, Optimizer, OptimizerName, Registered, TrainingSpec

KINDS, VALUES = 5, 16  # classes, numbers of a measurement
WIDTH = 64
ROUNDS = 20
STRATEGY = "fedavg"  # or fedprox, scaffold, feddyn, ...: `atoll submit job.py --set STRATEGY=scaffold`
MICRO_BATCH = 16
LEARNING_RATE = 0.01


class Classifier(nn.Module):
    """Values [B, F] and kinds [B] -> mean cross-entropy; in evaluation the accuracy too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(VALUES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, KINDS))

    def forward(self, values: Tensor, kind: Tensor) -> Tensor | dict[str, Tensor]:
        logits = self.layers(values)
        loss = F.cross_entropy(logits, kind)
        if self.training:
            return loss
        return {"loss": loss, "accuracy": (logits.argmax(1) == kind).float().mean()}


def measured(count: int, seed: int, favourite: int | None = None) -> dict[str, Tensor]:
    """Draw measurements; half of them are of the kind ``favourite``, if there is one."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(KINDS, VALUES, generator=torch.Generator().manual_seed(0))
    kind = torch.randint(KINDS, (count,), generator=random)
    if favourite is not None:
        kind[: count // 2] = favourite
    return {"values": 0.6 * centres[kind] + torch.randn(count, VALUES, generator=random), "kind": kind}


def stand_in(owner: int, owners: int) -> dict[str, Tensor]:
    """Data for `atoll dev` in the place of those of an owner, who has other kinds than the rest."""
    return measured(400, seed=1 + owner, favourite=owner % KINDS)


def job() -> Job:
    """Return the job that Atoll trains, in rounds, where the data are."""
    torch.manual_seed(0)
    held_out = measured(512, seed=10_000)
    return Job(
        module=Classifier(),
        example_inputs={name: value[:MICRO_BATCH] for name, value in held_out.items()},
        data=Registered(
            "readings", {"values": "values", "kind": "kind"}, held_out=held_out, stand_in=stand_in
        ),
        training=TrainingSpec(
            steps=ROUNDS,
            n_micro=1,
            optimizer=Optimizer(OptimizerName.SGD, lr=LEARNING_RATE, momentum=0.9),
            eval_every=1,
            eval_batches=16,
        ),
        federated=Federated(STRATEGY, local_epochs=2),
        metrics=("accuracy",),
        name="my-job",
    )
