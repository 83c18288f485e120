"""A fleet of wrapped daemons (``points``), and a job that trains while they are killed at named points."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from atoll.errors import AtollError
from benchmarks.oracle import Case, run_local
from benchmarks.real_workers import ROOT, as_job, cut_at
from benchmarks.waits import came_about
from coordinator.cli.local_fleet import COORDINATOR, LocalFleet
from coordinator.cli.processes import start_here
from coordinator.client.prepare import Prepared, prepare
from coordinator.messages.facts import PlanAdopted, Reconfigured
from experiments.chaos.fleet import Facts
from experiments.chaos.members import Member, kill, lives
from experiments.chaos.promises import commits
from tests.e2e.points import PACE, PASSED, STEADY

if TYPE_CHECKING:
    import psutil

STEP, CHECKPOINT, REPLAY, JOIN, JOURNAL = "step", "checkpoint", "replay", "join", "journal"
COMPUTE, DAEMON = "compute", "daemon"
VICTIMS = (COORDINATOR, DAEMON, COMPUTE)
SOON, LOSS, NEWCOMER, RESTART, SUBMIT = "soon", "loss", "newcomer", "restart", "submit"
"""What brings a point about: training itself, a stage that is lost, another worker, a coordinator that is
started again, another job."""
POINTS: dict[str, tuple[tuple[str, str], ...]] = {
    STEP: (
        ("worker.send.ready.before", SOON),
        ("worker.send.ready.after", SOON),
        ("coordinator.journal.StepCommitted.before", SOON),
        ("coordinator.journal.StepCommitted.after", SOON),
        ("coordinator.say.StepCommit.2.before", SOON),
        ("worker.hear.StepCommit.after", SOON),
        ("worker.order.StepCommit.after", SOON),
        ("compute.apply.before", SOON),
        ("compute.apply.after", SOON),
        ("compute.pass.FORWARD.after", SOON),
        ("compute.pass.BACKWARD.before", SOON),
        ("compute.post.StepReady.before", SOON),
        ("worker.log.before", SOON),
    ),
    CHECKPOINT: (
        ("compute.snapshot.after", SOON),
        ("compute.store.before", SOON),
        ("worker.store.before", SOON),
        ("coordinator.blob.after", SOON),
        ("worker.store.after", SOON),
        ("worker.send.stored.before", SOON),
        ("coordinator.journal.CheckpointStored.before", SOON),
        ("coordinator.journal.CheckpointStored.after", SOON),
    ),
    REPLAY: (
        ("coordinator.journal.Reconfigured.before", LOSS),
        ("coordinator.journal.Reconfigured.after", LOSS),
        ("coordinator.say.Reconfigure.2.before", LOSS),
        ("worker.hear.Reconfigure.before", LOSS),
        ("compute.reconfigure.before", LOSS),
        ("worker.serve.before", LOSS),
        ("compute.record.before", LOSS),
        ("compute.replay.after", LOSS),
        ("worker.send.loaded.before", LOSS),
    ),
    JOIN: (
        ("coordinator.journal.worker.enrolled.before", NEWCOMER),
        ("coordinator.journal.worker.enrolled.after", NEWCOMER),
        ("coordinator.attach.after", NEWCOMER),
        ("worker.hear.Welcome.before", NEWCOMER),
        ("coordinator.journal.JobSubmitted.after", SUBMIT),
        ("coordinator.journal.PlanAdopted.after", SUBMIT),
        ("coordinator.say.Assign.2.before", SUBMIT),
        ("worker.order.Assign.before", SUBMIT),
        ("compute.connect.before", SUBMIT),
        ("coordinator.say.StepStart.2.before", SUBMIT),
    ),
    JOURNAL: (
        ("coordinator.snapshot.before", SOON),
        ("coordinator.snapshot.after", SOON),
        ("coordinator.claim.after", RESTART),
        ("worker.hear.Disconnected.after", RESTART),
        ("worker.hear.Welcome.after", RESTART),
        ("coordinator.journal.JobEnded.before", SUBMIT),
        ("coordinator.journal.JobEnded.after", SUBMIT),
    ),
}
"""By protocol."""
ROLES = {COORDINATOR: "coordinator", DAEMON: "worker", COMPUTE: "compute"}
MENDING_PACE_S = 1.0  # between two steps while somebody starts again: on a busy machine that takes a minute
DEATHS = 2  # of a worker's compute processes by one job; after three it takes no more of it


def bereft(members: Mapping[str, tuple[psutil.Process | None, Sequence[psutil.Process]]]) -> list[str]:
    """Return which of these daemons are here, and have lost a compute process."""
    return [
        name
        for name, (daemon, computing) in members.items()
        if daemon is not None and lives(daemon) and not all(map(lives, computing))
    ]


def known(case: Case) -> dict[str, torch.Tensor]:
    """Return the parameters that an undisturbed run ends with."""
    return {name: tensors["value"] for name, tensors in run_local(case, (0,)).state.items()}


@dataclass
class Wrapped:
    """Wrapped daemons, a fleet of them; use it in ``with fleet(...)``."""

    local: LocalFleet
    folder: Path
    case: Case  # of the first job
    brief: Case  # of those that are submitted beside it
    prepared: Mapping[int, Prepared]  # by steps
    jobs: list[str] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    steps: dict[str, int] = field(default_factory=dict)  # by job, when all were well after the last kill

    def member(self, name: str) -> Member:
        return Member(name, self.local.folder / name)

    # ------------------------------------------------------------ jobs

    def submit(self, case: Case) -> threading.Thread:
        """Submit a job, in a thread: the coordinator may be killed meanwhile."""
        prepared = self.prepared[case.training.steps]

        def submitted() -> None:
            self.jobs.append(self.local.client.submit(prepared).job)

        thread = threading.Thread(target=submitted)
        thread.start()
        return thread

    def wait(self, check: Callable[[], bool]) -> None:
        """Wait however long it takes: a busy machine starts a daemon within minutes."""
        came_about(check, ())

    def over(self) -> bool:
        """Return whether every job that was submitted has ended."""
        updates = [self.update(job) for job in self.jobs]
        return all(u is not None and u.state in ("failed", "finished") for u in updates)

    def update(self, job: str) -> Any:
        """Return a job as `atoll status` has it, None while nobody answers."""
        try:
            return next(update for update in self.local.client.status().jobs if update.job == job)
        except (AtollError, StopIteration):
            return None

    def trains(self, job: str) -> bool:
        """Return whether a job is in the midst of its steps, with one more than when all were well after the
        last kill: what dies four times without a step is given up."""
        update = self.update(job)
        assert update is None or update.state not in ("failed", "finished"), (update.state, update.reason)
        further = update is not None and update.step > self.steps.get(job, -1)
        return further and update.state == "training"

    def finished(self, tmp_path: Path) -> None:
        """Wait for the jobs' ends; each has the bits of an undisturbed run, and each of its steps once."""
        facts = Facts(self.local.folder / COORDINATOR / "journal.sqlite")
        cases = [self.case, *(self.brief for _ in self.jobs[1:])]
        results = {case.training.steps: known(case) for case in (self.case, self.brief)}
        for job, case in zip(self.jobs, cases, strict=True):
            expected = results[case.training.steps]
            self.local.client.wait(job)
            self.local.client.export(job, tmp_path / job)
            found = load_file(tmp_path / job)
            trained = [name for name in expected if name in found]
            assert trained
            assert [name for name in trained if not torch.equal(found[name], expected[name])] == [], job
        facts.look()
        for job, case in zip(self.jobs, cases, strict=True):
            done = commits(facts.of(job))
            again = [step for step, times in Counter(done).items() if times > 1]
            plans = [fact for fact in facts.of(job) if isinstance(fact, PlanAdopted | Reconfigured)]
            reasons = [
                (fact.step, fact.reason) if isinstance(fact, Reconfigured) else "planned" for fact in plans
            ]
            assert done == list(range(case.training.steps)), (job, again, reasons)

    # ------------------------------------------------------------ kills

    def processes(self, victim: str) -> list[psutil.Process]:
        """Return the processes of a kind that may be killed: the coordinator's, or of the middle stage."""
        if victim == COMPUTE:
            return self.member(self.holder(1)).computing()
        process = self.member(COORDINATOR if victim == COORDINATOR else self.holder(1)).process()
        return [process] if process is not None else []

    def holder(self, stage: int) -> str:
        """Return the name of the worker that holds a stage of the newest job, else of any worker."""
        found = {w.stage: w.name for w in self.local.client.status().workers if w.job == self.jobs[-1]}
        return found.get(stage, self.local.names[stage])

    def kill_at(self, point: str, how: str, victim: str) -> None:
        """Have the victim killed at a point, and the fleet mended. It is who comes there, where that is a
        process of its kind, else the one of the middle stage."""
        passed = self.folder / PASSED / point
        passed.unlink(missing_ok=True)
        own = point.startswith(f"{ROLES[victim]}.")
        self.wait(lambda: own or bool(self.processes(victim)))  # a stage may just be changing hands
        listed = ["0"] if own else [str(process.pid) for process in self.processes(victim)]
        before = {
            name: (self.member(name).process(), self.member(name).computing()) for name in self.local.names
        }
        made = self.folder / f"{point}.new"
        made.write_text(" ".join(listed))
        made.rename(self.folder / point)
        provoked = self.provoke(how)
        self.wait(lambda: passed.exists() or (how != SUBMIT and self.over()))
        ends = [(u.state, u.step, u.reason) for job in self.jobs if (u := self.update(job)) is not None]
        assert passed.exists(), f"the job ended before {point}: {ends}"
        if victim == COMPUTE:
            self.wait(lambda: bool(bereft(before)))
            self.deaths.update(bereft(before))
        self.mend()
        if provoked is not None:
            provoked.join()
        for job in self.jobs:  # none of these steps was committed after the kill, for all that is known
            if (now := self.update(job)) is not None:
                self.steps[job] = now.step

    @property
    def names(self) -> tuple[str, ...]:
        return (COORDINATOR, *self.local.names)

    def provoke(self, how: str) -> threading.Thread | None:
        """Bring a point about."""
        if how == LOSS:
            self.end(self.holder(0))
        elif how == NEWCOMER:
            self.local.join(f"host{len(self.local.names)}")
        elif how == RESTART:
            self.end(COORDINATOR)
            self.local.start_again(COORDINATOR)
        elif how == SUBMIT:
            (self.folder / PACE).unlink(missing_ok=True)  # it waits for the job before
            return self.submit(self.brief)
        return None

    def end(self, name: str) -> None:
        process = self.member(name).process()
        assert process is not None, name
        kill([process])
        # Its last threads may hold the folder after it has become a zombie: so long it looks alive.
        self.wait(lambda: name in self.local.ended())

    def mend(self) -> None:
        """Start again whoever is gone, and wait until all are well; steps are few meanwhile."""
        pace = self.folder / PACE
        usual = pace.read_text() if pace.exists() else ""
        if usual:
            pace.write_text(str(MENDING_PACE_S))
        for name in self.local.names:
            if self.deaths[name] >= DEATHS:  # it would refuse the job for good
                self.deaths[name] = 0
                self.end(name)
        self.wait(self.well)
        if usual:
            pace.write_text(usual)

    def well(self) -> bool:
        """Return whether all are there and fit to be planned with; starts again who is not there."""
        for name in self.names:
            if name in self.local.ended():
                self.local.start_again(name)
        try:
            workers = self.local.client.status().workers
        except AtollError:
            return False
        fit = [
            w for w in workers if w.state in ("pool", "assigned") and not w.reason.startswith("quarantined")
        ]
        # Who was killed just now may not be missed yet.
        return len(fit) >= len(self.local.names) and all(self.member(n).process() for n in self.names)


@contextmanager
def fleet(
    case: Case,
    brief: Case,
    starts: Sequence[int],
    workers: int,
    folder: Path,
    pace_s: float,
    *,
    steady: bool = False,
    owners: Sequence[int] = (),
) -> Iterator[Wrapped]:
    """A coordinator and ``workers`` of which the last are backups; jobs are cut at ``starts``. ``steady``:
    nobody takes another's place because it is faster; ``owners``: of the pieces, where a worker has several.
    """
    keep = folder / "fleet"
    for each in (folder / PASSED, keep):
        each.mkdir(parents=True)
    (folder / PACE).write_text(str(pace_s))
    if steady:
        (folder / STEADY).touch()

    def start(host: str, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        flag, *words = arguments
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # by which they find the tests
        return start_here(host, [flag, "tests.e2e.points", str(folder), *words], env=environment, **streams)

    options = ["--threads", "1", "--sandbox", "off", "--log-json"]
    cut = cut_at(starts, owners)
    prepared = {one.training.steps: prepare(as_job(one), partitioner=cut) for one in (case, brief)}
    with LocalFleet(workers, options, keep=keep, start=start, in_order=False) as local:
        yield Wrapped(local, folder, case, brief, prepared)
