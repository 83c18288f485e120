"""Jobs that have ended are forgotten by wish: what no other needs of them goes, for good."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import AccessDenied, StorageError, UsageError
from coordinator.messages import events as ev
from coordinator.messages.facts import CheckpointStored, JobForgotten, Ledger
from coordinator.messages.jobs import Phase
from coordinator.server import Running
from protos import atoll_control_pb2 as pb
from tests.coordinator.federated.test_driver import Fleet, spec
from tests.coordinator.messages.test_encoding import FACTS
from tests.coordinator.services.access.test_owners import another
from tests.coordinator.serving import Hold, Owner, fleet, refused, start
from tests.patience import eventually


def forget(owner: Owner, *jobs: str) -> None:
    owner.call("ForgetJobs", pb.ForgetJobsRequest(jobs=jobs))


def known(owner: Owner) -> list[str]:
    return [update.job for update in owner.call("Status", pb.StatusRequest()).jobs]


def blobs_of(running: Running, job: str) -> set[str]:
    return set(running.call(lambda server: server.ledger.jobs[job].blobs))


def here(running: Running, names: set[str]) -> set[str]:
    return set(running.call(lambda server: set(filter(server.blobs.has, names))))


def test_what_no_other_job_needs_goes_and_stays_away(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    fleet(stack, running, 2)
    owner = Owner(running)
    job = owner.submit(steps=3)
    assert owner.watch(job).state == "finished"
    other = owner.submit(steps=4)
    assert owner.watch(other).state == "finished"
    assert (tmp_path / "runs" / job / "metrics.csv").exists()
    mine, shared = blobs_of(running, job), blobs_of(running, job) & blobs_of(running, other)
    assert mine > shared > set()
    assert here(running, mine) == mine
    forget(owner, job)
    assert known(owner) == [other]
    for call in (lambda: owner.watch(job), lambda: owner.call("Result", pb.ResultRequest(job=job))):
        error = refused(call)
        assert isinstance(error, UsageError)
        assert f"no job '{job}'" in str(error)
    eventually(lambda: here(running, mine) == shared)
    assert not (tmp_path / "runs" / job).exists()
    assert owner.job(other).state == "finished"

    running.stop()
    again = start(stack, tmp_path)
    owner = Owner(again)
    assert known(owner) == [other]
    assert here(again, mine) == shared
    assert owner.submit() not in (job, other), "who was away may still hold what had that name"


def test_of_several_none_is_forgotten_where_one_has_not_ended(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    fleet(stack, running, 1, ready=Hold(stack, 1), memory_bytes=1 << 30)
    owner = Owner(running)
    runs, waits = owner.submit(steps=1000), owner.submit()
    owner.watch(runs, lambda u: u.state == "training")
    owner.call("Cancel", pb.JobRequest(job=waits))
    for jobs, words in (
        ((waits, runs), f"{runs} has not ended; stop it first: `atoll cancel {runs}`"),
        ((waits, "chain-9"), "no job 'chain-9'"),
    ):
        error = refused(lambda jobs=jobs: forget(owner, *jobs))  # type: ignore[misc]
        assert isinstance(error, UsageError)
        assert words in str(error)
    assert sorted(known(owner)) == sorted([runs, waits])
    forget(owner, waits, waits)
    assert known(owner) == [runs]


def test_who_may_not_cancel_a_job_cannot_forget_it(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    owner = Owner(running)
    job = owner.submit()
    owner.call("Cancel", pb.JobRequest(job=job))
    with pytest.raises(AccessDenied, match="this needs submit"):
        another(stack, running, "press", "watch").forget_jobs([job])
    with pytest.raises(AccessDenied, match=f"{job} is a job of owner, and research is not"):
        another(stack, running, "research", "submit").forget_jobs([job])
    another(stack, running, "operator", "administer").forget_jobs([job])
    assert known(owner) == []


def test_blobs_stay_until_the_journal_says_that_the_job_is_forgotten(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    owner = Owner(running)
    job = owner.submit()
    owner.call("Cancel", pb.JobRequest(job=job))
    mine, plain = blobs_of(running, job), running.call(lambda server: server.journal.append)

    def full(records: list[Any]) -> None:
        raise StorageError("the journal refuses 1 events: database or disk is full; free some disk space")

    running.call(lambda server: setattr(server.journal, "append", full))
    assert isinstance(refused(lambda: forget(owner, job)), StorageError)
    sweeps = running.call(lambda server: set(server.shell._tasks))
    eventually(lambda: all(task.done() for task in sweeps))
    assert here(running, mine) == mine
    running.call(lambda server: setattr(server.journal, "append", plain))
    eventually(lambda: not here(running, mine))


def test_a_federated_job_is_forgotten_once_it_has_ended() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=spec())
    world.loads("w1", "w2")
    world.handle(ev.ForgetAsked("job-1"))
    assert world.state().phase is Phase.TRAINING
    world.handle(ev.CancelAsked("job-1"))
    world.handle(ev.ForgetAsked("job-1"))
    world.handle(ev.ForgetAsked("job-1"))
    assert not world.scheduler.jobs
    assert not world.scheduler.ledger.jobs
    assert world.scheduler.driver_of("job-1") is None
    assert world.scheduler.ledger.forgotten == {"job-1"}
    world.answers("w1", "w2", at_round=0)  # late
    world.wait(1.0)


def test_a_ledger_lets_go_of_what_refers_to_a_forgotten_job() -> None:
    ledger = Ledger()
    for fact in (*FACTS, CheckpointStored("j", 12, {"w0": "cd" * 32})):
        ledger.apply(fact)
    before = ledger.copy()
    ledger.apply(JobForgotten("j"))
    assert "j" not in ledger.jobs
    assert ledger.submissions == {}
    assert {"f", "j"} == ledger.forgotten
    assert "cd" * 32 in ledger.take_superseded()
    assert before.forgotten == {"f"}
    assert before.submissions == {"s": "j"}
