"""Two devices of one daemon train as two workers, and nothing between them touches a socket."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.gradient_exchange import trained_elements
from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in, difference, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare
from coordinator.planning.baselines import GIVEN_CUT
from protos.devices import machine_of
from tests.patience import HUNG_S, eventually
from worker.config import WorkerConfig
from worker.daemon import Daemon
from worker.transport.network import PeerNetwork

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = TrainingSpec(
    steps=4, n_micro=4, seed=5, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5)
)


@contextmanager
def lending(fleet: LoopbackFleet, devices: str, folder: Path) -> Iterator[Daemon]:
    """A daemon in this process that lends ``devices``."""
    host, port = fleet.client.endpoint.address.rsplit(":", 1)
    daemon = Daemon(
        WorkerConfig(
            host=host,
            port=int(port),
            token=fleet.client.create_token("several").token,
            name="several",
            devices=devices,
            threads=1,
            listen_host="127.0.0.1",
            state_dir=folder,
        )
    )
    thread = threading.Thread(target=daemon.run, daemon=True)
    thread.start()
    try:
        yield daemon
    finally:
        daemon.leave("the test is over")
        thread.join(HUNG_S)
    assert not thread.is_alive()


def states(fleet: LoopbackFleet) -> dict[str, str]:
    return {worker.name: worker.state for worker in fleet.client.status().workers}


@pytest.mark.slow  # links of one daemon: tests/worker/transport/test_local.py
def test_two_devices_of_one_daemon_and_a_worker_elsewhere_train_the_bits_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: set[tuple[str, str]] = set()  # pairs with a connection of gRPC, as this process sees it
    attach = PeerNetwork.attach

    def noted(self: PeerNetwork, pipe: Any, peer: Any, remote: Any, *more: Any, **named: Any) -> Any:
        joined.add((self.name, remote.name))
        return attach(self, pipe, peer, remote, *more, **named)

    monkeypatch.setattr(PeerNetwork, "attach", noted)
    # Two branches, a skip over the middle stage, tied weights, clipping over all stages.
    case = built_in("branches", TRAINING, 0.1)
    cuts = case.dag.cuttable()
    starts = (0, cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3])
    with LoopbackFleet(1) as fleet, lending(fleet, "cpu*2", tmp_path / "several"):
        eventually(lambda: states(fleet) == {"worker0": "pool", "several/0": "pool", "several/1": "pool"})
        found = fleet.run(case, starts)
        assert fleet.plan is not None
        other, first, second = (stage.worker for stage in fleet.plan.stages)
        both = machine_of(first)
        assert {first, second} == {both, f"{both}/1"}  # in the order in which their links were found
        ways = {(way.source, way.target): way.way for way in fleet.client.status().links}
    assert difference(found, run_local(case, (0,)), 1) == 0.0
    assert ways[first, second] == ways[second, first] == "local"
    assert {frozenset(map(machine_of, pair)) for pair in joined} == {frozenset((other, both))}


def compute_processes(daemon: Daemon) -> list[int]:
    """Process ids of the devices' compute processes."""
    return [
        now.child.launched.pid for member in daemon._members if (now := member._host._state.now) is not None
    ]


def spawned(fleet: LoopbackFleet, name: str) -> None:
    """Start a worker process that lends two parts of its CPU."""
    command = fleet.join_command(name)
    at = command.index("--device")
    before = len(states(fleet))
    fleet._spawn(name, *command[:at], "--devices", "cpu*2", *command[at + 2 :])
    eventually(lambda: list(states(fleet).values()).count("pool") == before + 2)


@pytest.mark.slow
def test_between_two_daemons_of_two_devices_half_of_a_flat_exchange_crosses() -> None:
    training = replace(TRAINING, blocks=4, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5))
    case = built_in("gpt2", training, 0.1)
    partitioner = f"{GIVEN_CUT}@1/@1/@1/@1"
    with LoopbackFleet(0) as fleet:
        spawned(fleet, "west")
        spawned(fleet, "east")
        found = fleet.train(prepare(as_job(case), partitioner=partitioner))
        plan = fleet.plan
        spans = [s for s in fleet.client.trace(fleet.job) if (s.kind, s.step) == ("send", 1)]
    assert plan is not None
    assert plan.exchange is not None
    assert plan.exchange.inner is not None, "the pairs inside a daemon are no faster than those between them"
    assert difference(found, run_local(case, (0,)), 1) == 0.0
    crossing = sum(s.bytes for s in spans if machine_of(s.worker) != machine_of(s.peer))
    elements = trained_elements(case.dag.parameters, case.states, training.optimizer)
    flat = 4 * 4 * sum(elements.values())  # of each of two owners' halves: two parts there, two totals back
    print(f"crossing {crossing} bytes a step, flat {flat}: {crossing / flat:.3f}")
    assert crossing <= 0.55 * flat


@pytest.mark.slow
def test_a_compute_process_that_dies_takes_along_its_own_stage_and_no_other(tmp_path: Path) -> None:
    case = built_in("branches", replace(TRAINING, steps=60, spot_checks=0.0), 0.1)
    cuts = case.dag.cuttable()
    prepared = prepare(as_job(case), partitioner=cut_at((0, cuts[len(cuts) // 2])))
    with LoopbackFleet(0) as fleet, lending(fleet, "cpu*2", tmp_path / "several") as daemon:
        eventually(lambda: states(fleet) == {"several/0": "pool", "several/1": "pool"})
        fleet._spawn("worker0", *fleet.join_command("worker0"))
        eventually(lambda: len(states(fleet)) == 3)
        before = compute_processes(daemon)
        job = fleet.client.submit(prepared).job
        losses, killed = dict[int, float](), False
        for update in fleet.client.watch(job):
            losses.update({p.step: p.value for p in update.metrics if p.name == "loss"})
            if update.step >= 5 and not killed:
                os.kill(before[1], signal.SIGKILL)
                killed = True
        assert update.state == "finished", update.reason
        found = fleet.result(job, losses)
        after = compute_processes(daemon)
    assert (after[0], after[1] == before[1]) == (before[0], False)
    assert difference(found, run_local(case, (0,)), 1) == 0.0


@pytest.mark.slow
def test_a_daemon_that_dies_loses_all_its_devices_and_the_job_goes_on(tmp_path: Path) -> None:
    case = built_in("branches", replace(TRAINING, steps=60, spot_checks=0.0), 0.1)
    cuts = case.dag.cuttable()
    prepared = prepare(as_job(case), partitioner=cut_at((0, cuts[len(cuts) // 2])))
    with LoopbackFleet(0) as fleet:
        spawned(fleet, "several")
        for name in ("worker0", "worker1"):
            fleet._spawn(name, *fleet.join_command(name))
        eventually(lambda: list(states(fleet).values()) == ["pool"] * 4)
        job = fleet.client.submit(prepared).job
        losses, killed = dict[int, float](), False
        for update in fleet.client.watch(job):
            losses.update({p.step: p.value for p in update.metrics if p.name == "loss"})
            if update.step >= 5 and not killed:
                daemon = psutil.Process(fleet.daemons()[0])
                for process in [daemon, *daemon.children(recursive=True)]:
                    process.kill()
                killed = True
        assert update.state == "finished", update.reason
        found = fleet.result(job, losses)
        gone = states(fleet)
    assert {name for name, state in gone.items() if state == "dead"} == {"several/0", "several/1"}
    assert difference(found, run_local(case, (0,)), 1) == 0.0
