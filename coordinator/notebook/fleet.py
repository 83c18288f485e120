"""A coordinator's fleet as an object: what it is, runs on it, and those that are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import AtollError, UsageError
from coordinator.client.client import Client, connect
from coordinator.notebook import html
from coordinator.notebook.progress import Progress, progress_of
from coordinator.notebook.run import Run
from hostos.closing import Closing

if TYPE_CHECKING:
    from atoll.job import Job
    from coordinator.loggers.plugin import Logger
    from protos import atoll_control_pb2 as pb

MIB = 1 << 20
NAMED = 8  # jobs in one message


@dataclass(frozen=True, slots=True)
class Worker:
    """A machine of the fleet. ``gflops``: 0 where it was not measured yet."""

    id: str
    name: str
    state: str
    reason: str
    job: str
    device: str
    gflops: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """A fleet at one moment: its workers, and its jobs in the order in which they were submitted."""

    workers: tuple[Worker, ...]
    jobs: tuple[Progress, ...]
    version: str

    def _repr_html_(self) -> str:
        workers = [
            (
                w.name or w.id,
                w.state,
                w.device,
                f"{w.gflops:.1f}",
                f"{w.memory_bytes / MIB:.0f}",
                w.job,
                w.reason,
            )
            for w in self.workers
        ]
        jobs = [
            (
                j.job,
                j.name,
                j.state,
                f"{j.step} of {j.steps}",
                "" if j.loss is None else f"{j.loss:.4f}",
                j.reason,
            )
            for j in self.jobs
        ]
        head = ("worker", "state", "device", "GFLOP/s", "memory, MiB", "job", "why")
        return html.table(head, workers) + html.table(("job", "name", "state", "step", "loss", "why"), jobs)


class Fleet(Closing):
    """A coordinator with its workers. Close it, or use it in ``with``; runs go on without it.

    Calls raise errors of ``atoll.errors``.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<Fleet {self._client.endpoint.address}>"

    def _repr_html_(self) -> str:
        try:
            return self.status()._repr_html_()
        except AtollError as error:
            return html.facts(repr(self), [("not reached", error)])

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()

    def status(self) -> Status:
        """Return its current workers and jobs."""
        found = self._client.status()
        return Status(
            tuple(_worker(worker) for worker in found.workers),
            tuple(progress_of(update) for update in found.jobs),
            found.version,
        )

    def train(
        self,
        job: Job | str | PathLike[str],
        *,
        name: str = "",
        resume: str | Run = "",
        overrides: Sequence[str] = (),
        partitioner: str = "op_fence",
        schedule: str = "auto",
        loggers: Sequence[str | Logger] = (),
        tell: Callable[[str], None] = print,
    ) -> Run:
        """Capture a job's model, check the capture, send it and have the fleet train it; returns its run.

        ``job``: an ``atoll.Job`` or the path of a job file, which ``overrides`` such as "optimizer.lr=3e-4"
        change. ``resume``: a run, or its name, from whose last checkpoint it goes on. ``loggers`` take its
        figures while this program follows it: names of plug-ins, or objects. ``tell`` is called with what is
        being done. Raises what the model or the data are refused for.
        """
        from coordinator.client.overrides import override_job  # these load torch
        from coordinator.client.prepare import prepare

        made = self._read(job, overrides) if isinstance(job, str | PathLike) else override_job(job, overrides)
        if name:
            made = override_job(made, [f"name={name}"])
        known = resume.job if isinstance(resume, Run) else self.run(resume).job if resume else ""
        prepared = prepare(made, partitioner=partitioner, schedule=schedule, resume_of=known, tell=tell)
        if prepared.notice:
            tell(prepared.notice)
        reply = self._client.submit(prepared)
        tell(
            f"{reply.job} {reply.update.state}" + (f": {reply.update.reason}" if reply.update.reason else "")
        )
        return Run(self._client, reply.job, made.name, made.module, loggers)

    def run(self, name: str, loggers: Sequence[str | Logger] = ()) -> Run:
        """Return a run that was submitted before, by any program.

        ``name``: the coordinator's name of the job, or its owner's, of which the newest is taken.
        UsageError where there is none.
        """
        jobs = self._client.status().jobs
        found = [job for job in jobs if job.job == name] or [job for job in jobs if job.name == name]
        if not found:
            known = ", ".join(job.job for job in jobs[-NAMED:]) or "none"
            raise UsageError(f"no job is called {name[:80]!r}; the newest are {known}")
        return Run(self._client, found[-1].job, found[-1].name, loggers=loggers)

    def runs(self) -> list[Run]:
        """Return every run that the coordinator knows, in the order in which they were submitted."""
        return [Run(self._client, job.job, job.name) for job in self._client.status().jobs]

    @staticmethod
    def _read(path: str | PathLike[str], overrides: Sequence[str]) -> Job:
        from coordinator.client.job_file import load_job

        return load_job(Path(path), overrides)


def connected(
    coordinator: str | None,
    token: str | None,
    state_dir: str | PathLike[str] | None,
    *,
    insecure: bool = False,
) -> Fleet:
    """Return the fleet that `atoll.connect` is asked for."""
    given = os.environ.get
    state = state_dir or given("ATOLL_STATE")
    return Fleet(
        connect(
            coordinator or given("ATOLL_COORDINATOR"),
            token or given("ATOLL_TOKEN"),
            Path(state) if state else None,
            insecure=insecure,
        )
    )


def _worker(worker: pb.WorkerStatus) -> Worker:
    return Worker(
        id=worker.worker,
        name=worker.name,
        state=worker.state,
        reason=worker.reason,
        job=worker.job,
        device=f"{worker.device.kind} x{worker.device.threads}",
        gflops=worker.gflops,
        memory_bytes=worker.device.memory_limit_bytes,
    )
