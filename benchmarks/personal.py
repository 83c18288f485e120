"""Clients with a head of their own against one common model and against training alone, in one run.

    atoll data fetch mnist
    python -m benchmarks.personal --seed 0 --json

MNIST, 20 clients with two labels each, a fifth of each client's images held out for it, LeNet. All four train
from the same weights on the same split, with the same draws:

  fedavg   one model for all
  local    fedavg, the last layer stays with its client (``local=("net.head.*",)``; FedPer)
  fedrep   the same, the last layer trained before the rest
  alone    every tensor stays with its client: no federation

Reported for each: the clients' accuracies, their mean, worst decile and Jain's index.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.federated import NO_FLOORS, Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from benchmarks.federated_mnist import LeNet, Plain, Setting, digits
from benchmarks.harness import execute, machine, need_mnist, parser
from coordinator.capture.capture import capture
from strategies import partition_data
from strategies.fairness import fairness
from tests.inprocess.federation import LocalFederation, local_model

CLIENTS, LABELS, BATCH, HELD_OUT, LR, MOMENTUM = 20, 2, 16, 0.2, 0.02, 0.9
HEAD = ("head.*",)
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fedavg": ("fedavg", ()),
    "local": ("fedavg", HEAD),
    "fedrep": ("fedrep", HEAD),
    "alone": ("fedavg", ("*",)),
}


@dataclass(frozen=True, slots=True)
class Size:
    """Images in all, rounds, and local steps of a round at most."""

    images: int = 3000
    rounds: int = 10
    steps: int = 10


def trained(way: str, size: Size, seed: int) -> dict[str, Any]:
    """Accuracies of the clients after the last round, on what each held out, and their figures."""
    rule, local = WAYS[way]
    data = digits(Setting(images=size.images, test_images=BATCH, batch=BATCH), seed)
    parts = partition_data.labels_per_client(data.y, CLIENTS, LABELS, seed)
    clients = {f"c{at:02d}": {"x": data.x[part], "y": data.y[part]} for at, part in enumerate(parts)}
    torch.manual_seed(seed)
    example = {"x": torch.from_numpy(data.x[:BATCH]), "y": torch.from_numpy(data.y[:BATCH])}
    optimizer = Optimizer(OptimizerName.SGD, lr=LR, momentum=MOMENTUM)
    training = TrainingSpec(steps=size.rounds, n_micro=1, seed=seed, optimizer=optimizer)
    found = capture(Plain(LeNet()), example, training, ("accuracy",))
    model = local_model(found.train, found.evaluation, found.state, training)
    federated = Federated(rule, local_steps=size.steps, held_out=HELD_OUT, local=local)
    federation = LocalFederation(model, federated, clients, floors=NO_FLOORS)
    begun_s, up_bytes = time.perf_counter(), 0
    for _ in range(size.rounds):
        up_bytes += sum(federation.run_round().uploaded_bytes.values())
    accuracies = {name: e.metrics["accuracy"] for name, e in federation.evaluate_clients().items()}
    return {
        "seed": seed,
        "way": way,
        **fairness(accuracies.values()),
        "clients": accuracies,
        "uploaded_bytes": up_bytes,
        "took_s": time.perf_counter() - begun_s,
    }


def main() -> None:
    """Train all four ways on every seed and print the figures."""
    made = parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=5, help="so many, from --seed on")
    made.add_argument("--rounds", type=int, default=Size().rounds)
    made.add_argument("--images", type=int, default=Size().images)
    options = made.parse_args()
    need_mnist(options.json)
    torch.set_num_threads(1)
    size = Size(options.images, options.rounds)
    runs = []
    for seed in range(options.seed, options.seed + options.seeds):
        for way in WAYS:
            found = trained(way, size, seed)
            runs.append(found)
            print(
                f"seed {seed} {way:<7} clients' accuracy {found['mean']:.3f}, worst decile "
                f"{found['worst_decile']:.3f}, Jain {found['jain']:.3f}, "
                f"{found['uploaded_bytes'] / 1e6:.1f} MB up, {found['took_s']:.0f} s",
                flush=True,
            )
    means = {way: [run["mean"] for run in runs if run["way"] == way] for way in WAYS}
    gains = {
        way: [mine - common for mine, common in zip(means[way], means["fedavg"], strict=True)]
        for way in ("local", "fedrep", "alone")
    }
    won = {way: sum(gain >= 0.08 for gain in each) for way, each in gains.items()}
    print(f"seeds with 8 points over fedavg, of {options.seeds}: {won}")
    if options.json:
        print(json.dumps({"machine": machine(), "seeds_won": won, "gains": gains, "runs": runs}))


if __name__ == "__main__":
    execute(main)
