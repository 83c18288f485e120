"""Asynchronous jobs against rounds where machines differ in speed: time to an accuracy, on paired seeds.

    atoll data fetch mnist
    python -m benchmarks.asynchronous --json
    python -m benchmarks.asynchronous --seeds 1 --models 30 --slow 0
    python -m benchmarks.asynchronous --selectors     # who is chosen by speed and use, beside who is drawn

100 clients hold MNIST's images by Dirichlet(0.3); their speeds are lognormal, and one in ten is ten times
slower (``--slow``). 20 train at a time. In rounds the next model waits for all 20; with a buffer it is made
of ten updates (FedBuff), or of each (FedAsync). All train the same number of updates. The job's machine, the
trainer and the sums are the product's own (``tests.inprocess.virtual_federation``). Seconds are a model: a
second of connection and 50 ms a local step, times the client's own factor.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from benchmarks.federated_mnist import Digits, Plain, Setting, TwoLayers, digits, tested
from benchmarks.harness import execute, machine, need_mnist, parser
from coordinator.capture.capture import capture
from strategies import partition_data
from strategies.wrapped import owners
from tests.inprocess.federation import local_model
from tests.inprocess.virtual_federation import VirtualFederation

LINE_S, STEP_S = 1.0, 0.05
SPREAD = 0.5  # of the logarithms of speeds
SLOWER = 10.0
BATCH = 32
LAST = 5  # points of a curve that its final accuracy is the mean of


@dataclass(frozen=True, slots=True)
class Way:
    """One way of timing: ``buffer`` 0 are rounds."""

    name: str
    strategy: str
    buffer: int
    options: dict[str, float]
    selector: str = "random"


WAYS = (
    Way("rounds", "fedavg", 0, {}),
    Way("rounds, oort", "fedavg", 0, {}, "oort"),
    Way("rounds, bandwidth_aware", "fedavg", 0, {}, "bandwidth_aware"),
    Way("fedbuff", "fedavg", 10, {}),
    Way("fedbuff, oort", "fedavg", 10, {}, "oort"),
    Way("fedbuff, bandwidth_aware", "fedavg", 10, {}, "bandwidth_aware"),
    Way("fedasync", "fedasync", 1, {}),
)


def speeds(clients: list[str], slow: float, seed: int) -> dict[str, float]:
    """How much longer each client takes than a usual one."""
    draw = np.random.default_rng([seed, 17])
    factors = np.exp(SPREAD * draw.normal(size=len(clients)))
    factors[draw.permutation(len(clients))[: round(slow * len(clients))]] *= SLOWER
    return dict(zip(clients, factors.tolist(), strict=True))


def curve(way: Way, data: Digits, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Accuracy by modelled second, a point for every 20 updates."""
    parts = partition_data.dirichlet_niid_bench(data.y, args.clients, 0.3, seed)
    clients = {f"c{at:03d}": {"x": data.x[part], "y": data.y[part]} for at, part in enumerate(parts)}
    torch.manual_seed(seed)
    net = TwoLayers()
    each = way.buffer or args.places
    training = TrainingSpec(
        steps=args.models * args.places // each,
        n_micro=1,
        seed=seed,
        optimizer=Optimizer(OptimizerName.SGD, lr=0.05),
    )
    example = {"x": torch.from_numpy(data.x[:BATCH]), "y": torch.from_numpy(data.y[:BATCH])}
    found = capture(Plain(net), example, training)
    rule = Federated(
        way.strategy,
        way.options,
        clients=args.places,
        min_clients=1,
        local_epochs=2,
        held_out=0.0,
        evaluate_every=0,
        deadline_s=86_400.0,
        buffer=way.buffer,
        selector=way.selector,
        max_staleness=1000,
    )
    factor = speeds(list(clients), args.slow, seed)
    federation = VirtualFederation(
        local_model(found.train, found.evaluation, found.state, training),
        rule,
        clients,
        lambda name, steps: factor[name] * (LINE_S + STEP_S * steps),
    )
    points = []
    ages: list[int] = []
    served: Counter[str] = Counter()
    for at, closed in enumerate(federation.run(), 1):
        served.update(closed.fact.participants.keys())
        ages += [told.get("staleness", 0) for told in closed.fact.participants.values()]
        if at * each % args.places == 0:
            points.append((closed.at_s, tested(net, owners(closed.weights), data)))
    most = max(served.values()) / statistics.mean(served[name] for name in clients)
    return {"points": points, "staleness": statistics.mean(ages), "models": training.steps, "most": most}


def ways(args: argparse.Namespace) -> list[Way]:
    """The ways that are asked for."""
    return [way for way in WAYS if args.selectors or way.selector == "random"]


def reached_s(points: list[tuple[float, float]], accuracy: float) -> float | None:
    """When a curve is first at this accuracy."""
    return next((at_s for at_s, value in points if value >= accuracy), None)


def final(points: list[tuple[float, float]]) -> float:
    """Mean accuracy of the last points."""
    return statistics.mean(value for _, value in points[-LAST:])


def compared(args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Every way on one seed. The target: 0.95 of what rounds end with."""
    data = digits(Setting(images=args.images), seed)
    runs = {way.name: curve(way, data, args, seed) for way in ways(args)}
    target = 0.95 * final(runs["rounds"]["points"])
    base_s = reached_s(runs["rounds"]["points"], target)
    rows = []
    for name, run in runs.items():
        took_s = reached_s(run["points"], target)
        share = took_s / base_s if took_s is not None and base_s else None
        rows.append(
            {
                "seed": seed,
                "way": name,
                "final": final(run["points"]),
                "target": target,
                "to_target_s": took_s,
                "share": share,
                "all_s": run["points"][-1][0],
                "staleness": run["staleness"],
                "most": run["most"],
                "points": run["points"],
            }
        )
        words = "not reached" if took_s is None else f"after {took_s:.0f} s"
        print(
            f"seed {seed} {name:<24} final {100 * final(run['points']):.1f} %, {100 * target:.1f} % {words}, "
            f"all in {run['points'][-1][0]:.0f} s, staleness {run['staleness']:.1f}, "
            f"the busiest client {run['most']:.1f} times the mean",
            flush=True,
        )
    return rows


def main() -> int:
    """Compare, and print the medians."""
    made = parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--models", type=int, default=60, help="rounds; the others train as many updates")
    made.add_argument("--clients", type=int, default=100)
    made.add_argument("--places", type=int, default=20, help="clients that train at a time")
    made.add_argument("--images", type=int, default=12_000)
    made.add_argument("--slow", type=float, default=0.1, help="share of clients that are ten times slower")
    made.add_argument("--selectors", action="store_true", help="oort and bandwidth_aware, too")
    args = made.parse_args()
    if args.places % 10 or args.places > args.clients:
        raise UsageError(f"--places {args.places}; give a multiple of 10, at most --clients")
    need_mnist(args.json)
    torch.set_num_threads(1)
    rows = [row for seed in range(args.seed, args.seed + args.seeds) for row in compared(args, seed)]
    found = {}
    for way in ways(args):
        own = [row for row in rows if row["way"] == way.name]
        shares = [row["share"] for row in own if row["share"] is not None]
        found[way.name] = {
            "final": statistics.median(row["final"] for row in own),
            "share": statistics.median(shares) if len(shares) == len(own) else None,
            "most": statistics.median(row["most"] for row in own),
        }
        found[way.name]["lost_points"] = 100.0 * (found["rounds"]["final"] - found[way.name]["final"])
        print(f"{way.name}: {found[way.name]}")
    print(f"machine {machine()}, seeds {args.seed} to {args.seed + args.seeds - 1}")
    if args.json:
        print(json.dumps({"ways": found, "runs": rows, "machine": machine()}))
    return 0


if __name__ == "__main__":
    execute(main)
