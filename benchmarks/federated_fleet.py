"""A coordinator and data owners as real processes on loopback: TLS, tokens and the journal on.

Everything is started by the commands a user types. ``kill`` is kill -9; a coordinator that is started
again takes the ports it had.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from atoll.errors import AtollError, JobFailed
from benchmarks.waits import came_about
from coordinator.client.client import Client, connect
from coordinator.messages.facts import RoundClosed, from_record
from coordinator.storage.journal import StoredJournal
from worker.data.policy import OPEN, Policy
from worker.data.registry import add_dataset

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

ROOT = Path(__file__).resolve().parent.parent
COORDINATOR = "coordinator"
EXPERIMENT = replace(OPEN, statistics=10**9)


class FederatedFleet:
    """One worker for each of ``clients``, which holds its arrays as data set ``data``.

    ``parted(state_dir, worker)`` may part them among a population. ``options``: of `atoll-worker join`.
    ``policy``: of the data set. ``sites``: of workers that stand in one.
    """

    def __init__(
        self,
        clients: Sequence[Arrays],
        data: str = "digits",
        threads: int = 1,
        parted: Callable[[Path, str], object] = lambda state_dir, worker: None,
        options: Sequence[str] = (),
        policy: Policy = EXPERIMENT,
        sites: Mapping[str, str] | None = None,
    ) -> None:
        self.sites = sites or {}
        self.clients, self.data, self.threads, self.policy = clients, data, threads, policy
        self._parted, self._options = parted, options
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._temporary = tempfile.TemporaryDirectory(prefix="atoll-federation-")
        self.folder = Path(self._temporary.name)
        self.entry_port, self.work_port = _free_ports(2)
        self.token = ""

    def __enter__(self) -> FederatedFleet:
        try:
            self.serve()
            self.token = self.client.create_token("fleet").token
            for n, arrays in enumerate(self.clients):
                self.register(f"worker{n}", arrays)
                self.join(f"worker{n}")
            self.wait_until(lambda: len(self.states("pool")) == len(self.clients), "the workers to join")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._temporary.cleanup()

    # ------------------------------------------------------------ processes

    def serve(self) -> None:
        """Start the coordinator, at first or again."""
        ports = ["--listen", f"127.0.0.1:{self.entry_port}", "--work-port", str(self.work_port)]
        self._spawn(COORDINATOR, "coordinator.cli", "serve", *ports, *self._state(COORDINATOR))
        self.wait_until(self._answers, "the coordinator to answer")

    def register(self, worker: str, arrays: Arrays) -> None:
        """Keep ``arrays`` as a data set of this worker, as `atoll-worker data add` does with its policy."""
        path = self.folder / f"{worker}.safetensors"
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
        add_dataset(self.folder / worker, self.data, path, [], policy=self.policy)
        self._parted(self.folder / worker, worker)

    def join(self, worker: str) -> None:
        """Start a worker."""
        address = f"127.0.0.1:{self.entry_port}"
        options = ["--token", self.token, "--name", worker, "--threads", str(self.threads)]
        options += ["--device", "cpu", "--listen", "127.0.0.1:0", *self._state(worker), *self._options]
        options += ["--site", self.sites[worker]] if worker in self.sites else []
        self._spawn(worker, "worker.cli", "join", address, *options)

    def kill(self, name: str) -> None:
        """kill -9, and nobody cleans up."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def log(self, name: str) -> str:
        """The end of a process's output."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    # ------------------------------------------------------------ asking

    def states(self, *wanted: str) -> dict[str, str]:
        """Name and state of the workers that are in one of these states."""
        with contextlib.suppress(AtollError):
            return {w.name: w.state for w in self.client.status().workers if w.state in wanted}
        return {}

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Poll, for what tests have no event for; JobFailed when a process has ended meanwhile."""
        if not came_about(done, self.processes.values()):
            raise JobFailed(f"no more waiting for {what}\n{self.log(COORDINATOR)}\n{self.log('worker0')}")

    def watch(self, job: str) -> Iterator[Any]:
        """Updates of a job until it ends; JobFailed with the logs where it does not finish."""
        last = None
        for last in self.client.watch(job):
            yield last
        if last is None or last.state != "finished":
            reason = "" if last is None else f"{last.state}: {last.reason}"
            raise JobFailed(f"{job} {reason}\n{self.log(COORDINATOR)}\n{self.log('worker0')}")

    def closed_rounds(self, job: str) -> list[RoundClosed]:
        """Closed rounds of a job, from the coordinator's journal."""
        with contextlib.closing(
            StoredJournal(f"sqlite:///{self.folder / COORDINATOR / 'journal.sqlite'}")
        ) as journal:
            facts = map(from_record, journal.replay())
            return [fact for fact in facts if isinstance(fact, RoundClosed) and fact.job == job]

    def _answers(self) -> bool:
        with contextlib.suppress(AtollError):
            self.client: Client = connect(state_dir=self.folder / COORDINATOR)
            return True
        return False

    def _state(self, name: str) -> list[str]:
        return ["--state-dir", str(self.folder / name)]

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(self.threads)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
            )


def _free_ports(count: int) -> list[int]:
    """Draw ports that nobody listens on, below those that systems give out: they stay free until they are
    taken, and while a coordinator is started again."""
    found: set[int] = set()
    while len(found) < count:
        port = 10_000 + secrets.randbelow(22_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)
