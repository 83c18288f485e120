"""A coordinator and workers as real processes on loopback, for the oracle over real links.

Everything is started by the commands a user types; nothing is faster or looser than in life.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.torch import load_file

from atoll.data import Rows
from atoll.errors import AtollError, JobFailed
from atoll.job import Job
from benchmarks.oracle import Case, Run
from benchmarks.waits import came_about
from coordinator.client.client import Client, connect
from coordinator.client.prepare import Prepared, prepare
from coordinator.planning.baselines import GIVEN_CUT
from coordinator.planning.peers.replicas import BETWEEN, SHARE
from protos.convert import from_proto

if TYPE_CHECKING:
    from types import TracebackType

    from atoll.plan import Plan, Replica

ROOT = Path(__file__).resolve().parent.parent


class LoopbackFleet:
    """``workers`` worker daemons and a coordinator, TLS and tokens on.

    ``options`` go to each worker, ``own[n]`` to worker n alone. Of an option given twice the later
    counts, so both may name another ``--device`` than the CPU.
    """

    def __init__(
        self,
        workers: int,
        threads: int = 1,
        options: Sequence[str] = (),
        own: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.options = tuple(options)
        self.own = dict(own or {})
        self.workers = workers
        self.threads = threads
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-fleet-")
        self.state = Path(self._folder.name) / "coordinator"
        self.plan: Plan | None = None  # of the last run
        self.job = ""  # the same

    def __enter__(self) -> LoopbackFleet:
        try:
            self._spawn(
                "coordinator",
                "coordinator.cli",
                "serve",
                "--listen",
                "127.0.0.1:0",
                *self._state("coordinator"),
            )
            self.client = self._connected()
            for n in range(self.workers):
                # One after the other: join order is part of a plan that is given by its cut.
                self.join(n)
                self._wait_for(n + 1)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGINT)
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def join(self, n: int) -> None:
        """Start worker ``n``, without waiting for it."""
        name = f"worker{n}"
        self._spawn(name, *self.join_command(name), *self.own.get(n, ()))

    def daemons(self) -> list[int]:
        """Process ids of the workers' daemons, in join order."""
        return [process.pid for process in self._processes[1:]]

    def join_command(self, name: str) -> list[str]:
        """Module and arguments of a worker called ``name``, with a folder and a token of its own."""
        token = self.client.create_token(name).token
        return [
            "worker.cli", "join", self.client.endpoint.address, "--token", token, "--name", name,
            "--device", "cpu", "--threads", str(self.threads), "--listen", "127.0.0.1:0",
            *self._state(name), *self.options,
        ]  # fmt: skip

    def log(self, name: str) -> str:
        """The end of a daemon's output."""
        return (Path(self._folder.name) / f"{name}.log").read_text(errors="replace")[-4000:]

    def folder(self, n: int) -> Path:
        """State folder of worker ``n``."""
        return Path(self._folder.name) / f"worker{n}"

    def add_weights(self, workers: Iterable[int], checkpoint: Path) -> None:
        """Have workers keep a checkpoint's weights, by the command that their owners type."""
        command = [sys.executable, "-m", "worker.cli", "model", "add", str(checkpoint), "--state-dir"]
        for n in workers:
            subprocess.run([*command, str(self.folder(n))], check=True, capture_output=True, cwd=ROOT)

    def run(self, case: Case, starts: Sequence[int], owners: Sequence[int] = ()) -> Run:
        """Train a case of the oracle over the workers, cut at ``starts``; a Runner."""
        return self.train(prepare(as_job(case), partitioner=cut_at(starts, owners)))

    def run_replicas(self, case: Case, plan: Plan) -> Run:
        """Train a case by the cuts, shares and schedule of a plan, on the workers as they joined."""
        return self.train(prepare(as_job(case), partitioner=cuts_of(plan), schedule=plan.schedule.value))

    def train(self, prepared: Prepared, exchanges: list[str] | None = None) -> Run:
        """Train what was prepared; JobFailed where it does not finish. ``exchanges`` gets what is shown of
        who exchanges with whom."""
        reply = self.client.submit(prepared)
        self.job = reply.job
        losses: dict[int, float] = {}
        for update in self.client.watch(reply.job):
            losses.update({p.step: p.value for p in update.metrics if p.name == "loss"})
            if update.HasField("plan"):
                self.plan = from_proto(update.plan)
            if exchanges is not None:
                exchanges.append(update.exchange)
            last = update
        if last.state != "finished":
            raise JobFailed(f"{reply.job} ended {last.state}: {last.reason}\n{self.log('coordinator')}")
        return self.result(reply.job, losses)

    def result(self, job: str, losses: Mapping[int, float]) -> Run:
        """What a finished job ended with; ``losses``: by step, as they were shown."""
        path = Path(self._folder.name) / f"{job}.safetensors"
        self.client.export(job, path)
        state = {name: {"value": value} for name, value in load_file(path).items()}
        return Run(tuple((losses[step],) for step in sorted(losses)), state)

    def _state(self, name: str) -> list[str]:
        return ["--state-dir", str(Path(self._folder.name) / name)]

    def _spawn(self, name: str, module: str, *arguments: str, **also: str) -> None:
        """Start a daemon; ``also``: of its environment."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(self.threads), **also}
        command = [sys.executable, "-m", module, *arguments]
        with (Path(self._folder.name) / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
            )

    def _connected(self) -> Client:
        found: list[Client] = []

        def answers() -> bool:
            with contextlib.suppress(AtollError):
                found.append(connect(state_dir=self.state))
            return bool(found)

        if not came_about(answers, self._processes):
            raise JobFailed(f"the coordinator ended early: {self.log('coordinator')}")
        return found[0]

    def _wait_for(self, count: int) -> None:
        def joined() -> bool:
            with contextlib.suppress(AtollError):
                return sum(w.state == "pool" for w in self.client.status().workers) >= count
            return False

        if not came_about(joined, self._processes):
            raise JobFailed(f"worker {count} did not join: {self.log(f'worker{count - 1}')}")


def cut_at(starts: Sequence[int], owners: Sequence[int] = ()) -> str:
    """The partitioner that begins a piece at each of ``starts``; ``owners``: the number of the device of
    each, where one has several."""
    cut = GIVEN_CUT + ",".join(str(start) for start in starts[1:])
    return f"{cut}:{','.join(map(str, owners))}" if owners else cut


def cuts_of(plan: Plan) -> str:
    """The partitioner that makes the replicas of a plan, with their shares of the micro-batches."""
    cuts = [cut_of(replica) for replica in plan.replicas]
    if len(cuts) == 1:
        return GIVEN_CUT + cuts[0]
    shares = (f"{SHARE}{replica.micros[1] - replica.micros[0]}" for replica in plan.replicas)
    return GIVEN_CUT + BETWEEN.join(cut + share for cut, share in zip(cuts, shares, strict=True))


def cut_of(replica: Replica) -> str:
    """Where a replica's pieces begin, and whose they are where a stage has several."""
    owners = [one.stage for one in replica.pieces] if len(replica.pieces) > len(replica.stages) else ()
    return cut_at(replica.starts, owners).removeprefix(GIVEN_CUT)


def as_job(case: Case) -> Job:
    """The case's model and micro-batches as a job whose data come in stored order."""
    training = case.training
    steps = [batch for step in range(training.steps) for batch in case.batches(step)]
    arrays = {name: np.concatenate([b[name].numpy() for b in steps]) for name in steps[0]}
    # Unshuffled rows: sample (step * n_micro + micro) * batch + i is row i of that micro-batch.
    data = Rows(arrays, seed=None)
    return Job(case.module, steps[0], data, replace(training, eval_batches=0), case.name)
