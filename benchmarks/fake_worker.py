"""A worker that computes nothing: real enrolment, real TLS session, instant answers.

Used to measure and test the coordinator alone. ``answer`` may be overridden to misbehave.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
import numpy as np
from safetensors.numpy import save

import atoll
from atoll.errors import AtollError
from benchmarks.waits import HUNG_S
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos import atoll_job_pb2 as job_pb
from protos.credentials import (
    COORDINATOR,
    Identity,
    JoinToken,
    channel_credentials,
    identity_from,
    name_options,
    new_key,
    signing_request,
)
from worker.control.stream import Stream

LOSS = 2.0
MAX_QUEUED = 1000
BEAT_S = 0.4
Inbox = queue.Queue[pb.ToWorker | None]


@dataclass
class FakeWorker:
    """``entry``: HOST:PORT of the coordinator; ``token`` None: --insecure."""

    entry: str
    token: str | None
    name: str = "fake"
    incarnation: int = 1
    memory_bytes: int = 8 << 30
    compute_s: float = 0.0  # of every step
    ready: Callable[[FakeWorker, int], pb.StepReady] | None = None
    bandwidth_bps: float = 1e9
    on_commit: Callable[[FakeWorker, pb.StepCommit], None] | None = None
    identity: Identity | None = None
    worker: str = ""
    protocol: int = PROTOCOL_VERSION
    received: list[str] = field(default_factory=list)
    commits: list[pb.StepCommit] = field(default_factory=list)
    assigned: pb.Assign | None = None
    copy_bytes: int = 0  # that it lends to copies, of which it fetches none
    keeps: pb.KeepCopies | None = None
    dismissed: pb.Dismiss | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    error: str = ""
    _channel: grpc.Channel | None = None
    _stream: Stream | None = None
    _stores: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))  # in order, as ours
    work_port: int = 0

    def enroll(self) -> None:
        """Exchange the token for a certificate."""
        token = JoinToken.decode(self.token) if self.token else None
        key = new_key()
        with self._open(self.entry, token.ca_pem if token else None) as channel:
            reply = rpc.EntryStub(channel).Enroll(
                pb.EnrollRequest(
                    protocol=PROTOCOL_VERSION,
                    csr_pem=signing_request(key, self.name),
                    name=self.name,
                ),
                timeout=HUNG_S,
                metadata=token.metadata if token else (),
            )
        self.worker, self.work_port = reply.worker, reply.work_port
        if token:
            self.identity = identity_from(key, reply.certificate_pem, reply.ca_pem)

    def start(self) -> FakeWorker:
        """Enroll where needed and open the session."""
        if not self.worker:
            self.enroll()
        host = self.entry.rpartition(":")[0]
        ca = self.identity.ca_pem if self.identity else None
        address = f"{host}:{self.work_port}"
        inbox: Inbox = queue.Queue()
        self.ended = threading.Event()
        self._channel = self._open(address, ca)
        introduction = pb.FromWorker(introduction=self.introduction())
        received, over = partial(self._received, inbox), partial(self._over, inbox)
        self._stream = Stream(
            partial(self._open, address, ca, grpc.aio),
            self.metadata,
            address,
            introduction,
            MAX_QUEUED,
            received,
            over,
        )
        threading.Thread(target=self._answer, args=(inbox, self.ended), daemon=True).start()
        threading.Thread(target=self._beat, args=(self.ended,), daemon=True).start()
        return self

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.identity else (("atoll-worker", self.worker),)

    def introduction(self) -> pb.Introduction:
        return pb.Introduction(
            protocol=self.protocol,
            name=self.name,
            device=pb.DeviceFacts(
                kind="cpu",
                model="none",
                threads=1,
                memory_bytes=self.memory_bytes,
                memory_limit_bytes=self.memory_bytes,
                memory_in_figures=True,  # no process takes anything beside
                atoll_version=atoll.__version__,
            ),
            peer_addresses=[pb.Address(host="127.0.0.1", port=9)],
            incarnation=self.incarnation,
            copy_bytes=self.copy_bytes,
        )

    def say(self, **body: Any) -> None:
        assert self._stream is not None
        self._stream.send(pb.FromWorker(**body))

    def vanish(self) -> None:
        """Break the connection without a word."""
        self.ended.set()
        if self._stream is not None:
            self._stream.close(wait=False)
        if self._channel is not None:
            self._channel.close()

    stop = vanish

    def blobs(self) -> rpc.BlobsStub:
        assert self._channel is not None
        return rpc.BlobsStub(self._channel)

    # ------------------------------------------------------------ inside

    def _open(self, address: str, ca: bytes | None, library: Any = grpc) -> Any:
        options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
        if ca is None:
            return library.insecure_channel(address, options=options)
        credentials = channel_credentials(ca, self.identity)
        return library.secure_channel(address, credentials, options=options + name_options(COORDINATOR))

    def _beat(self, ended: threading.Event) -> None:
        # It counts on: a fake may be slow, but never hangs.
        for progress in itertools.count(1):
            if ended.wait(BEAT_S):
                return
            job = self.assigned.job if self.assigned else ""
            version = self.assigned.plan_version if self.assigned else 0
            beat = pb.Heartbeat(
                worker_time_s=time.monotonic(), job=job, plan_version=version, progress=progress
            )
            self.say(heartbeat=beat)

    def _received(self, inbox: Inbox, message: pb.ToWorker) -> None:
        if self.on_commit is not None and message.HasField("commit"):
            self.on_commit(self, message.commit)
        inbox.put(message)

    def _over(self, inbox: Inbox, error: AtollError | None) -> None:
        self.error = str(error or "")
        inbox.put(None)

    def _answer(self, inbox: Inbox, ended: threading.Event) -> None:
        while (message := inbox.get()) is not None:
            self.answer(message)
        ended.set()

    def answer(self, message: pb.ToWorker) -> None:
        body = message.WhichOneof("body") or ""
        if body != "commit":
            self.received.append(body)
        match body:
            case "probe_ops":
                asked = message.probe_ops
                timings = [
                    pb.OpTiming(signature=op.signature, forward_s=1e-3, backward_s=2e-3) for op in asked.ops
                ]
                self.say(ops_probed=pb.OpsProbed(request=asked.request, timings=timings))
            case "probe_link":
                link = message.probe_link
                self.say(
                    link_probed=pb.LinkProbed(
                        request=link.request,
                        peer=link.peer.worker,
                        rtt_s=1e-3,
                        bandwidth_bps=self.bandwidth_bps,
                    )
                )
            case "assign":
                self.assigned = message.assign
                self.say(loaded=pb.Loaded(job=message.assign.job, plan_version=message.assign.plan_version))
            case "reconfigure":
                if self.assigned is not None:
                    self.assigned.plan_version = message.reconfigure.plan_version
                    found = pb.Loaded(job=self.assigned.job, plan_version=self.assigned.plan_version)
                    self.say(loaded=found)
            case "start":
                self._compute(message.start.step)
            case "commit":
                self._committed(message.commit)
            case "release":
                self.assigned = None
            case "keep_copies":
                self.keeps = message.keep_copies
            case "dismiss":
                self.dismissed = message.dismiss

    def _compute(self, step: int) -> None:
        if self.compute_s:
            time.sleep(self.compute_s)
        if self.ready is not None:
            self.say(ready=self.ready(self, step))
        else:
            self.say(ready=self.report(step))

    def report(self, step: int, **changes: Any) -> pb.StepReady:
        assert self.assigned is not None
        report = pb.StepReady(
            job=self.assigned.job,
            plan_version=self.assigned.plan_version,
            step=step,
            square_norms=[1.0] * len(self.assigned.program.parameters),
            finite=True,
            forward_s=1e-5,
            backward_s=1e-5,
        )
        if self.assigned.program.HasField("loss"):
            report.losses.append(LOSS / (1 + step))
        for name, value in changes.items():
            setattr(report, name, value)
        return report

    def _committed(self, commit: pb.StepCommit) -> None:
        self.commits.append(commit)
        if commit.evaluate and self.assigned is not None:
            program = self.assigned.eval_program
            ready = pb.EvalReady(job=commit.job, plan_version=commit.plan_version, step=commit.step)
            if program.HasField("loss"):
                ready.loss = 1.5
            self.say(eval_ready=ready)
        if commit.store:
            self._stores.submit(self._store, commit)
        if not commit.last:
            self._compute(commit.step + 1)

    def _store(self, commit: pb.StepCommit) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError, AssertionError):  # vanished meanwhile
            self._put_state(commit)

    def _put_state(self, commit: pb.StepCommit) -> None:
        assigned = self.assigned
        assert assigned is not None
        metas = {named.name: named.meta for named in assigned.metas}
        tensors = []
        for name in assigned.program.parameters:
            meta = metas[name]
            data = save({"value": np.full(tuple(meta.shape), commit.step, meta.dtype)}, {"of": name})
            blob = hashlib.sha256(data).hexdigest()
            self.blobs().Put(
                iter([pb.BlobChunk(hash=blob, size=len(data), data=data)]),
                metadata=self.metadata,
                timeout=HUNG_S,
            )
            tensors.append(job_pb.TensorBlob(name=name, blob=blob))
        self.say(
            stored=pb.StateStored(
                job=commit.job, plan_version=commit.plan_version, step=commit.step, tensors=tensors
            )
        )
