"""A coordinator that is killed and started again on its folder: the job goes on at the step in flight."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from benchmarks.waits import came_about
from coordinator.client.prepare import prepare
from coordinator.messages.facts import CoordinatorStarted, PlanAdopted, StepCommitted, from_record
from coordinator.storage.journal import StoredJournal

TRAINING = TrainingSpec(
    steps=240, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3, clip_norm=0.5), checkpoint_every=25
)
KILL_AFTER = (30, 77, 150)
"""Steps after which it is killed at once: anywhere within the next ones, or while a checkpoint is stored."""

pytestmark = pytest.mark.slow


def work_port(log: Path) -> int:
    """The port for joined workers, from the coordinator's log."""
    lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    return next(int(line["work_port"]) for line in lines if line["event"] == "server.started")


def killed_and_started_again(fleet: LoopbackFleet, port: int) -> None:
    process = fleet._processes[0]
    process.kill()
    process.wait()
    fleet._spawn(
        "coordinator", "coordinator.cli", "serve", "--listen", fleet.client.endpoint.address,
        "--work-port", str(port), *fleet._state("coordinator"),
    )  # fmt: skip
    fleet._processes[0] = fleet._processes.pop()


def test_every_step_is_committed_once_and_the_model_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case = built_in("branches", TRAINING, 0.1)
    positions = case.dag.cuttable()
    thirds = (0, positions[len(positions) // 3], positions[2 * len(positions) // 3])
    due = list(KILL_AFTER)
    with LoopbackFleet(3) as fleet:
        port = work_port(fleet.state.with_suffix(".log"))
        reply = fleet.client.submit(prepare(as_job(case), partitioner=cut_at(thirds)))
        for update in fleet.client.watch(reply.job):
            if due and update.step > due[0]:
                del due[0]
                killed_and_started_again(fleet, port)
        assert due == []
        assert (update.state, update.plan_version, len(update.stages)) == ("finished", 1, 3), update.reason
        path = tmp_path / "model.safetensors"
        fleet.client.export(reply.job, path)
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [(record.at_s, from_record(record)) for record in journal.replay()]
    commits = [(at_s, fact.step) for at_s, fact in facts if isinstance(fact, StepCommitted)]
    assert [step for _, step in commits] == list(range(TRAINING.steps))
    assert sum(isinstance(fact, PlanAdopted) for _, fact in facts) == 1
    assert [fact.term for _, fact in facts if isinstance(fact, CoordinatorStarted)] == [1, 2, 3, 4]
    pauses = sorted(after - before for (before, _), (after, _) in pairwise(commits))
    print(f"longest pauses between commits: {[round(s, 2) for s in pauses[-len(KILL_AFTER) :]]} s")
    found, expected = load_file(path), run_local(case, (0,)).state
    trained = [name for name in expected if name in found]
    assert trained
    for name in trained:
        assert torch.equal(found[name], expected[name]["value"]), name


def test_a_worker_hangs_up_on_a_coordinator_of_a_smaller_term_and_takes_the_next() -> None:
    """The journal's term was set back, as where its folder was restored from a backup."""
    with LoopbackFleet(1) as fleet:
        port, log = work_port(fleet.state.with_suffix(".log")), fleet.state.with_name("worker0.log")
        killed_and_started_again(fleet, port)  # term 2
        fleet._wait_for(1)
        fleet._processes[0].kill()
        fleet._processes[0].wait()
        with closing(sqlite3.connect(fleet.state / "journal.sqlite")) as connection:
            connection.execute("UPDATE command SET term = 0")
            connection.commit()
        killed_and_started_again(fleet, port)  # term 1
        refused = "a coordinator of term 1 answers, and one of term 2 commands"
        assert came_about(lambda: log.read_text().count(refused) >= 2, fleet._processes), fleet.log("worker0")
        killed_and_started_again(fleet, port)  # term 2 again
        fleet._wait_for(1)
