"""A coordinator over real gRPC in this process, its owner, and workers that compute nothing."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.job import TrainingSpec
from benchmarks.commit import submission, upload
from benchmarks.fake_worker import FakeWorker
from coordinator.config import CoordinatorConfig, Probing
from coordinator.server import Running, Started, serve
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.convert import to_proto
from protos.credentials import (
    COORDINATOR,
    JoinToken,
    channel_credentials,
    name_options,
)
from protos.grpc_errors import to_atoll_error
from tests.patience import HUNG_S, eventually

FAST = Probing(seconds=0.05, answer_within_s=2.0)
MEMORY = 3 << 20  # two of the chain's layers, of which most jobs here have four: no worker is enough


@dataclass
class Served:
    """`atoll serve` as a process."""

    process: subprocess.Popen[str]
    started: Started


class Owner:
    """The owner's side of one coordinator."""

    def __init__(self, running: Running | Served, secret: str | None = None) -> None:
        started = running.started
        self.address = f"127.0.0.1:{started.entry_port}"
        token = JoinToken.decode(started.owner_token) if started.owner_token else None
        if token is None:
            self.channel = grpc.insecure_channel(self.address)
            self.metadata: tuple[tuple[str, str], ...] = ()
        else:
            self.channel = grpc.secure_channel(
                self.address, channel_credentials(token.ca_pem), options=name_options(COORDINATOR)
            )
            self.metadata = (("authorization", f"Bearer {secret or token.presented}"),)
        self.stub = rpc.OwnerStub(self.channel)
        self.entry = rpc.EntryStub(self.channel)
        self.blobs = rpc.BlobsStub(self.channel)

    def call(self, name: str, request: Any) -> Any:
        return getattr(self.stub, name)(request, metadata=self.metadata, timeout=HUNG_S)

    def submit(self, n_ops: int = 4, evaluate: bool = False, name: str = "", **training: Any) -> str:
        spec, blobs = submission(n_ops, TrainingSpec(**{"steps": 3, "n_micro": 2, **training}), evaluate)
        upload(self.blobs, blobs, self.metadata)
        request = pb.SubmitRequest(spec=to_proto(replace(spec, name=name or "chain")))
        return str(self.call("Submit", request).job)

    def watch(self, job: str, until: Callable[[pb.JobUpdate], bool] = lambda u: False) -> pb.JobUpdate:
        """The first update that ``until`` accepts, else the last one."""
        update = pb.JobUpdate()
        stream = self.stub.Watch(pb.JobRequest(job=job), metadata=self.metadata, timeout=HUNG_S)
        for update in stream:
            if until(update):
                stream.cancel()
                break
        return update

    def job(self, job: str) -> pb.JobUpdate:
        reply = self.call("Status", pb.StatusRequest())
        return next(update for update in reply.jobs if update.job == job)


def start(stack: ExitStack, folder: Path, **changes: Any) -> Running:
    config = CoordinatorConfig(
        **{"state_dir": folder, "entry_port": 0, "probing": FAST, "wrong_token_delay_s": 0.0, **changes}
    )
    running = serve(config)
    stack.callback(running.stop)
    return running


def fleet(stack: ExitStack, running: Running | Served, n: int, **changes: Any) -> list[FakeWorker]:
    """Workers that have joined, or were refused."""
    started = running.started
    found = []
    for i in range(n):
        options = {"name": f"fake-{i}", "memory_bytes": MEMORY, **changes}
        worker = FakeWorker(f"127.0.0.1:{started.entry_port}", started.join_token, **options)
        stack.callback(worker.stop)
        found.append(worker.start())
    if isinstance(running, Running):
        eventually(lambda: all(has_joined(running, worker) or worker.ended.is_set() for worker in found))
    return found


def has_joined(running: Running, worker: FakeWorker) -> bool:
    return bool(running.call(lambda server: worker.worker in server.shell.outboxes))


class Hold:
    """``ready`` of fake workers that report no step from the first of ``at`` on before ``release``, none from
    the second on before another one, and so on: what a test does to a job in mid-training comes before its
    end, however late the test sees the step."""

    def __init__(self, stack: ExitStack, *at: int) -> None:
        self.at = at[0]
        self._released = {step: threading.Event() for step in at}
        for _ in at:
            stack.callback(self.release)

    def __call__(self, worker: FakeWorker, step: int) -> pb.StepReady:
        for at, released in self._released.items():
            if step >= at:
                released.wait(HUNG_S)
        return worker.report(step)

    def release(self) -> None:
        for released in self._released.values():
            if not released.is_set():
                released.set()
                return


def refused(call: Callable[[], Any]) -> Exception:
    """The error of atoll.errors that a refused call stands for."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return to_atoll_error(caught.value, "test")
