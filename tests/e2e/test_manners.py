"""A guest's manners with real daemons: limits hold while a job runs, pause and resume, leave and forget."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import Case, built_in
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare
from tests.patience import eventually

# More than any test waits for; jobs are cancelled.
TRAINING = TrainingSpec(steps=3000, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3))
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def worker(fleet: LoopbackFleet, name: str, *arguments: str) -> Any:
    """What an `atoll-worker` command says of the worker's folder."""
    command = [sys.executable, "-m", "worker.cli", *arguments, *fleet._state(name), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def state(fleet: LoopbackFleet, name: str) -> tuple[str, str]:
    """Membership of a worker, and its reason."""
    return next((w.state, w.reason) for w in fleet.client.status().workers if w.name == name)


def computing(fleet: LoopbackFleet, number: int) -> list[psutil.Process]:
    """Processes below a worker's daemon."""
    return psutil.Process(fleet.daemons()[number]).children(recursive=True)


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(3) as started:
        yield started


def submitted(fleet: LoopbackFleet, case: Case) -> str:
    positions = case.dag.cuttable()
    return fleet.client.submit(
        prepare(as_job(case), partitioner=cut_at((0, positions[len(positions) // 2])))
    ).job


def steps(fleet: LoopbackFleet, job: str, more: int) -> Iterator[Any]:
    """Updates of a job until it has made so many steps more."""
    with closing(fleet.client.watch(job)) as updates:
        first = None
        for update in updates:
            assert update.state not in ("failed", "cancelled"), update.reason
            first = update.step if first is None else first
            yield update
            if update.step >= first + more:
                return


def test_a_paused_worker_frees_its_machine_and_works_again_when_it_resumes(fleet: LoopbackFleet) -> None:
    case = built_in("branches", TRAINING, 0.1)
    job = submitted(fleet, case)
    *_, update = steps(fleet, job, 5)
    holders = {stage.worker for stage in update.stages}
    names = {w.worker: w.name for w in fleet.client.status().workers}
    name = next(names[held] for held in sorted(holders))
    number = int(name.removeprefix("worker"))
    assert computing(fleet, number)
    said = worker(fleet, name, "pause")
    assert (said["paused"], said["taken_up"]) == ("by its owner", True)
    # The command returns when the daemon has taken it up: whatever computed is ended then.
    eventually(lambda: not computing(fleet, number))
    assert state(fleet, name) == ("pool", "paused: by its owner")
    # The job goes on with the spare one.
    update = next(u for u in steps(fleet, job, 5) if u.plan_version == 2 and u.step >= 3)
    assert name not in {names[stage.worker] for stage in update.stages}
    assert worker(fleet, name, "resume")["paused"] is False
    eventually(lambda: state(fleet, name)[1] != "paused: by its owner" and computing(fleet, number))
    assert state(fleet, name)[0] == "pool"
    # Another memory limit takes a new compute process, and the coordinator knows it at once.
    before = computing(fleet, number)
    worker(fleet, name, "limits", "--memory", "1GiB")
    eventually(lambda: not any(process.is_running() for process in before))
    (budget,) = {w.device.memory_limit_bytes for w in fleet.client.status().workers if w.name == name}
    assert budget == 1 << 30
    eventually(lambda: state(fleet, name) == ("pool", "in the backup pool") or computing(fleet, number))
    fleet.client.cancel(job)


def test_who_leaves_for_good_leaves_nothing(fleet: LoopbackFleet) -> None:
    folder = Path(fleet._state("worker2")[1])
    said = worker(fleet, "worker2", "leave", "--forget")
    assert said["process"] == fleet.daemons()[2]
    assert {"identity", "settings.toml", "applied.json", "version"} <= {
        gone["name"] for gone in said["removed"]
    }
    assert said["kept"] == []
    assert not folder.exists()
    assert state(fleet, "worker2")[0] == "left"


def test_the_share_of_the_cpu_is_held_while_a_job_runs() -> None:
    """Processor seconds of the compute process over the seconds between two looks, while one stage is always
    at work. A busy machine may give less than the share, never more."""
    with LoopbackFleet(1) as fleet:
        case = built_in("branches", TRAINING, 0.1)
        job = fleet.client.submit(prepare(as_job(case))).job
        for _ in steps(fleet, job, 20):
            pass
        whole = _share(fleet)
        for percent in (40.0, 10.0):
            worker(fleet, "worker0", "limits", "--cpu", f"{percent:g}")
            _share(fleet, 1.0)
            assert 0.5 * min(whole, percent / 100) <= _share(fleet) <= 1.15 * percent / 100
            (found,) = fleet.client.status().workers
            assert found.guest.compute_share == percent / 100
        fleet.client.cancel(job)


def test_rates_are_held_while_a_job_runs_and_nobody_is_suspected_of_being_slow() -> None:
    with LoopbackFleet(2) as fleet:
        # 640 KiB each way a step, far more than the rate carries in the time of its computing.
        job = submitted(fleet, built_in("gpt2", replace(TRAINING, steps=300, n_micro=16), 0.1))
        for _ in steps(fleet, job, 5):
            pass
        worker(fleet, "worker0", "limits", "--upload-mbit", "2", "--download-mbit", "2")
        time.sleep(1.0)  # what was under way
        first_s, first = time.monotonic(), _carried(fleet, 4)
        time.sleep(12.0)
        last_s, last = time.monotonic(), _carried(fleet, 5)
        mbit = 8 * (last - first) / (last_s - first_s) / 1e6
        assert 0.9 * 2.0 <= mbit <= 1.1 * 4.0  # both ways together, of which one is always at work
        (update, *_) = steps(fleet, job, 0)
        assert (update.state, update.plan_version) == ("training", 1)
        fleet.client.cancel(job)


def _carried(fleet: LoopbackFleet, minutes: int) -> int:
    """Bytes of worker 0 today, both ways, as it notes them whenever a setting changes."""
    return int(worker(fleet, "worker0", "limits", "--idle-minutes", str(minutes))["now"]["day_bytes"])


def _share(fleet: LoopbackFleet, seconds: float = 5.0) -> float:
    """CPU seconds of what computes, over ``seconds`` of the wall's."""

    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in computing(fleet, 0))

    began_s, before_s = time.monotonic(), used_s()
    time.sleep(seconds)
    return (used_s() - before_s) / (time.monotonic() - began_s)
