"""A guest's manners with real daemons: limits hold while a job runs, pause and resume, leave and forget."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import Case, built_in, difference, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare
from tests.interrupts import PROMISED_S, spare_s_until
from tests.patience import eventually
from worker.config import change_settings

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


def holders(fleet: LoopbackFleet, update: Any) -> list[str]:
    """Names of the workers of a job's stages, the first stage's first."""
    names = {w.worker: w.name for w in fleet.client.status().workers}
    return [names[stage.worker] for stage in sorted(update.stages, key=lambda stage: stage.stage)]


def number_of(name: str) -> int:
    return int(name.removeprefix("worker"))


def works(fleet: LoopbackFleet, name: str) -> bool:
    """A worker is there for jobs, and could compute at once."""
    phase, reason = state(fleet, name)
    ready = phase in ("pool", "assigned") and not reason.startswith("paused:")
    return ready and bool(computing(fleet, number_of(name)))


def test_a_pause_frees_the_machine_within_two_seconds_and_costs_no_step(fleet: LoopbackFleet) -> None:
    """Three pauses in one job, each of a worker that holds a stage, and the bits of an undisturbed run."""
    case = built_in("branches", replace(TRAINING, steps=600), 0.1)
    job = submitted(fleet, case)
    losses: dict[int, float] = {}
    took_s: list[float] = []
    paused = ""
    for update in fleet.client.watch(job):
        losses.update({p.step: p.value for p in update.metrics if p.name == "loss"})
        assert update.state not in ("failed", "cancelled", "paused"), update.reason
        if update.step < 100 * (len(took_s) + 1) or len(took_s) == 3 or len(update.stages) < 2:
            continue
        if paused:  # whoever was paused before is the spare one from now on
            change_settings(Path(fleet._state(paused)[1]), {"paused": None})
            eventually(lambda: works(fleet, paused))  # noqa: B023 - within the loop
        paused = holders(fleet, update)[len(took_s) % 2]
        before = computing(fleet, number_of(paused))
        assert before
        change_settings(Path(fleet._state(paused)[1]), {"paused": True})
        took_s.append(spare_s_until(lambda: not any(process.is_running() for process in before)))  # noqa: B023
    assert update.state == "finished", update.reason
    assert len(took_s) == 3
    assert update.plan_version >= 4
    assert difference(fleet.result(job, losses), run_local(case, (0,)), 1) == 0.0
    assert sorted(losses) == list(range(1, 601))
    assert min(took_s) < PROMISED_S, took_s
    worker(fleet, paused, "resume")


def test_a_paused_worker_frees_its_machine_and_works_again_when_it_resumes(fleet: LoopbackFleet) -> None:
    case = built_in("branches", TRAINING, 0.1)
    job = submitted(fleet, case)
    *_, update = steps(fleet, job, 5)
    name = holders(fleet, update)[0]
    number = number_of(name)
    assert computing(fleet, number)
    said = worker(fleet, name, "pause")
    assert (said["paused"], said["taken_up"]) == ("by its owner", True)
    # The command returns when the daemon has taken it up: whatever computed is ended then.
    eventually(lambda: not computing(fleet, number))
    assert state(fleet, name) == ("pool", "paused: by its owner")
    # The job goes on with the spare one.
    update = next(u for u in steps(fleet, job, 5) if u.plan_version >= 2 and u.step >= 3)
    assert name not in holders(fleet, update)
    assert worker(fleet, name, "resume")["paused"] is False
    eventually(lambda: state(fleet, name)[1] != "paused: by its owner" and computing(fleet, number))
    assert state(fleet, name)[0] == "pool"
    # Another memory limit takes a new compute process, and the coordinator knows it at once.
    before = computing(fleet, number)
    worker(fleet, name, "limits", "--memory", "1GiB")
    eventually(lambda: not any(process.is_running() for process in before))
    (device,) = [w.device for w in fleet.client.status().workers if w.name == name]
    assert device.memory_limit_bytes + device.own_memory_bytes == 1 << 30
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


@pytest.mark.parametrize("way", ["upload", "download"])
def test_a_rate_is_held_while_a_job_runs_and_nobody_is_suspected_of_being_slow(way: str) -> None:
    """Activations leave worker 0, as many bytes of gradients come back: where one way is limited, the other
    follows. A busy machine may give less than the rate, never more."""
    with LoopbackFleet(2) as fleet:
        # 640 KiB each way a step, far more than the rate carries in the time of its computing.
        job = submitted(fleet, built_in("gpt2", replace(TRAINING, n_micro=16), 0.1))
        for _ in steps(fleet, job, 5):
            pass
        unlimited = _mbit_each_way(fleet, 3.0)
        worker(fleet, "worker0", "limits", f"--{way}-mbit", "2")
        for _ in steps(fleet, job, 2):  # what was under way
            pass
        # What is not carried while a step computes is not carried at the limit either.
        assert 0.9 / (1 / 2.0 + 1 / unlimited) <= _mbit_each_way(fleet, 20.0) <= 1.1 * 2.0
        (update, *_) = steps(fleet, job, 0)
        assert (update.state, update.plan_version) == ("training", 1)
        fleet.client.cancel(job)


class ToldFleet(LoopbackFleet):
    """Three workers whose machines are on battery, hot or in use when a test says so of worker 0's."""

    def __init__(self) -> None:
        super().__init__(3)
        self._told = {"on_battery": False, "celsius": 40.0, "idle_s": 1e6}
        self.path = self.state.parent / "told.json"
        self.tell()

    def tell(self, **changes: Any) -> None:
        """Let worker 0's machine tell something else."""
        self._told |= changes
        scratch = self.path.with_suffix(".new")
        scratch.write_text(json.dumps(self._told))
        scratch.replace(self.path)

    def join_command(self, name: str) -> list[str]:
        module, *more = super().join_command(name)
        return ["tests.e2e.told_worker" if name == "worker0" else module, *more]


@dataclass(frozen=True)
class Pausing:
    """A limit that pauses, what the machine tells meanwhile, and the words for it."""

    limit: Mapping[str, Any]
    told: Mapping[str, Any]
    says: str


PAUSING = (
    Pausing({"on_battery": "pause"}, {"on_battery": True}, "on battery"),
    Pausing({"when_used": "pause"}, {"idle_s": 5.0}, "this machine is used"),
    Pausing({"max_celsius": 80.0}, {"celsius": 85.0}, "hotter than 80 C"),
    Pausing({"hours": "now"}, {}, "outside its hours"),
    Pausing({"day_bytes": 1 << 20}, {}, "of today's 1.0 MiB are used"),
)


def not_now() -> str:
    """Hours that begin in some and last one: none in which a test runs."""
    hour = (time.localtime().tm_hour + 12) % 24
    return f"{hour}-{hour + 1}"


def test_each_limit_that_pauses_is_held_while_a_job_runs_and_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = ToldFleet()
    monkeypatch.setenv("TOLD", str(fleet.path))
    folder = Path(fleet._state("worker0")[1])
    with fleet:
        # 40 KiB a micro-batch each way: a day's least limit is soon used up.
        job = submitted(fleet, built_in("gpt2", TRAINING, 0.1))
        for pausing in PAUSING:
            # Worker 0 holds a stage: of the others one pauses until it does.
            for name in ("worker1", "worker2"):
                change_settings(Path(fleet._state(name)[1]), {"paused": name == "worker2" or None})
            eventually(lambda: "worker0" in holders(fleet, next(steps(fleet, job, 0))))
            change_settings(Path(fleet._state("worker2")[1]), {"paused": None})
            eventually(lambda: works(fleet, "worker2"))
            for _ in steps(fleet, job, 3):
                pass
            limit = {k: not_now() if v == "now" else v for k, v in pausing.limit.items()}
            fleet.tell(**pausing.told)
            change_settings(folder, limit)
            eventually(lambda: pausing.says in state(fleet, "worker0")[1])  # noqa: B023 - within the loop
            eventually(lambda: not computing(fleet, 0))
            *_, update = steps(fleet, job, 5)
            assert "worker0" not in holders(fleet, update)
            change_settings(folder, dict.fromkeys(limit))
            fleet.tell(on_battery=False, celsius=40.0, idle_s=1e6)
            eventually(lambda: works(fleet, "worker0"))
        fleet.client.cancel(job)


def _mbit_each_way(fleet: LoopbackFleet, seconds: float) -> float:
    """Half of what worker 0 sends and receives in a time: it notes its bytes whenever a setting changes."""

    def carried(minutes: float) -> tuple[float, int]:
        found = worker(fleet, "worker0", "limits", "--idle-minutes", f"{minutes:g}")
        return time.monotonic(), int(found["now"]["day_bytes"])

    first_s, first = carried(4.0 + seconds)
    time.sleep(seconds)
    last_s, last = carried(5.0 + seconds)
    return 8 * (last - first) / 2 / (last_s - first_s) / 1e6


def _share(fleet: LoopbackFleet, seconds: float = 5.0) -> float:
    """CPU seconds of what computes, over ``seconds`` of the wall's."""

    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in computing(fleet, 0))

    began_s, before_s = time.monotonic(), used_s()
    time.sleep(seconds)
    return (used_s() - before_s) / (time.monotonic() - began_s)
