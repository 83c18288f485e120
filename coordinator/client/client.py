"""The owner's side of a coordinator as functions: submit, plan, watch, export, and the rest.

    from coordinator.client import connect
    with connect() as client:
        reply = client.submit(prepare(load_job(Path("gpt.py"))))
        for update in client.watch(reply.job):
            print(update.step, update.loss)

Every failed call raises an error of ``atoll.errors``. Nothing here imports torch before a model
is captured or exported.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from atoll.errors import BadFrame, JobFailed, ProtocolMismatch
from atoll.plan import Plan
from atoll.version import __version__
from coordinator.client.calls import calling, patiently
from coordinator.client.chrome_trace import TraceSpan
from coordinator.client.endpoint import Endpoint, find_endpoint
from coordinator.client.transfer import STREAMS, Progress, download, silent
from hostos.closing import Closing
from hostos.retries import progressed
from protos import PROTOCOL_VERSION, coding
from protos import atoll_apps_pb2 as apps
from protos import atoll_apps_pb2_grpc as apps_rpc
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos import atoll_job_pb2 as job_pb
from protos.blob_calls import BlobsOverGrpc
from protos.blob_transfer import upload
from protos.convert import from_proto, to_proto
from protos.text_limits import clean

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from tenacity import Retrying
    from torch import Tensor, nn

    from atoll.dataset_spec import PinnedData
    from atoll.job import TrainingSpec
    from coordinator.client.export import Format
    from coordinator.client.prepare import Graphs, Prepared
    from protos.blob_transfer import LocalBlob

FINISHED = "finished"
BEST: Literal["best"] = "best"
KeptStep = int | Literal["best"] | None
"""A checkpoint that is kept: its step, the best held-out loss's, or the newest."""
ENDED = frozenset({FINISHED, "failed", "cancelled"})
T = TypeVar("T")


@dataclass(frozen=True)
class LivePlan:
    """A plan for the fleet as it is, and that fleet."""

    plan: Plan
    fleet: tuple[pb.WorkerStatus, ...]
    links: tuple[pb.LinkStatus, ...]


@dataclass(frozen=True)
class Exported:
    """Result of `export`."""

    path: Path
    step: int
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Weights:
    """Tensors of a job by the module's own names, after ``step`` steps; ``name``: the job's own;
    ``privacy``: of a private job what is spent of it, in words."""

    tensors: Mapping[str, Tensor]
    step: int
    name: str
    privacy: str = ""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Bytes that this machine sent, and those that workers did."""

    sent: int
    from_workers: int


class Client(Closing):
    """An owner's connection to one coordinator; close it, or use it in ``with``.

    ``timeout_s`` bounds each short call, ``attempts`` how long a lost coordinator is waited for
    by calls that go on afterwards (uploads, downloads, ``watch``).
    """

    def __init__(
        self, endpoint: Endpoint, timeout_s: float = 10.0, attempts: Callable[[], Retrying] = patiently
    ) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._channel = endpoint.channel()
        self._metadata = endpoint.metadata()
        self._owner = rpc.OwnerStub(self._channel)
        self._entry = rpc.EntryStub(self._channel)
        self._apps = apps_rpc.AppsStub(self._channel)
        self._blobs = BlobsOverGrpc(self._channel, self._metadata, endpoint.address)

    def close(self) -> None:
        """Drop the connection; calls in progress end."""
        self._channel.close()

    def hello(self) -> pb.HelloReply:
        """The coordinator's versions and clock; ProtocolMismatch when we do not understand it."""
        request = pb.HelloRequest(protocol=PROTOCOL_VERSION, version=__version__)
        with calling(self.endpoint.address, self.endpoint.token):
            reply: pb.HelloReply = self._entry.Hello(request, timeout=self._timeout_s)
        if reply.protocol != PROTOCOL_VERSION:
            older = "the coordinator" if reply.protocol < PROTOCOL_VERSION else "this machine's atoll"
            raise ProtocolMismatch(
                f"the coordinator (atoll {clean(reply.version, 20)}) speaks protocol {reply.protocol}, this "
                f"machine (atoll {__version__}) {PROTOCOL_VERSION}; update {older}"
            )
        return reply

    # ------------------------------------------------------------ jobs

    def upload(
        self, prepared: Prepared, progress: Progress = silent, *, from_workers: bool | None = None
    ) -> Uploaded:
        """Have the coordinator get the blobs that it lacks: weights from workers that hold them, the rest
        from here. May be repeated. ``from_workers``: None, unless the coordinator is on this machine."""
        if from_workers is None:
            from_workers = not self.endpoint.here
        tensors = set(prepared.spec.tensors.values())
        weights = [blob for blob in prepared.blobs if blob.hash in tensors]
        gathered = self.gather(weights, progress) if from_workers and weights else 0
        return Uploaded(self.send(prepared.blobs, progress), gathered)

    def gather(self, weights: Sequence[LocalBlob], progress: Progress = silent) -> int:
        """Have workers send what they hold of ``weights`` and the coordinator lacks; returns the bytes that
        came of them. May be repeated."""
        sizes = {blob.hash: blob.size for blob in weights}
        done = 0
        for attempt in self._attempts():
            with attempt:
                for found, total in self._blobs.gather(sizes):
                    if total:
                        progress(found, total)
                    if found > done:
                        done = found
                        progressed(attempt)
        return done

    def send(self, blobs: Sequence[LocalBlob], progress: Progress = silent) -> int:
        """Send what of ``blobs`` the coordinator lacks; returns the bytes sent. May be repeated."""
        return upload(self._blobs, blobs, self._attempts(), progress, streams=STREAMS)

    def submit(
        self, prepared: Prepared, progress: Progress = silent, submission: str | None = None
    ) -> pb.SubmitReply:
        """Upload and queue the job; ``submission`` makes a repeated call the same job."""
        self.upload(prepared, progress)
        return self.queue(prepared, submission)

    def queue(self, prepared: Prepared, submission: str | None = None) -> pb.SubmitReply:
        """Queue a job whose blobs were uploaded; ``submission`` as of ``submit``."""
        request = pb.SubmitRequest(spec=to_proto(prepared.spec), submission=submission or uuid.uuid4().hex)
        reply: pb.SubmitReply = self._patiently(lambda: self._owner.Submit(request, **self._short(60.0)))
        return reply

    def plan(
        self,
        graphs: Graphs,
        training: TrainingSpec,
        partitioner: str = "op_fence",
        schedule: str = "auto",
        standbys: int | None = None,
        pinned: PinnedData | None = None,
        timeout_s: float = 600.0,
    ) -> LivePlan:
        """Return the coordinator's plan for this model on its fleet now; nothing is started."""
        self.send([graphs.blob, graphs.eval_blob])
        request = pb.PlanRequest(
            dag_hash=graphs.blob.hash,
            eval_dag_hash=graphs.eval_blob.hash,
            training=to_proto(training),
            partitioner=partitioner,
            schedule=schedule,
            standbys=standbys,
            pinned=None if pinned is None else coding.write(pinned, job_pb.PinnedData),
        )
        # Ops not seen before are timed on every device first, hence the long limit.
        reply = self._ask(self._owner.MakePlan, request, timeout_s)
        return LivePlan(from_proto(reply.plan), tuple(reply.fleet), tuple(reply.links))

    def status(self, timeout_s: float | None = None) -> pb.StatusReply:
        """Workers, jobs and links now."""
        reply: pb.StatusReply = self._ask(self._owner.Status, pb.StatusRequest(), timeout_s)
        return reply

    def watch(self, job: str) -> Iterator[pb.JobUpdate]:
        """Updates of a job until it ends; goes on after a restart of the coordinator."""
        for attempt in self._attempts():
            with attempt, calling(self.endpoint.address):
                for update in self._owner.Watch(pb.JobRequest(job=job), metadata=self._metadata):
                    progressed(attempt)
                    yield update
                    if update.state in ENDED:
                        return

    def wait(self, job: str) -> pb.JobUpdate:
        """The job's last update, once it has ended; JobFailed unless it finished."""
        updates = deque(self.watch(job), maxlen=1)
        if not updates:
            raise JobFailed(
                f"{job}: the coordinator ended its updates before the first; look with `atoll status`"
            )
        check_ended(updates[0])
        return updates[0]

    def logs(self, job: str, *, follow: bool = False) -> Iterator[pb.LogLine]:
        """Log lines of a job (or of everything, for ""), oldest first."""
        with calling(self.endpoint.address):
            timeout_s = None if follow else 60.0
            yield from self._owner.Logs(
                pb.LogsRequest(job=job, follow=follow), metadata=self._metadata, timeout=timeout_s
            )

    def cancel(self, job: str) -> pb.JobUpdate:
        """Stop a job; its last checkpoint stays."""
        reply: pb.JobUpdate = self._ask(self._owner.Cancel, pb.JobRequest(job=job))
        return reply

    def forget_jobs(self, jobs: Sequence[str]) -> None:
        """Have nothing kept of jobs that have ended. UsageError, and all are kept, where one has not."""
        self._ask(self._owner.ForgetJobs, pb.ForgetJobsRequest(jobs=jobs), 60.0)

    def checkpoints(self, job: str, *, verify: bool = False, step: int | None = None) -> list[pb.Checkpoint]:
        """The job's kept checkpoints, oldest first; ``verify``: read them to the last byte. UsageError when
        there is none of ``step``."""
        request = pb.CheckpointsRequest(job=job, verify=verify, step=step)
        return list(self._ask(self._owner.Checkpoints, request, 3600.0 if verify else 60.0).checkpoints)

    def credits(self, since_s: float = 0.0) -> list[pb.Credit]:
        """What workers have given to whose jobs by UTC day, from that of ``since_s`` on: exact, from what is
        committed."""
        return list(self._ask(self._owner.Credits, pb.CreditsRequest(since_s=since_s), 60.0).credits)

    def restore(self, job: str, step: int, steps: int | None = None) -> pb.SubmitReply:
        """Queue a job that goes on from a checkpoint of ``job``; ``steps`` in all, None: the job's own."""
        request = pb.RestoreRequest(job=job, step=step, steps=steps, submission=uuid.uuid4().hex)
        reply: pb.SubmitReply = self._patiently(lambda: self._owner.Restore(request, **self._short(60.0)))
        return reply

    def result(self, job: str, step: KeptStep = None) -> pb.ResultReply:
        """Names and hashes of the job's newest weights, or of its kept checkpoint of ``step``; best: of the
        one nearest to the best held-out loss. UsageError where there is none."""
        request = (
            pb.ResultRequest(job=job, best=True) if step == BEST else pb.ResultRequest(job=job, step=step)
        )
        reply: pb.ResultReply = self._ask(self._owner.Result, request)
        return reply

    def weights(
        self,
        job: str,
        progress: Progress = silent,
        wanted: Collection[str] | None = None,
        step: KeptStep = None,
    ) -> Weights:
        """The job's newest weights by the module's own names, tied ones too. ``wanted``: only those, where
        the job has them; ``step`` as of ``result``."""
        from coordinator.client.export import assemble, unwrapped  # torch is slow to import

        reply = self.result(job, step)
        kept = None if wanted is None else {reply.prefix + name for name in wanted}
        names = {t.name: t.blob for t in reply.tensors if kept is None or t.name in kept}
        hashes = list(dict.fromkeys([*names.values(), *filter(None, [reply.model])]))
        aliases = {alias.alias: alias.name for alias in reply.aliases if kept is None or alias.name in kept}
        tensors = assemble(self._counted(hashes, progress), names, aliases, reply.model)
        if kept is not None:
            tensors = {name: tensor for name, tensor in tensors.items() if name in kept}
        update = reply.update
        return Weights(unwrapped(tensors, reply.prefix), reply.step, update.name, update.federated.privacy)

    def export(
        self,
        job: str,
        path: Path,
        progress: Progress = silent,
        step: KeptStep = None,
    ) -> Exported:
        """Write the newest weights to ``path`` under the module's own names, tied ones too; ``step`` as of
        ``result``."""
        from coordinator.client.export import write_weights

        found = self.weights(job, progress, step=step)
        facts: dict[str, str | int] = {"job": job, "step": found.step, "name": found.name}
        if found.privacy:
            facts["privacy"] = found.privacy
        write_weights(path, found.tensors, facts)
        return Exported(path, found.step, len(found.tensors), path.expanduser().stat().st_size)

    def export_folder(
        self,
        job: str,
        path: Path,
        module: nn.Module,
        form: Format,
        progress: Progress = silent,
        step: KeptStep = None,
    ) -> Exported:
        """Write a folder that transformers or peft reads, by the ``module`` that was trained: it takes the
        newest weights, or those of ``step`` as of ``result``. Of an adapter only what was trained is
        fetched."""
        from coordinator.client.export import check_adapter, fill, needed, write_folder

        wanted = needed(module, form)
        found = self.weights(job, progress, wanted, step)
        if wanted is not None:
            check_adapter(found.tensors)
        fill(module, found.tensors, wanted)
        write_folder(path, module, form, found.privacy)
        size = sum(file.stat().st_size for file in path.expanduser().rglob("*") if file.is_file())
        return Exported(path, found.step, len(found.tensors), size)

    def _counted(self, hashes: list[str], progress: Progress) -> Iterator[tuple[str, bytes]]:
        progress(0, len(hashes))
        for number, found in enumerate(download(self._blobs, hashes, self._attempts()), 1):
            yield found
            progress(number, len(hashes))

    def trace(self, job: str) -> list[TraceSpan]:
        """Every kept span of the job, in the coordinator's time."""
        found: list[TraceSpan] = []
        with calling(self.endpoint.address):
            chunks = self._owner.Trace(pb.TraceRequest(job=job), metadata=self._metadata, timeout=600.0)
            for chunk in chunks:
                found.extend(_spans(chunk))
        return found

    def metrics(self, job: str) -> Iterator[str]:
        """Yield the lines of a job's metrics.csv as the coordinator has it, the header first."""
        rest = b""
        with calling(self.endpoint.address):
            chunks = self._owner.Metrics(pb.JobRequest(job=job), metadata=self._metadata, timeout=600.0)
            for chunk in chunks:
                *lines, rest = (rest + chunk.data).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)

    # ------------------------------------------------------------ runs of Flower apps

    def app_runs(self) -> list[apps.AppRunFacts]:
        """Runs of Flower apps that are open, whoever's they are."""
        return list(self._ask(self._apps.ListRuns, apps.AppRunsRequest()).runs)

    def end_app_run(self, run: int, reason: str) -> None:
        """End a run of a Flower app, wherever its ServerApp is."""
        self._ask(self._apps.EndRun, apps.AppClose(run=run, reason=reason))

    # ------------------------------------------------------------ tokens and members

    def create_token(
        self, name: str = "", lifetime_s: float = 0.0, max_uses: int = 0, host: str = ""
    ) -> pb.TokenReply:
        """A token with which workers join; 0 seconds or uses: without end."""
        request = pb.CreateTokenRequest(name=name, lifetime_s=lifetime_s, max_uses=max_uses, host=host)
        reply: pb.TokenReply = self._ask(self._owner.CreateToken, request)
        return reply

    def tokens(self) -> list[pb.TokenInfo]:
        """Every token, without its secret."""
        return list(self._ask(self._owner.ListTokens, pb.Empty()).tokens)

    def revoke_token(self, token: str) -> None:
        """Let no other worker join with this token; those that have joined stay."""
        self._ask(self._owner.RevokeToken, pb.TokenRequest(id=token))

    def kick(self, worker: str, reason: str = "", *, for_good: bool = False) -> None:
        """Make a worker leave; ``for_good`` also revokes its certificate."""
        self._ask(self._owner.Kick, pb.KickRequest(worker=worker, reason=reason, for_good=for_good))

    def forget(self, worker: str) -> None:
        """Strike a worker, by id or name, that is gone for good. UsageError while it is connected."""
        self._ask(self._owner.Forget, pb.ForgetRequest(worker=worker))

    def create_owner(
        self, name: str, role: str, *, workers: int = 0, jobs: int = 0, weight: float = 1.0
    ) -> pb.OwnerReply:
        """Make a token for another owner that may ``watch``, ``submit`` or ``administer``; its jobs have at
        most so many ``workers``, and as many ``jobs`` run, at once (0: any number)."""
        quota = pb.OwnerQuota(workers=workers, jobs=jobs, weight=weight)
        reply: pb.OwnerReply = self._ask(
            self._owner.CreateOwner, pb.OwnerRequest(name=name, role=role, quota=quota)
        )
        return reply

    def owners(self) -> list[pb.OwnerInfo]:
        """Every owner, without secrets."""
        return list(self._ask(self._owner.ListOwners, pb.Empty()).owners)

    def revoke_owner(self, name: str) -> None:
        """End an owner's rights; its jobs stay."""
        self._ask(self._owner.RevokeOwner, pb.OwnerRequest(name=name))

    # ------------------------------------------------------------ the authority

    def authorities(self) -> pb.AuthorityList:
        """Authorities that are trusted now, the newest first, and who has no certificate of that."""
        reply: pb.AuthorityList = self._ask(self._owner.ListAuthorities, pb.Empty())
        return reply

    def rotate_authority(self, overlap_s: float) -> pb.AuthorityList:
        """Make a new authority; both are trusted for ``overlap_s``. UsageError during an exchange."""
        reply: pb.AuthorityList = self._ask(
            self._owner.RotateAuthority, pb.RotateAuthorityRequest(overlap_s=overlap_s)
        )
        return reply

    def drop_authority(self, *, anyway: bool = False) -> pb.AuthorityList:
        """Trust the older authority no more. UsageError without an exchange, and while workers are behind
        unless ``anyway``."""
        reply: pb.AuthorityList = self._ask(self._owner.DropAuthority, pb.DropAuthorityRequest(anyway=anyway))
        return reply

    # ------------------------------------------------------------ helpers

    def _ask(self, call: Callable[..., Any], request: Message, timeout_s: float | None = None) -> Any:
        """Make one short call. Raises its refusal as an error of ``atoll.errors``."""
        with calling(self.endpoint.address):
            return call(request, **self._short(timeout_s))

    def _short(self, timeout_s: float | None = None) -> dict[str, object]:
        return {"metadata": self._metadata, "timeout": timeout_s or self._timeout_s}

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeat a call that may be repeated while the coordinator is away."""
        for attempt in self._attempts():
            with attempt, calling(self.endpoint.address):
                return call()
        raise AssertionError("the last attempt returns or raises")


def connect(
    coordinator: str | None = None,
    token: str | None = None,
    state_dir: Path | None = None,
    *,
    insecure: bool = False,
    use_proxy: bool = False,
) -> Client:
    """A client of the named coordinator, or of the one remembered in ``state_dir``, greeted once.
    ``use_proxy``: by way of the environment's proxy.

    Raises UsageError, ConnectionFailed, AccessDenied or ProtocolMismatch.
    """
    client = Client(find_endpoint(coordinator, token, state_dir, insecure=insecure, use_proxy=use_proxy))
    try:
        client.hello()
    except BaseException:
        client.close()
        raise
    return client


def check_ended(update: pb.JobUpdate) -> None:
    """JobFailed unless the job has finished."""
    if update.state != FINISHED:
        kept = (
            f"its checkpoint of step {update.checkpoint_step} is kept: `atoll export {update.job}` or "
            f"`atoll submit --resume {update.job}`"
            if update.checkpoint_step
            else f"see `atoll logs {update.job}`"
        )
        reason = update.reason or "no reason given"
        raise JobFailed(f"{update.job} {update.state} at step {update.step}: {reason}; {kept}")


def _spans(chunk: pb.TraceChunk) -> Iterator[TraceSpan]:
    for span in chunk.spans.spans:
        if not span.end_s >= span.start_s:
            raise BadFrame(
                f"{chunk.worker} sent a span that ends at {span.end_s}, before it began at {span.start_s}"
            )
        yield TraceSpan(
            worker=chunk.worker,
            stage=chunk.spans.stage,
            kind=span.kind,
            step=span.step,
            micro=span.micro,
            start_s=span.start_s + chunk.clock_offset_s,
            end_s=span.end_s + chunk.clock_offset_s,
            plan_version=chunk.spans.plan_version,
            peer=span.peer,
            bytes=span.bytes,
        )
