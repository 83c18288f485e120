"""A population of 1,000 clients on real workers: equal bits with hosts killed by kill -9, bytes, and memory.

    atoll data fetch mnist
    python -m benchmarks.population_fleet --seed 0 --json

A coordinator and one to three workers as real processes over loopback with TLS. MNIST's 60,000 training
images, two labels a client, 100 clients a round, 10 rounds, a LeNet-size net, six local steps of ten images.

  bits     the exported weights on 1, 2 and 3 hosts, and on 3 of which one is killed and started again at
           three random moments
  rows     clients that a closed round does not have exactly once, by the coordinator's journal
  upload   a round's bytes of all hosts over K x 1.1 dense updates + 200 bytes a client; where a host is
           killed its clients come as further sums
  memory   peak PSS of a host's processes with 1,000 clients over that with 10 that hold as many images
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll import Federated, Job, Optimizer, OptimizerName, Registered, TrainingSpec
from atoll.errors import JobFailed
from benchmarks.federated_fleet import FederatedFleet
from benchmarks.federated_mnist import Digits, LeNet, Plain, Setting, digits
from benchmarks.harness import execute, machine, need_mnist, parser
from coordinator.client.prepare import prepare
from worker.data.population import part_dataset

DATA, BATCH, STEPS, LABELS, FEW = "mnist", 10, 6, 2, 10
RULES = ("fedavg", "scaffold")
FLOORS = ("--min-samples", "1", "--min-steps", "1", "--min-batch", "1", "--min-clients", "1")
MODELS_UP = {"fedavg": 1, "scaffold": 2}  # float32 models in a client's dense update
ROW_BYTES, SLACK = 200, 1.1
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Size:
    """Clients, those of a round, rounds, images."""

    clients: int
    drawn: int
    rounds: int
    images: int


class Hosts(FederatedFleet):
    """Workers that speak for the same population; the data lie on the disk once."""

    def register(self, worker: str, arrays: Any) -> None:
        first = self.folder / "worker0"
        if worker == first.name:
            super().register(worker, arrays)
            return
        (self.folder / worker).mkdir(mode=0o700)
        shutil.copytree(first / "data", self.folder / worker / "data", copy_function=os.link)


def parted(clients: int, seed: int, state_dir: Path, worker: str) -> None:
    """Two labels a client."""
    part_dataset(state_dir, DATA, f"labels:{LABELS}", clients, seed, "y")


def job(rule: str, size: Size, seed: int, data: Digits, name: str) -> Job:
    """The job that all hosts train."""
    torch.manual_seed(seed)
    example = {"x": torch.from_numpy(data.x[:BATCH]), "y": torch.from_numpy(data.y[:BATCH])}
    held = {"x": data.test_x.numpy(), "y": data.test_y.numpy()}
    return Job(
        module=Plain(LeNet()),
        example_inputs=example,
        data=Registered(DATA, {"x": "x", "y": "y"}, held),
        training=TrainingSpec(
            steps=size.rounds,
            n_micro=1,
            seed=seed,
            optimizer=Optimizer(OptimizerName.SGD, lr=0.05),
            eval_every=size.rounds,
            eval_batches=100,
        ),
        federated=Federated(
            rule,
            local_steps=STEPS,
            clients=size.drawn,
            min_clients=1,
            held_out=0.0,
            evaluate_every=0,
            deadline_s=1800.0,
        ),
        metrics=("accuracy",),
        name=name,
    )


def trained(fleet: FederatedFleet, made: Job, kills: Collection[float] = ()) -> dict[str, Any]:
    """Figures of one job. ``kills``: moments, in rounds, at which the last worker is killed, and started
    again."""
    begun_s, moments = time.perf_counter(), sorted(kills)
    victim, round_s = f"worker{len(fleet.clients) - 1}", 0.0
    started, last = fleet.client.submit(prepare(made)).job, None
    with peak_pss(fleet) as peaks:
        for last in fleet.watch(started):
            if last.state != "training" or not moments or last.step < int(moments[0]):
                continue
            if last.federated.HasField("round_s"):
                round_s = last.federated.round_s
            time.sleep((moments.pop(0) % 1.0) * round_s)
            fleet.kill(victim)
            fleet.join(victim)
    if last is None or moments:
        raise JobFailed(f"{made.name} ended before its host was killed")
    path = fleet.folder / f"{made.name}.safetensors"
    fleet.client.export(started, path)
    weights, digest = load_file(path), sha256()
    for name in sorted(weights):
        digest.update(weights[name].numpy().tobytes())
    rule, rounds = made.federated, fleet.closed_rounds(started)
    assert rule is not None
    model_bytes = MODELS_UP[rule.strategy] * sum(t.numel() * 4 for t in weights.values())
    odd, shares = abs(len(rounds) - made.training.steps), []
    for fact in rounds:
        rows = [client for entry in fact.participants.values() for client in entry["clients"]]
        odd += abs(len(set(rows)) - rule.clients) + len(rows) - len(set(rows))
        allowed = SLACK * len(fleet.clients) * model_bytes + ROW_BYTES * rule.clients
        shares.append(sum(entry["bytes_up"] for entry in fact.participants.values()) / allowed)
    took = [fact.took_s for fact in rounds]
    return {
        "name": made.name,
        "bits": digest.hexdigest(),
        "odd_rows": odd,
        "upload_share": max(shares),
        "pss_bytes": max(peaks),
        "accuracy": next(m.value for m in last.federated.central_metrics if m.name == "accuracy"),
        "clients_per_s": rule.clients * len(took) / sum(took),
        "round_s": took,
        "took_s": time.perf_counter() - begun_s,
    }


@contextmanager
def peak_pss(fleet: FederatedFleet) -> Iterator[list[int]]:
    """The largest PSS of any one worker's processes meanwhile, bytes."""
    peaks, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            for name, process in list(fleet.processes.items()):
                if name.startswith("worker"):
                    peaks.append(max(peaks[-1], sum(map(_pss_bytes, _tree(process.pid)))))
            del peaks[:-1]

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def _pss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def fleet_of(hosts: int, clients: int, seed: int, data: Digits) -> Hosts:
    """So many hosts of one population."""
    arrays = {"x": data.x, "y": data.y}
    return Hosts([arrays] * hosts, DATA, parted=partial(parted, clients, seed), options=FLOORS)


def digits_of(size: Size, seed: int) -> Digits:
    """Images of all clients, and those that the job's owner tests on."""
    return digits(Setting(images=size.images, test_images=min(4000, size.images), batch=BATCH), seed)


def run(size: Size, seed: int, rules: Collection[str]) -> list[dict[str, Any]]:
    """Train with every number of hosts, and with the clients joined into few."""
    data, found = digits_of(size, seed), []
    moments = np.random.default_rng(seed).permutation(size.rounds - 1)[:3] + np.random.default_rng(
        seed
    ).random(3)
    for hosts, clients in ((1, FEW), (1, size.clients), (2, size.clients), (3, size.clients)):
        here = replace(size, clients=clients, drawn=min(size.drawn, clients))
        with fleet_of(hosts, clients, seed, data) as fleet:
            for rule in rules:
                kills: list[tuple[float, ...]] = [(), tuple(moments.tolist())] if hosts == 3 else [()]
                for killed in kills:
                    name = f"{rule}-{hosts}-{clients}" + ("-killed" if killed else "")
                    done = trained(fleet, job(rule, here, seed, data, name), killed)
                    where = {"rule": rule, "hosts": hosts, "clients": clients, "killed": len(killed)}
                    found.append({**done, **where})
                    print(
                        f"{name:<24} {done['bits'][:12]}, {done['odd_rows']} odd rows, upload "
                        f"{done['upload_share']:.2f} of what is allowed, {done['pss_bytes'] / 1e6:.0f} MB, "
                        f"accuracy {done['accuracy']:.3f}, {done['clients_per_s']:.1f} clients/s, "
                        f"{done['took_s']:.0f} s",
                        flush=True,
                    )
    return found


def figures(runs: list[dict[str, Any]], rule: str, clients: int) -> dict[str, Any]:
    """Figures of one strategy."""
    mine = [r for r in runs if r["rule"] == rule]
    many = [r for r in mine if r["clients"] == clients]
    few = next(r for r in mine if r["clients"] != clients or clients == FEW)
    return {
        "different_bits": len({r["bits"] for r in many}) - 1,
        "odd_rows": sum(r["odd_rows"] for r in many),
        "upload_share": max(r["upload_share"] for r in many if not r["killed"]),
        "upload_share_killed": max(r["upload_share"] for r in many if r["killed"]),
        "memory_over_few": many[0]["pss_bytes"] / few["pss_bytes"],
        "accuracy": many[0]["accuracy"],
        "clients_per_s": many[0]["clients_per_s"],
    }


def main() -> None:
    """Run all and print the figures."""
    made = parser(__doc__ or "")
    made.add_argument("--clients", type=int, default=1000)
    made.add_argument("--drawn", type=int, default=100)
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--images", type=int, default=60_000)
    made.add_argument("--rules", nargs="*", default=list(RULES))
    options = made.parse_args()
    need_mnist(options.json)
    size = Size(options.clients, options.drawn, options.rounds, options.images)
    runs = run(size, options.seed, options.rules)
    shown = {rule: figures(runs, rule, size.clients) for rule in options.rules}
    for rule, found in shown.items():
        print(f"{rule}: {', '.join(f'{k} {v:.4g}' for k, v in found.items())}")
    if options.json:
        print(json.dumps({"seed": options.seed, "machine": machine(), **shown, "runs": runs}))


if __name__ == "__main__":
    execute(main)
