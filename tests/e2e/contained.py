"""A fleet whose first worker's compute process is hostile, in a sandbox or without one."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from benchmarks.federated_fleet import FederatedFleet
from benchmarks.oracle import Case, Run
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from benchmarks.waits import came_about
from coordinator.client.prepare import prepare
from worker.data.registry import add_dataset, dataset_folder
from worker.federated.kept.folders import job_folder, make_job_folder, noise_key
from worker.hosting.contained.sandbox import probe

if TYPE_CHECKING:
    from coordinator.client.client import Client

WAYS = ("contained", "bare")
SECRET = b"nobody's business"


def need_sandbox(way: str) -> None:
    """Skip, saying why, where there is none."""
    if way == "contained" and not probe("cpu"):
        pytest.skip(f"no sandbox here: {probe('cpu').why_not}")


SHOWS_WHY = ("paused", "loading", "failed")
"""States of a job that say what interrupted it: it waits, others take over, or it has ended."""


class HostileFleet(LoopbackFleet):
    """``worker0`` is hostile, ``worker1`` and ``worker2`` are not."""

    def join_command(self, name: str) -> list[str]:
        module, *more = super().join_command(name)
        return ["tests.e2e.hostile_worker" if name == "worker0" else module, *more]

    @property
    def state_of_hostile(self) -> Path:
        return self.state.parent / "worker0"

    def whole_log(self, name: str) -> str:
        """All that a daemon has logged."""
        return (self.state.parent / f"{name}.log").read_text(errors="replace")

    def daemons(self) -> list[int]:
        """Processes of the workers, the coordinator's left out; all of them live."""
        assert all(process.poll() is None for process in self._processes), self.log("worker0")
        return super().daemons()

    def pooled(self) -> None:
        """Wait until plans may use all workers: one whose process delivered nothing is quarantined."""

        def usable() -> bool:
            workers = self.client.status().workers
            return all(w.state == "pool" and not w.reason.startswith("quarantined") for w in workers)

        assert came_about(usable, self._processes), self.log("worker0")

    def logged(self, name: str, pattern: str, begun: int) -> None:
        """Wait until a daemon has logged this after so many characters."""
        found = re.compile(pattern)
        assert came_about(lambda: found.search(self.whole_log(name)[begun:]) is not None, self._processes)


@dataclass
class Attacked:
    """A job that was attacked: how it ended, the reasons of its interruptions, and its result."""

    state: str
    reasons: str
    run: Run | None


def submitted(fleet: HostileFleet, attack: str, case: Case) -> str:
    """Have ``case`` trained in two stages, the first on the hostile worker, under the attack's name."""
    cuts = case.dag.cuttable()
    job = as_job(replace(case, name=attack))
    return fleet.client.submit(prepare(job, partitioner=cut_at((0, cuts[len(cuts) // 2])))).job


def attacked(fleet: HostileFleet, attack: str, case: Case) -> Attacked:
    """Wait for the end of such a job."""
    job = submitted(fleet, attack, case)
    losses: dict[int, float] = {}
    last: Any = None
    for last in fleet.client.watch(job):
        losses.update({p.step: p.value for p in last.metrics if p.name == "loss"})
    run = fleet.result(job, losses) if last.state == "finished" else None
    return Attacked(last.state, interruptions(fleet.client, job), run)


def interruptions(client: Client, job: str) -> str:
    """Why a job was interrupted, and ended, as its owner reads it."""
    states = [json.loads(line.fields_json) for line in client.logs(job) if line.event == "job.state"]
    return "\n".join(state["reason"] for state in states if state["state"] in SHOWS_WHY)


def assert_no_torch(daemons: Iterable[int]) -> None:
    """These processes live and map nothing of torch."""
    for daemon in daemons:
        maps = Path(f"/proc/{daemon}/maps").read_text()
        assert "libpython" in maps or "python" in maps
        found = sorted({line.split()[-1] for line in maps.splitlines() if "torch" in line.lower()})
        assert not found, found[:5]


class HostileFederation(FederatedFleet):
    """The same of two data owners; ``worker0`` has a second data set, and another job's folder."""

    def __init__(self, clients: Sequence[Mapping[str, Any]], way: str) -> None:
        super().__init__(clients)
        self.sandbox = "require" if way == "contained" else "off"

    def join(self, worker: str) -> None:
        told = self._furnished() if worker == "worker0" else {}
        with patch.dict(os.environ, HOSTILE=json.dumps(told)):
            super().join(worker)

    def _furnished(self) -> dict[str, Any]:
        """Put what is nobody's business into the hostile worker's folder."""
        state = self.folder / "worker0"
        add_dataset(state, "other", self.folder / "worker0.safetensors", [])
        noise_key(state)
        other = make_job_folder(state, "other-1")
        (other / "kept").write_bytes(SECRET)
        files = {
            "own data": dataset_folder(state, self.data),
            "other data": dataset_folder(state, "other"),
            "own folder": job_folder(state, "looks-1"),
            "other folder": other,
            "secret": state / "federated" / "secret",
            "key": state / "identity" / "key.pem",
        }
        return {"files": {name: str(path) for name, path in files.items()}}

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        if module == "worker.cli":
            arguments += ("--sandbox", self.sandbox)
        module = "tests.e2e.hostile_worker" if name == "worker0" else module
        super()._spawn(name, module, *arguments)


@contextmanager
def hostile_fleet(way: str, *options: str) -> Iterator[HostileFleet]:
    need_sandbox(way)
    sandbox = "require" if way == "contained" else "off"
    with socket.create_server(("127.0.0.1", 0)) as server:
        fleet = HostileFleet(3, options=["--sandbox", sandbox, "--memory", "600MiB", *options])
        secret = fleet.state.parent / "secret"
        secret.write_bytes(SECRET)
        told = {
            "secret": str(secret),
            "key": str(fleet.state_of_hostile / "identity" / "key.pem"),
            "port": server.getsockname()[1],
        }
        with patch.dict(os.environ, HOSTILE=json.dumps(told)), fleet:
            yield fleet
