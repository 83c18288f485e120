"""Neighbours that are lost together, and copies on backups' disks, with real processes: no bit is lost."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.oracle import Case, built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare
from coordinator.messages import events as ev
from coordinator.messages.facts import PlanAdopted, StepCommitted, from_record
from coordinator.storage.journal import StoredJournal
from protos import atoll_control_pb2 as pb
from tests.coordinator.serving import Hold, Owner, fleet, start
from tests.e2e.test_reconfigured import FIRST, LAST, MIDDLE, TRAINING, disturb, logged, thirds
from tests.patience import eventually

pytestmark = pytest.mark.slow

Due = tuple[Callable[[pb.JobUpdate], bool], Sequence[int]]
"""Which stages are killed, and once what is seen."""


def trained(fleet: LoopbackFleet, case: Case, strikes: Sequence[Due], folder: Path) -> None:
    """Train while stages are killed, and compare with one machine: each step is committed once, under the
    plan that was adopted first."""
    due, holders = list(strikes), list[str]()
    # A standby, or who takes the place of another for being faster, would not fetch anything.
    prepared = prepare(as_job(case), partitioner=cut_at(thirds(case)), standbys=0)
    reply = fleet.client.submit(prepared)
    for update in fleet.client.watch(reply.job):
        holders = [stage.workers[0] for stage in update.plan.stages] or holders
        if due and update.step > 20 and due[0][0](update):
            for stage in due.pop(0)[1]:
                disturb(fleet, holders[stage], signal.SIGKILL)
    assert due == []
    assert update.state == "finished", update.reason
    path = folder / "model.safetensors"
    fleet.client.export(reply.job, path)
    with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
        facts = [from_record(record) for record in journal.replay()]
    steps = case.training.steps
    assert [fact.step for fact in facts if isinstance(fact, StepCommitted)] == list(range(steps))
    assert sum(isinstance(fact, PlanAdopted) for fact in facts) == 1
    found, expected = load_file(path), run_local(case, (0,)).state
    trained = [name for name in expected if name in found]
    assert trained
    for name in trained:
        assert torch.equal(found[name], expected[name]["value"]), name


def at_once(update: pb.JobUpdate) -> bool:
    return True


def while_loading(update: pb.JobUpdate) -> bool:
    return update.plan_version > 1


@pytest.mark.parametrize(
    "strikes",
    [
        [(at_once, (FIRST, MIDDLE))],
        [(at_once, (MIDDLE, LAST))],
        [(at_once, (MIDDLE,)), (while_loading, (FIRST,))],
    ],
    ids=["first and middle", "middle and last", "one after the other"],
)
def test_neighbours_that_are_lost_repeat_together(tmp_path: Path, strikes: Sequence[Due]) -> None:
    torch.set_num_threads(1)
    with LoopbackFleet(5, options=("--log-json",)) as fleet:
        trained(fleet, built_in("branches", TRAINING, 0.1), strikes, tmp_path)
        assert len(logged(fleet, "stage.replayed")) >= 2


def test_an_idle_worker_keeps_a_copy_until_the_job_is_over(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = start(stack, tmp_path / "coordinator")
        hold = Hold(stack, 1)
        fleet(stack, running, 1, ready=hold, memory_bytes=1 << 30)
        owner = Owner(running)
        job = owner.submit(steps=3)
        owner.watch(job, lambda u: u.state == "training")
        address = f"127.0.0.1:{running.started.entry_port}"
        command = [
            sys.executable, "-m", "worker.cli", "join", address, "--token", running.started.join_token,
            "--name", "keeper", "--device", "cpu", "--threads", "1", "--listen", "127.0.0.1:0",
            "--state-dir", str(tmp_path / "keeper"),
        ]  # fmt: skip
        keeper = subprocess.Popen(command)
        stack.callback(keeper.wait)
        stack.callback(keeper.terminate)

        def kept() -> list[ev.CopyHeld]:
            return running.call(
                lambda server: [
                    copy
                    for worker in server.shell.scheduler.roster.workers.values()
                    for copy in worker.copies.values()
                ]
            )

        eventually(kept)
        (copy,) = kept()
        files = list((tmp_path / "keeper" / "blobs").iterdir())
        assert sum(file.stat().st_size for file in files) == copy.n_bytes
        assert all(hashlib.sha256(file.read_bytes()).hexdigest() == file.name for file in files)
        shown = owner.job(job).stages[0].copy
        assert shown.startswith("on the disk of")
        hold.release()
        owner.watch(job)
        eventually(lambda: not kept())


@pytest.mark.parametrize("lenders", [2, 1])
def test_a_stage_is_taken_over_from_a_copy_and_from_a_peers(tmp_path: Path, lenders: int) -> None:
    """Of two that take over, where one lends no disk it fetches its stage from the other one."""
    torch.set_num_threads(1)
    case = built_in("branches", replace(TRAINING, steps=3000), 0.1)
    own: Mapping[int, Sequence[str]] = {4: ("--copy-bytes", "0")} if lenders == 1 else {}

    def kept(update: pb.JobUpdate) -> bool:
        return all(stage.copy.startswith("on the disk of") for stage in update.stages)

    with LoopbackFleet(5, options=("--log-json",), own=own) as fleet:
        trained(fleet, case, [(kept, (FIRST, MIDDLE))], tmp_path)
        loaded = [event for event in logged(fleet, "stage.loaded") if int(str(event["version"])) > 1]
        fetched = sorted(int(str(event["fetched_bytes"])) > 0 for event in loaded[-2:])
        assert fetched == [False, lenders == 1]
        # Where both keep copies, one may have taken its own from the other before.
        assert lenders == 2 or logged(fleet, "copy.fetched")


def test_a_copy_is_brought_up_to_date_by_what_changed_and_is_taken_over_bit_for_bit(tmp_path: Path) -> None:
    """Workers send deltas up, and an idle one that keeps a copy fetches them before it takes a stage over."""
    torch.set_num_threads(1)
    training = replace(TRAINING, steps=400, checkpoint_every=20)
    case = built_in("branches", training, 0.1)

    def made(update: pb.JobUpdate) -> bool:
        return any(int(str(event["bytes"])) > 0 for event in logged(fleet, "blob.made"))

    with LoopbackFleet(4, options=("--log-json",)) as fleet:
        trained(fleet, case, [(made, (MIDDLE,))], tmp_path)
        events = logged(fleet, "blob.made")
        assert sum(int(str(event["bytes"])) for event in events) < sum(
            int(str(event["of"])) for event in events
        )
