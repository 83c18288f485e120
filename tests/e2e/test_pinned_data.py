"""A data owner trains a model with others' machines, and its rows stay on its own: real workers over TLS."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll import Job, Optimizer, OptimizerName, Registered, Rows, TrainingSpec
from atoll.errors import UsageError
from benchmarks.federated_fleet import COORDINATOR, FederatedFleet
from coordinator.client.prepare import prepare
from tests.e2e.test_federated import finished, weights
from worker.cli import jobs
from worker.data.departures import read_departures
from worker.data.policy import UNSTATED

BATCH, LENGTH, VOCABULARY, WIDTH, ROWS = 4, 24, 512, 32, 32
PAGE = os.sysconf("SC_PAGE_SIZE")
OWNER, HELPERS = "worker0", ("worker1", "worker2")


def rows() -> dict[str, Any]:
    """Rows that nothing else on a machine looks like."""
    draw = np.random.default_rng(11)
    return {
        "text": draw.integers(0, VOCABULARY, (ROWS, LENGTH)),
        "next": draw.integers(0, VOCABULARY, (ROWS, LENGTH)),
    }


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def job(name: str, *, pinned: bool, steps: int = 6) -> Job:
    data = rows()
    here = Rows({"tokens": data["text"], "labels": data["next"]}, seed=5)
    there = Registered("diary", {"tokens": "text", "labels": "next"}, pin="owner", seed=5)
    example = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return Job(
        Model(),
        {"tokens": example, "labels": example.clone()},
        there if pinned else here,
        TrainingSpec(steps, 4, seed=3, optimizer=Optimizer(OptimizerName.SGD, lr=0.1)),
        name=name,
    )


class OwnerAndHelpers(FederatedFleet):
    """A data owner who set no policy, and two workers without data."""

    def __init__(self) -> None:
        super().__init__([rows()], "diary", policy=UNSTATED)

    def __enter__(self) -> OwnerAndHelpers:
        super().__enter__()
        for name in HELPERS:
            self.join(name)
        self.wait_until(lambda: len(self.states("pool")) == 1 + len(HELPERS), "the helpers to join")
        return self


@pytest.fixture(scope="module")
def fleet() -> Iterator[OwnerAndHelpers]:
    with OwnerAndHelpers() as started:
        yield started


@pytest.fixture(scope="module")
def cut() -> str:
    """Embedding and the loss with its head for the owner, what is between for two helpers."""
    dag = prepare(job("cut", pinned=False)).graphs.dag
    paths = [node.module_path for node in dag.ops]
    starts = [next(at for at, path in enumerate(paths) if path.startswith(f"blocks.{n}")) for n in (0, 2)]
    starts.append(next(at for at, path in enumerate(paths) if path == "head"))
    allowed = dag.cuttable()
    assert all(start in allowed for start in starts)
    return f"cut:{','.join(map(str, starts))}:0,1,2,0"


def submitted(fleet: FederatedFleet, what: Job, cut: str) -> str:
    return fleet.client.submit(prepare(what, partitioner=cut, standbys=0)).job


@pytest.mark.slow
def test_rows_stay_with_their_owner(fleet: OwnerAndHelpers, cut: str) -> None:
    name = submitted(fleet, job("pinned", pinned=True, steps=400), cut)
    waiting = next(update for update in fleet.client.watch(name) if "has not accepted" in update.reason)
    assert waiting.step == 0
    facts = dict(jobs_of(fleet, name).facts)
    assert facts["data set"].startswith("diary, 32 samples")
    assert "SECURITY.md" in facts["what that tells"]
    jobs.accept(name, fleet.folder / OWNER)
    for update in fleet.client.watch(name):
        if update.step >= 20:  # every row has been used
            break
    planted = [row.tobytes() for field in rows().values() for row in field]
    found = {who: seen(planted, fleet.processes[who].pid) for who in fleet.processes}
    assert found[OWNER] > 0  # who looks finds them where they are
    assert {who: found[who] for who in (COORDINATOR, *HELPERS)} == dict.fromkeys((COORDINATOR, *HELPERS), 0)
    assert planted_in_files(planted, fleet) == {OWNER}
    fleet.client.cancel(name)


@pytest.mark.slow  # in one process: {coordinator/pipeline,worker/data}/test_pinned.py
def test_the_same_bits_as_without_pins(fleet: OwnerAndHelpers, cut: str) -> None:
    pinned = submitted(fleet, job("kept", pinned=True), cut)
    fleet.wait_until(lambda: asked(fleet, pinned), "the job to ask for its data")
    jobs.accept(pinned, fleet.folder / OWNER)
    last = finished(fleet, pinned)
    own = {stage.worker for stage in last.stages}
    assert len(own) == 3
    served = submitted(fleet, job("served", pinned=False), cut)
    assert finished(fleet, served).loss == last.loss
    kept, plain = weights(fleet, pinned), weights(fleet, served)
    assert kept.keys() == plain.keys()
    assert all(torch.equal(kept[name], plain[name]) for name in kept)
    assert any(line["job"] == pinned for line in read_departures(fleet.folder / OWNER))


@pytest.mark.slow
def test_a_refusal_ends_the_job_and_says_whose(fleet: OwnerAndHelpers, cut: str) -> None:
    name = submitted(fleet, job("refused", pinned=True), cut)
    fleet.wait_until(lambda: asked(fleet, name), "the job to ask for its data")
    jobs.refuse(name, "not this one", fleet.folder / OWNER)
    last = list(fleet.client.watch(name))[-1]
    assert last.state == "failed"
    assert "not this one" in last.reason
    assert OWNER in last.reason


@pytest.mark.slow
def test_an_owner_that_is_lost_is_waited_for_and_nobody_takes_its_place(
    fleet: OwnerAndHelpers, cut: str
) -> None:
    name = submitted(fleet, job("returns", pinned=True, steps=60), cut)
    fleet.wait_until(lambda: asked(fleet, name), "the job to ask for its data")
    jobs.accept(name, fleet.folder / OWNER)
    for update in fleet.client.watch(name):
        if update.step >= 10:
            break
    fleet.kill(OWNER)
    for update in fleet.client.watch(name):
        if update.state in ("paused", "queued") and "has the job's data" in update.reason:
            break
    fleet.join(OWNER)
    last = finished(fleet, name)
    assert last.step == 60


@pytest.mark.slow  # in one process: tests/coordinator/federated/test_datasets.py
def test_data_that_nobody_has_are_named_at_submit(fleet: OwnerAndHelpers, cut: str) -> None:
    fields = {"tokens": "text", "labels": "next"}
    for data, why in (
        (
            Registered("letters", fields, pin="owner"),
            "no worker of the pool has registered .* 'letters'",
        ),
        (Registered("diary", fields, pin="worker1"), "no worker named 'worker1' has registered"),
        (Registered("diary", {**fields, "labels": "last"}, pin="owner"), "diary has no field 'last'"),
    ):
        with pytest.raises(UsageError, match=why):
            submitted(fleet, replace(job("other", pinned=True), data=data), cut)


def asked(fleet: FederatedFleet, name: str) -> bool:
    return jobs_of(fleet, name) is not None


def jobs_of(fleet: FederatedFleet, name: str) -> Any:
    from worker.data.consent import ConsentStore

    known = ConsentStore(fleet.folder / OWNER).known()
    return next((request for request in known if request.job == name), None)


def seen(planted: list[bytes], pid: int) -> int:
    """How many of these rows are in the memory of a process or of what it started."""
    memory = b"".join(map(memory_of, family(pid)))
    return sum(row in memory for row in planted)


def family(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(one): int(parent) for one, parent in (line.split() for line in listed.splitlines())}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def memory_of(pid: int) -> bytes:
    """All of a process's memory that it may write or share and has touched: heap, stacks, arenas, buffers."""
    parts = []
    with (
        open(f"/proc/{pid}/maps") as maps,
        open(f"/proc/{pid}/pagemap", "rb", 0) as pages,
        open(f"/proc/{pid}/mem", "rb", 0) as memory,
    ):
        for line in maps:
            place, rights, *_ = line.split()
            start, end = (int(number, 16) for number in place.split("-"))
            if "w" in rights or "s" in rights:
                pages.seek(start // PAGE * 8)
                known = np.frombuffer(pages.read((end - start) // PAGE * 8), dtype=np.uint64)
                parts += [
                    pages_of(memory, start, run) for run in runs(np.flatnonzero(known >> np.uint64(63)))
                ]
    return b"".join(parts)


def runs(there: Any) -> list[Any]:
    """Pages that follow one another."""
    return np.split(there, np.flatnonzero(np.diff(there) > 1) + 1) if len(there) else []


def pages_of(memory: IO[bytes], start: int, run: Any) -> bytes:
    memory.seek(start + int(run[0]) * PAGE)
    try:
        return memory.read(len(run) * PAGE)
    except OSError:  # gone meanwhile, or a device's
        return b""


def planted_in_files(planted: list[bytes], fleet: FederatedFleet) -> set[str]:
    """Whose folders hold a row: journal, blobs, checkpoints, logs."""
    return {
        who
        for who in fleet.processes
        for folder, _, names in os.walk(fleet.folder / who)
        for name in names
        if any(row in contents(os.path.join(folder, name)) for row in planted[:8])
    }


def contents(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
