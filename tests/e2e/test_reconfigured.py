"""Workers that are killed, frozen or that leave cost a running job neither a step nor a bit.

A backup takes the stage over from the send logs of its neighbours, and everybody else keeps theirs.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import Case, built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare
from coordinator.messages.facts import PlanAdopted, StepCommitted, from_record
from coordinator.storage.journal import StoredJournal

TRAINING = TrainingSpec(
    steps=200,
    n_micro=4,
    seed=3,
    optimizer=Optimizer(lr=3e-3, clip_norm=0.5),
    checkpoint_every=10_000,
    spot_checks=0.0,  # only who takes over repeats anything
)
FIRST, MIDDLE, LAST = 0, 1, 2

pytestmark = pytest.mark.slow


def thirds(case: Case) -> tuple[int, ...]:
    positions = case.dag.cuttable()
    return (0, positions[len(positions) // 3], positions[2 * len(positions) // 3])


def disturb(fleet: LoopbackFleet, worker: str, how: signal.Signals) -> None:
    """Send a signal to a worker; what freezes or is killed does so with all of its processes."""
    names = {w.worker: w.name for w in fleet.client.status().workers}
    number = int(names[worker].removeprefix("worker"))
    daemon = psutil.Process(fleet.daemons()[number])
    whole = how in (signal.SIGSTOP, signal.SIGKILL)
    for process in [daemon, *(daemon.children(recursive=True) if whole else ())]:
        process.send_signal(how)


def logged(fleet: LoopbackFleet, event: str) -> list[Mapping[str, object]]:
    """Events of all workers' logs."""
    found = []
    for path in sorted(fleet.state.parent.glob("worker*.log")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith("{")]
        found += [entry for line in lines if (entry := json.loads(line)).get("event") == event]
    return found


@pytest.mark.parametrize(
    "losses",
    [
        [(20, MIDDLE, signal.SIGKILL)],
        [(20, MIDDLE, signal.SIGSTOP), (60, LAST, signal.SIGKILL)],
        [(20, FIRST, signal.SIGTERM), (60, LAST, signal.SIGTERM)],
    ],
    ids=["killed", "frozen then killed", "left"],
)
def test_no_step_and_no_bit_is_lost_with_workers_that_go(
    tmp_path: Path, losses: Sequence[tuple[int, int, signal.Signals]]
) -> None:
    torch.set_num_threads(1)
    case = built_in("branches", TRAINING, 0.1)
    due, holders = list(losses), list[str]()
    with LoopbackFleet(3 + len(losses), options=("--log-json",)) as fleet:
        # No standbys: a worker that seems faster takes no place either, as on a loaded machine one may.
        reply = fleet.client.submit(prepare(as_job(case), partitioner=cut_at(thirds(case)), standbys=0))
        for update in fleet.client.watch(reply.job):
            holders = [stage.workers[0] for stage in update.plan.stages] or holders
            if due and update.step > due[0][0] and update.plan_version == 1 + len(losses) - len(due):
                _, stage, how = due.pop(0)
                disturb(fleet, holders[stage], how)
        assert due == []
        assert update.state == "finished", update.reason
        path = tmp_path / "model.safetensors"
        fleet.client.export(reply.job, path)
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [(record.at_s, from_record(record)) for record in journal.replay()]
        replayed, reconfigured = logged(fleet, "stage.replayed"), logged(fleet, "stage.reconfigured")
    commits = [(at_s, fact.step) for at_s, fact in facts if isinstance(fact, StepCommitted)]
    assert [step for _, step in commits] == list(range(TRAINING.steps))
    assert sum(isinstance(fact, PlanAdopted) for _, fact in facts) == 1  # nothing began anew
    assert len(replayed) == len(losses)
    assert len(reconfigured) == 2 * len(losses)
    pauses = sorted(after - before for (before, _), (after, _) in pairwise(commits))
    print(f"longest pauses between commits: {[round(s, 2) for s in pauses[-len(losses) :]]} s; {replayed}")
    found, expected = load_file(path), run_local(case, (0,)).state
    trained = [name for name in expected if name in found]
    assert trained
    for name in trained:
        assert torch.equal(found[name], expected[name]["value"]), name
