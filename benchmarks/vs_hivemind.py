"""Two peers beside hivemind: averaging 64 MiB, and a global step of a small model, in one run.

    python -m benchmarks.vs_hivemind --hivemind-python /path/to/python --json
    python -m benchmarks.vs_hivemind --parts averaging --scenario region      any two hosts: name or path

Averaging: float32 vectors, hivemind's DecentralizedAverager without a codec and the exchange of replicas over
PeerNetworks with TLS, in turns, on loopback and on lab lines; the clock starts when both peers are ready, so
hivemind's search for a group is shown beside it. `limit_ratio`: seconds over those that the line needs for
the bytes that a peer sends, 64 MiB.
Step: two real workers, a replica each, beside ``hivemind.Optimizer`` at its defaults, in the same lab. Its
limit is computing plus the gradients' bytes.
Every round averages other values, and every one is compared with the mean; losses with one machine's, bit for
bit; hivemind's parameters with one machine that took the same batches. Without --hivemind-python: ours alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from atoll.exchange import Exchange
from atoll.job import TrainingSpec
from atoll.messages.to_worker import PeerLink
from atoll.microbatch import ScheduleName
from atoll.opdag import StateMeta
from atoll.plan import Plan, Replica, StageSpec
from atoll.program import stage_programs
from benchmarks.harness import LabFleet, conclude, execute, follow, machine, need_lab, parser, steady
from benchmarks.oracle import from_job, run_local
from benchmarks.transport import PATIENT, Remote, identities, line_path, line_scenario, obey
from benchmarks.vs_hivemind_job import LR, MICRO_BATCH, SHARE, STEPS, WIDTH
from benchmarks.waits import HUNG_S
from coordinator.capture.capture import capture
from coordinator.client.job_file import load_job
from lab.world import Lab
from protos.credentials import Identity
from worker.links.links import Links
from worker.machine.malloc import keep_chunk_memory
from worker.stage.assignment import Assignment
from worker.stage.steps.expected import step_arrivals
from worker.stage.steps.joining import GradientExchange
from worker.transport.contract import Paths
from worker.transport.frames import MessageKey
from worker.transport.network import PeerNetwork

if TYPE_CHECKING:
    from worker.exchange.slices import Which
    from worker.stage.stage import Stage

ROOT = Path(__file__).resolve().parent.parent
RIVALS = Path(__file__).resolve().parent / "rivals"
JOB = str(Path(__file__).resolve().parent / "vs_hivemind_job.py")
DEFAULT_LINE = "pair"
PARTS = ("averaging", "step")
TENSORS = 16
ELEMENT_BYTES = 4
MIB = 1 << 20
PEERS = ("w-a", "w-b")
JOIN_S = 30.0
WARM_UP = 1  # rounds that do not count
AVERAGED_WITHIN = 1e-6  # hivemind adds differences to its own values; ours are exact
PARAMETERS_WITHIN = 1e-3  # of the largest change of any parameter
HIVEMIND = "hivemind"
OURS = "ours"


# ---------------------------------------------------------------- our peer, a process of its own


def vector(seed: int, rank: int, number: int, elements: int) -> Tensor:
    """What a rank averages in round ``number``; the same at the rival."""
    values = np.random.default_rng([seed, rank, number]).random(elements, dtype=np.float32)
    return torch.from_numpy(values - np.float32(0.5))


class Vectors(nn.Module):
    """Parameters whose gradients are exchanged; the program that uses them is never run."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.held = nn.ParameterList(torch.zeros(elements) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for one in self.held:
            total = total + (one * x).sum()
        return total


class Computed:
    """Stands in for a stage whose backward is over: has every gradient's part, takes the totals."""

    def __init__(self, parts: Mapping[str, Mapping[int, Tensor]]) -> None:
        self._parts = parts
        self.means: dict[str, Tensor] = {}

    def parts(self, name: str) -> Mapping[int, Tensor]:
        """By block."""
        return self._parts[name]

    def set_total(self, name: str, total: Tensor) -> None:
        """Keep the mean of both."""
        self.means[name] = total.mul_(0.5)


def assignment_of(rank: int, tensors: int, elements: int) -> Assignment:
    """One of two replicas of a plan for a model of these parameters."""
    training = TrainingSpec(steps=1, n_micro=2, blocks=2)
    dag = capture(Vectors(tensors, elements), {"x": torch.zeros(1)}, training).train
    stages = [(StageSpec(0, len(dag.ops), 0, 1, name, 0),) for name in PEERS]
    replicas = tuple(Replica((at, at + 1), stage) for at, stage in enumerate(stages))
    plan = Plan(
        "vectors", 1, "", "", "given", ScheduleName.ONE_F_ONE_B, 2, replicas, blocks=2, exchange=Exchange()
    )
    states = {**dag.parameters, **{name: StateMeta(meta) for name, meta in dag.inputs.items()}}
    (program,) = stage_programs(dag, (0,))
    peers = tuple(PeerLink(name, Paths()) for name in PEERS)
    return Assignment("vectors", 1, training, program, None, plan, peers, {}, states, 0, replica=rank)


class Peer:
    """One of our two peers."""

    def __init__(self, rank: int, host: str, asked: Mapping[str, Any]) -> None:
        """``asked``: folder of the identities, tensors, elements of each, and seed."""
        self.rank, self.host = rank, host
        self.seed, self.elements = asked["seed"], asked["elements"]
        identity = Identity.load(Path(asked["folder"]) / PEERS[rank])
        assert identity is not None
        self.network = PeerNetwork(identity, (host, 0), config=PATIENT)
        self.assignment = assignment_of(rank, asked["tensors"], self.elements)
        self.links = Links(self.network, self.assignment.job, self.assignment.version)
        self.network.admit(PEERS[1 - rank])
        self.names = [name for bucket in self.assignment.buckets for name in bucket.names]

    def open(self, peers: list[str]) -> list[str]:
        """Dial the other peer at an address of ``peers``; returns those of this one."""
        if peers:
            host, _, port = peers[0].rpartition(":")
            self.network.meet(PEERS[1 - self.rank], Paths(((host, int(port)),), dial=True), JOIN_S)
        return [f"{self.host}:{self.network.port}"]

    def prepare(self, number: int) -> float:
        """Make what is averaged and declare what will arrive; seconds of finding the other peer."""
        mine = vector(self.seed, self.rank, number, self.elements * len(self.names))
        self.mean = (mine + vector(self.seed, 1 - self.rank, number, mine.numel())) * 0.5
        parts = dict(zip(self.names, mine.view(len(self.names), -1).unbind(), strict=True))
        self.stage = Computed({name: {self.rank: part} for name, part in parts.items()})
        self.number = number
        self.links.expect(step_arrivals(self.assignment, number))
        self.exchange = GradientExchange(self.assignment, cast("Stage", self.stage), self._send, number)
        return 0.0

    def average(self) -> list[float]:
        """[begun, ended]."""
        begun_s = time.monotonic()
        self.exchange.finish(self._take, self._wait)
        ended_s = time.monotonic()
        self.network.flush(PEERS[1 - self.rank], HUNG_S)  # what waits to be sent is read until then
        self.links.step_done(self.number)
        return [begun_s, ended_s]

    def error(self) -> float:
        """Largest difference from the mean of both."""
        return float((torch.cat([self.stage.means[name] for name in self.names]) - self.mean).abs().max())

    def close(self) -> None:
        """End the links."""
        self.links.close()
        self.network.close()

    def _key(self, which: Which) -> MessageKey:
        direction, micro, edge = which
        return MessageKey(self.assignment.job, self.assignment.version, self.number, micro, edge, direction)

    def _send(self, peer: str, which: Which, value: Tensor) -> None:
        self.links.send(peer, self._key(which), value)

    def _take(self, which: Which, peer: str) -> Tensor | None:
        with contextlib.suppress(TimeoutError):
            return self._received(which, 0.0)
        return None

    def _wait(self, which: Which, peer: str) -> Tensor:
        return self._received(which, HUNG_S)

    def _received(self, which: Which, timeout_s: float) -> Tensor:
        value = self.links.receive(self._key(which), timeout_s)
        assert value is not None
        return value


def serve(arguments: Sequence[str]) -> None:
    """Be one of our peers until stdin ends."""
    rank, host, asked = arguments
    torch.set_num_threads(1)
    keep_chunk_memory()  # as in a worker
    obey(Peer(int(rank), host, json.loads(asked)))


# ---------------------------------------------------------------- two peers


class Place:
    """Where both peers live: two hosts of a lab, or loopback."""

    def __init__(self, lab: Lab | None, hosts: Sequence[str]) -> None:
        self.lab, self.hosts = lab, hosts

    def start(self, rank: int, command: Sequence[str], asked: Mapping[str, Any]) -> Remote:
        """A peer: ``command`` and its rank, address and settings."""
        pipe, environment = subprocess.PIPE, {"OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "ERROR"}
        address = self.lab.address(self.hosts[rank]) if self.lab else "127.0.0.1"
        line = [*command, str(rank), address, json.dumps(asked)]
        if self.lab is not None:
            host = self.hosts[rank]
            return Remote(
                self.lab.popen(host, line, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment)
            )
        environment = {**os.environ, **environment}
        return Remote(subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment))


class Pair:
    """Two peers of one system, connected."""

    def __init__(self, place: Place, command: Sequence[str], asked: Mapping[str, Any]) -> None:
        self.peers: list[Remote] = []
        try:
            for rank in range(2):
                self.peers.append(place.start(rank, command, asked))
            addresses = self.peers[0].ask("open", [])
            self.peers[1].ask("open", addresses)
        except BaseException:
            self.close()
            raise

    def both(self, command: str, *arguments: Any) -> list[Any]:
        """Ask both at once."""
        for peer in self.peers:
            peer.tell(command, *arguments)
        return [peer.hear() for peer in self.peers]

    def close(self) -> None:
        """End both."""
        for peer in self.peers:
            peer.close()


def lasted(moments: Sequence[Sequence[float]]) -> float:
    """Seconds from when the first of the peers began until the last had ended; of each [begun, ended]."""
    return max(ended for _, ended in moments) - min(begun for begun, _ in moments)


# ---------------------------------------------------------------- averaging


def averaging(place: Place, systems: Mapping[str, Sequence[str]], args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of every system in turns; figures by system, and the worst error of each."""
    took: dict[str, list[float]] = {name: [] for name in systems}
    found_s: dict[str, list[float]] = {name: [] for name in systems}
    errors = dict.fromkeys(systems, 0.0)
    asked = {"tensors": TENSORS, "elements": args.mib * MIB // ELEMENT_BYTES // TENSORS, "seed": args.seed}
    with contextlib.ExitStack() as stack:
        pairs = {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-averaging-")))
        identities(folder)
        for name, command in systems.items():
            given = {**asked, "folder": str(folder)} if name == OURS else asked
            pairs[name] = Pair(place, command, given)
            stack.callback(pairs[name].close)
        for number in range(WARM_UP + args.rounds):
            for name, pair in pairs.items():
                waited_s = max(pair.both("prepare", number))
                seconds = lasted(pair.both("average"))
                errors[name] = max(errors[name], *pair.both("error"))
                if number >= WARM_UP:
                    took[name].append(seconds)
                    found_s[name].append(waited_s)
    return {
        name: {
            "s": round(statistics.median(seconds), 4),
            "all_s": [round(one, 4) for one in seconds],
            "found_group_s": round(statistics.median(found_s[name]), 3),
            "mb_per_s": round(args.mib * MIB / statistics.median(seconds) / 1e6, 1),
            "max_error": errors[name],
        }
        for name, seconds in took.items()
    }


def with_limit(found: dict[str, Any], nbytes: int, mbit: float) -> dict[str, Any]:
    """Add to every system how much longer it took than the line needs for ``nbytes`` each way."""
    limit_s = 8e-6 * nbytes / mbit
    return {name: {**row, "limit_ratio": round(row["s"] / limit_s, 3)} for name, row in found.items()}


# ---------------------------------------------------------------- a step of a small model


def our_step(line: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train on two real workers, a replica each; their losses are one machine's."""
    settings = [f"steps={args.steps}", f"seed={args.seed}", f"STEPS={args.steps}", f"SEED={args.seed}"]
    loaded = load_job(Path(JOB), settings)
    elements = sum(value.numel() for value in loaded.module.parameters())
    expected = [one[0] for one in run_local(from_job(loaded, loaded.training), (0,)).figures]
    with LabFleet(line_path(line)) as fleet:
        run = fleet.train(JOB, "op_fence", settings, stop_after=args.steps)
        mbit = fleet.scenario.link(*fleet.scenario.join_order[:2]).mbit
    replicas = len(run["plan"].get("replicas") or [run["plan"]])
    computing_s = max(stage["forward_s"] + stage["backward_s"] for stage in run["stages"])
    step_s, bytes_s = steady(run["step_s"]), 8e-6 * ELEMENT_BYTES * elements / mbit
    return {
        "replicas": replicas,
        "step_s": round(step_s, 4),
        "computing_s": round(computing_s, 4),
        "bytes_s": round(bytes_s, 4),
        "limit_ratio": round(step_s / (computing_s + bytes_s), 3),
        "same_losses": replicas == 2 and follow(run["loss"], expected, 0.0),
    }


def their_step(place: Place, command: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Train the same net with hivemind's optimizer; seconds between two global steps."""
    asked = {"width": WIDTH, "batch": MICRO_BATCH, "share": SHARE, "lr": LR, "seed": args.seed}
    pair = Pair(place, command, asked)
    try:
        pair.both("meet")
        runs = pair.both("train", args.hivemind_steps)
        errors = pair.both("error", [run["batches"] for run in runs])
    finally:
        pair.close()
    ended_s = [max(moments) for moments in zip(*(run["ended_s"] for run in runs), strict=True)]
    return {
        "step_s": round(statistics.median(between(ended_s)), 3),
        "computing_s": round(max(statistics.median(run["computing_s"]) for run in runs), 4),
        "batches": [run["batches"] for run in runs],
        "max_error": max(errors),
    }


def between(moments: Sequence[float]) -> list[float]:
    """Seconds from each moment to the next."""
    return [b - a for a, b in pairwise(moments)]


# ---------------------------------------------------------------- all of it


def wrong_of(found: Mapping[str, Any]) -> str:
    """Why values are wrong; "" when all are right."""
    faults = []
    for where, systems in found.get("averaging", {}).items():
        for name, row in systems.items():
            bound = 0.0 if name == OURS else AVERAGED_WITHIN
            if not row["max_error"] <= bound:
                faults.append(f"{name} on {where} is {row['max_error']:g} off the mean")
    for where, systems in found.get("step", {}).items():
        if not systems[OURS]["same_losses"]:
            faults.append(f"losses on {where} are not one machine's")
        if HIVEMIND in systems and not systems[HIVEMIND]["max_error"] <= PARAMETERS_WITHIN:
            faults.append(f"hivemind's parameters on {where} are {systems[HIVEMIND]['max_error']:g} off")
    return "; ".join(faults)


def shown(what: str, where: str, system: str, row: Mapping[str, Any]) -> None:
    """One line of the table."""
    words = [f"{name} {value:g}" for name, value in row.items() if isinstance(value, float)]
    print(f"{what:<10} {where:<9} {system:<9} {', '.join(words)}", flush=True)


def main() -> int:
    """Print a line for each; exit code 1 when values are wrong."""
    made = parser(__doc__ or "", scenario=DEFAULT_LINE)
    made.add_argument("--hivemind-python", default="", help="a Python that has hivemind")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--rounds", type=int, default=5, help="of averaging that count")
    made.add_argument("--mib", type=int, default=64, help="of float32 that are averaged")
    made.add_argument("--steps", type=int, default=STEPS, help="of two real workers")
    made.add_argument("--hivemind-steps", type=int, default=4, help="global steps")
    made.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.peer:
        serve(args.peer)
        return 0
    need_lab(args.json)
    systems = {OURS: [sys.executable, "-m", "benchmarks.vs_hivemind", "--peer"]}
    if args.hivemind_python:
        systems[HIVEMIND] = [args.hivemind_python, str(RIVALS / "hivemind_averager.py")]
    found: dict[str, Any] = {"seed": args.seed, "machine": machine(), "averaging": {}, "step": {}}
    if "averaging" in args.parts:
        found["averaging"]["loopback"] = averaging(Place(None, ()), systems, args)
    for name in args.scenario or [DEFAULT_LINE]:
        scenario = line_scenario(name)
        hosts = scenario.join_order[:2]
        mbit = scenario.link(*hosts).mbit
        if "averaging" in args.parts:
            with Lab(scenario, quotas=False) as lab:
                rows = averaging(Place(lab, hosts), systems, args)
            found["averaging"][scenario.name] = with_limit(rows, args.mib * MIB, mbit)
        if "step" in args.parts:
            found["step"][scenario.name] = rows = {OURS: our_step(name, args)}
            if args.hivemind_python:
                command = [args.hivemind_python, str(RIVALS / "hivemind_optimizer.py")]
                with Lab(scenario, quotas=False) as lab:
                    rows[HIVEMIND] = their_step(Place(lab, hosts), command, args)
    for what in PARTS:
        for where, rows in found[what].items():
            for system, row in rows.items():
                shown(what, where, system, row)
    return conclude(found, args.json, wrong_of(found))


if __name__ == "__main__":
    execute(main)
