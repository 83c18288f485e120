"""A population of 1,000 clients on hosts of one process: equal bits, bytes uploaded, and memory.

    atoll data fetch mnist
    python -m benchmarks.population --seed 0 --json

MNIST's 60,000 training images, two labels a client, 100 clients a round, 10 rounds, a LeNet-size net of
44,426 weights, six local steps of ten images. Each run is a process of its own: the worker's trainer, states
on disk, sums through their files; only the network is left out.

  bits     weights after the last round on 1, 2 and 3 hosts, and on 3 of which one is lost at random moments
  upload   bytes of all hosts in the largest round, over one model in float32 for each host
  memory   peak PSS with 1,000 clients over that with 10 that hold as many images, both on one host
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.errors import UsageError
from atoll.federated import NO_FLOORS, Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from benchmarks.federated_mnist import Digits, LeNet, Plain, Setting, digits, tested
from benchmarks.harness import ROOT, execute, machine, need_mnist, parser
from coordinator.capture.capture import capture
from coordinator.federated.makespan import Rate, Task, assign
from strategies import partition_data
from strategies.wrapped import owners
from tests.inprocess.federation import LocalFederation, local_model
from tests.inprocess.population import LocalPopulation

CLIENTS, DRAWN, ROUNDS, FEW = 1000, 100, 10, 10
LABELS, BATCH, STEPS = 2, 10, 6
RULES = ("fedavg", "scaffold")
MOVE_S = 0.01


@dataclass(frozen=True, slots=True)
class Run:
    """One training: ``lost`` hosts, each at a client of a round, drawn by the seed."""

    rule: str
    seed: int
    hosts: int = 1
    lost: int = 0
    clients: int = CLIENTS


def deal(steps: Mapping[str, int], homes: Mapping[str, str], hosts: Any) -> Mapping[str, Any]:
    """As a coordinator deals to hosts of unlike speeds."""
    tasks = [Task(name, count, homes.get(name, ""), MOVE_S) for name, count in steps.items()]
    return assign(tasks, {host: Rate(0.01 * (1.0 + at / 2.0)) for at, host in enumerate(hosts)}).clients


def population(run: Run, folder: Path) -> tuple[LocalPopulation, LeNet, Digits]:
    """The clients of a run, their net, and the images that test it."""
    setting = Setting(images=60_000, test_images=4_000, batch=BATCH)
    data = digits(setting, run.seed)
    parts = partition_data.labels_per_client(data.y, run.clients, LABELS, run.seed)
    # Sorted by client, so that a client's samples are a view and no copy.
    order = np.concatenate(parts)
    x, y = data.x[order], data.y[order]
    cuts = np.cumsum([0, *map(len, parts)])
    clients = {
        f"c{at:04d}": {"x": x[cuts[at] : cuts[at + 1]], "y": y[cuts[at] : cuts[at + 1]]}
        for at in range(len(parts))
    }
    torch.manual_seed(run.seed)
    net = LeNet()
    example = {"x": torch.from_numpy(x[:BATCH]), "y": torch.from_numpy(y[:BATCH])}
    training = TrainingSpec(
        steps=ROUNDS, n_micro=1, seed=run.seed, optimizer=Optimizer(OptimizerName.SGD, lr=0.05)
    )
    found = capture(Plain(net), example, training)
    rule = Federated(
        run.rule, local_steps=STEPS, clients=min(DRAWN, run.clients), held_out=0.0, evaluate_every=0
    )
    model = local_model(found.train, found.evaluation, found.state, training)
    federation = LocalFederation(model, rule, clients, floors=NO_FLOORS)
    hosts = [f"host-{at}" for at in range(run.hosts)]
    tests = replace(data, x=None, y=None)  # the images of clients shall be in memory once
    return LocalPopulation(federation, hosts, folder, deal), net, tests


def train(run: Run) -> dict[str, Any]:
    """Figures of one run."""
    torch.set_num_threads(1)
    chance = np.random.default_rng([run.seed, run.lost])
    lost = {
        int(at): {f"host-{chance.integers(run.hosts)}": int(chance.integers(DRAWN // run.hosts // 2))}
        for at in chance.permutation(ROUNDS)[: run.lost]
    }
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        made, net, data = population(run, Path(folder))
        state = made.federation.state
        model_bytes = sum(a.nbytes for part in (state.weights, *state.slots.values()) for a in part.values())
        uploads, rows, moved, peak, begun_s = [], 0, 0, 0, time.perf_counter()
        for at in range(ROUNDS):
            found = made.run_round(lost.get(at))
            uploads.append(sum(found.uploaded_bytes.values()))
            rows, moved = rows + len(found.rows), moved + found.moved
            peak = max(peak, _pss_bytes())
        took_s = time.perf_counter() - begun_s
        kept = sum(states.size for states in made.states.values())
    after = made.federation.state
    digest = sha256()
    for part in (after.weights, *after.slots.values()):
        for name in sorted(part):
            digest.update(part[name].tobytes())
    return {
        **asdict(run),
        "bits": digest.hexdigest(),
        "accuracy": tested(net, owners(made.federation.weights), data),
        "rows": rows,
        "moved": moved,
        "upload_bytes": max(uploads),
        "model_bytes": model_bytes,
        "kept_bytes": kept,
        "pss_bytes": peak,
        "took_s": took_s,
    }


def _pss_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise UsageError("this system does not tell a process's proportional set size")


def separately(run: Run) -> dict[str, Any]:
    """``train`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.population", "--one", json.dumps(asdict(run))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{run} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{run.rule:<9} {run.clients} clients on {run.hosts}, {run.lost} lost: {found['bits'][:12]}, "
        f"accuracy {found['accuracy']:.3f}, {found['moved']} moved, {found['pss_bytes'] / 1e6:.0f} MB, "
        f"{found['took_s']:.0f} s",
        flush=True,
    )
    return found


def measured(rule: str, seed: int) -> dict[str, Any]:
    """Figures of one strategy."""
    runs = [separately(Run(rule, seed, hosts)) for hosts in (1, 2, 3)]
    runs += [separately(Run(rule, seed, 3, lost=3))]
    few = separately(Run(rule, seed, clients=FEW))
    return {
        "different_bits": len({run["bits"] for run in runs}) - 1,
        "rows_missing": sum(abs(run["rows"] - ROUNDS * DRAWN) for run in runs),
        "upload_over_models": max(run["upload_bytes"] / (run["hosts"] * run["model_bytes"]) for run in runs),
        "updates_over_upload": min(
            DRAWN * run["model_bytes"] / run["upload_bytes"] for run in runs if run["hosts"] == 2
        ),
        "memory_over_few": runs[0]["pss_bytes"] / few["pss_bytes"],
        "accuracy": runs[0]["accuracy"],
        "clients_per_s": ROUNDS * DRAWN / runs[0]["took_s"],
        "runs": [*runs, few],
    }


def main() -> None:
    """Run all and print the figures."""
    made = parser(__doc__ or "")
    made.add_argument("--one", help="a single run as JSON, in this process")
    options = made.parse_args()
    if options.one:
        print(json.dumps(train(Run(**json.loads(options.one)))))
        return
    need_mnist(options.json)
    figures = {rule: measured(rule, options.seed) for rule in RULES}
    for rule, found in figures.items():
        shown = (f"{k} {v:.4g}" for k, v in found.items() if isinstance(v, int | float))
        print(f"{rule}: {', '.join(shown)}")
    if options.json:
        print(json.dumps({"seed": options.seed, "machine": machine(), **figures}))


if __name__ == "__main__":
    execute(main)
