"""The Owner service: submit, plan, status, watch, logs, result, trace, tokens, kick."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.dataset_spec import DataSpec, PinnedData
from atoll.errors import AccessDenied, JobFailed, NoWorkers, StorageError, UsageError
from atoll.job import MAX_STANDBYS, JobSpec, TrainingSpec
from atoll.opdag import rows_of
from atoll.version import __version__
from coordinator.federated.checks import check_spec, exported_prefix, pinned_to
from coordinator.messages import events as ev
from coordinator.messages import peer_tensors
from coordinator.messages.facts import STATE, Checkpoint, Record
from coordinator.messages.jobs import ENDED
from coordinator.planning.codecs.ratios import check_compression
from coordinator.planning.planner import known_partitioner
from coordinator.planning.search.pins import check_pinned
from coordinator.services.access.owners import Owner, Owners, Role
from coordinator.services.owners.checkpoints import chosen, described, exported
from coordinator.services.owners.in_names import in_names, names_of
from coordinator.services.owners.views import (
    credits_of,
    health_status,
    job_update,
    link_statuses,
    worker_status,
)
from coordinator.sharing.claims import Quota
from coordinator.shell import Shell
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos import atoll_job_pb2 as job_pb
from protos import bounds, coding
from protos.convert import from_proto, to_proto
from protos.credentials import fingerprint, token_id
from protos.devices import machine_of
from protos.telemetry import Event
from protos.text_limits import clean

if TYPE_CHECKING:
    import grpc

    from coordinator.membership.roster import Roster
    from coordinator.services.access.authorities import Authorities
    from coordinator.services.access.register import Register, Token
    from coordinator.services.access.tokens import Tokens
    from coordinator.storage.graph_store import Graphs

    Context = grpc.aio.ServicerContext[Any, Any]

UPDATE_EVERY_S = 0.2  # at most, on one Watch stream
COSTS_EVERY_S = 5.0  # between two looks at what losing a stage would cost
UPDATE_AT_LEAST_S = 2.0
PLAN_WITHIN_S = 600.0
POINTS_AN_UPDATE = 5000


class OwnerService(rpc.OwnerServicer):
    """What the owner may ask; ``access`` has checked the caller's right, and refuses with what is raised."""

    def __init__(
        self,
        shell: Shell,
        register: Register,
        authority: Authorities | None,
        tokens: Tokens,
        owners: Owners,
    ) -> None:
        self._shell = shell
        self._register = register
        self._authority = authority
        self._tokens = tokens
        self._owners = owners
        self._started_s = time.monotonic()
        self._submitting = asyncio.Lock()

    # ------------------------------------------------------------ jobs

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.SubmitReply:  # noqa: N802
        """Queue a job whose blobs are all here; the same ``submission`` again is the same job."""
        spec = replace(from_proto(request.spec), owner=self._caller(context).name)
        self._did(context, "submit", name=clean(spec.name, 100), dag=spec.dag_hash)
        # One at a time, so that a repeated call cannot race its first.
        async with self._submitting:
            job = await self._submit(spec, clean(request.submission, 100))
        return pb.SubmitReply(job=job, update=self._update(job))

    async def _submit(self, spec: JobSpec, submission: str, start: Checkpoint | None = None) -> str:
        ledger = self._shell.scheduler.ledger
        if submission in ledger.submissions:
            return ledger.submissions[submission]
        known_partitioner(spec.partitioner)
        check_compression(spec.training.compression)
        check_spec(spec)
        wrong = self._shell.scheduler.refusal(spec, start)
        if wrong is not None:
            raise UsageError(wrong)
        resumed = ledger.jobs[spec.resume_of].submitted.spec if spec.resume_of else None
        graphs = await asyncio.to_thread(self._shell.graphs.check, spec, resumed)
        spec = _at_owner(spec, self._shell.scheduler.roster, graphs)
        job = _job_name(spec.name, ledger.jobs.keys() | ledger.forgotten)
        needs = graphs.needs(spec.training)
        await self._shell.ask(ev.Submitted(job, submission, spec, graphs.flops, start, needs))
        return job

    async def MakePlan(self, request: pb.PlanRequest, context: Context) -> pb.PlanReply:  # noqa: N802
        """What would happen with this model on this fleet now; nothing is started."""
        shell = self._shell
        spec = _inquiry_spec(request, from_proto(request.training))
        if not any(not w.member.gone and not w.quarantined for w in shell.scheduler.roster.workers.values()):
            raise NoWorkers("no worker is in the pool; start some with `atoll-worker join`")
        if spec.data.pinned is not None:
            graphs = await asyncio.to_thread(shell.graphs.graphs, spec.dag_hash, spec.eval_dag_hash)
            batch = rows_of(graphs.train.inputs)
            data = pinned_to(replace(spec.data, batch=batch), shell.scheduler.roster, graphs.train.inputs)
            spec = replace(spec, data=data)
        try:
            plan = await shell.planner.inquire(spec, PLAN_WITHIN_S)
        except TimeoutError:
            raise UsageError(f"no plan within {PLAN_WITHIN_S:.0f} s; try again") from None
        now_s = shell.clock()
        names = shell.scheduler.roster.workers
        reply = pb.PlanReply(
            plan=to_proto(plan),
            fleet=[worker_status(shell.scheduler, name, now_s) for name in names],
            links=link_statuses(shell.scheduler),
        )
        return in_names(reply, names_of(shell.scheduler.roster))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:  # noqa: N802
        """Workers, jobs and links now."""
        shell, now_s = self._shell, self._shell.clock()
        scheduler = shell.scheduler
        version = __version__ + ("" if self._authority is not None else " (insecure: no TLS, no tokens)")
        held = names_of(scheduler.roster)
        return pb.StatusReply(
            workers=[
                in_names(worker_status(scheduler, name, now_s), held) for name in scheduler.roster.workers
            ],
            jobs=[self._update(job, with_plan=False) for job in scheduler.jobs],
            links=link_statuses(scheduler),
            version=version,
            uptime_s=time.monotonic() - self._started_s,
            health=health_status(shell),
        )

    async def Watch(self, request: pb.JobRequest, context: Context) -> AsyncIterator[pb.JobUpdate]:  # noqa: N802
        """Updates whenever the job changes, until it has ended; metric points are never skipped."""
        shell = self._shell
        cursor, version, costs_at_s = 0, -1, -COSTS_EVERY_S
        while True:
            self._known(request.job)
            change = shell.change_of(request.job)
            total, points = shell.runs.of(request.job).since(cursor)
            state = shell.scheduler.jobs[request.job]
            sent, cursor = points[:POINTS_AN_UPDATE], total - len(points) + min(len(points), POINTS_AN_UPDATE)
            # The plan is large and rarely changes.
            news = state.version != version
            costs = shell.clock() - costs_at_s >= COSTS_EVERY_S
            update = self._update(request.job, points=sent, with_plan=news, with_costs=costs)
            version = state.version
            costs_at_s = shell.clock() if costs else costs_at_s
            yield update
            if cursor < total:
                continue
            if state.phase in ENDED:
                return
            await asyncio.sleep(UPDATE_EVERY_S)
            try:
                await asyncio.wait_for(change.wait(), UPDATE_AT_LEAST_S)
            except TimeoutError:
                continue

    async def Logs(self, request: pb.LogsRequest, context: Context) -> AsyncIterator[pb.LogLine]:  # noqa: N802
        """Kept lines of a job ("" for everything), then new ones when asked to follow."""
        shell = self._shell
        if request.job:
            self._known(request.job)
        cursor = 0
        while True:
            more = shell.logged
            cursor, lines = shell.logs.after(cursor, request.job)
            for line in lines:
                yield line
            if not request.follow:
                return
            await more.wait()

    async def Cancel(self, request: pb.JobRequest, context: Context) -> pb.JobUpdate:  # noqa: N802
        """Stop a job; its last checkpoint stays."""
        self._known(request.job)
        self._may_end(request.job, "cancel", context)
        self._did(context, "cancel", job=request.job)
        await self._shell.ask(ev.CancelAsked(request.job))
        return self._update(request.job)

    async def ForgetJobs(self, request: pb.ForgetJobsRequest, context: Context) -> pb.Empty:  # noqa: N802
        """Keep nothing of jobs that have ended, none of them where one has not."""
        shell, jobs = self._shell, list(dict.fromkeys(request.jobs))
        async with self._submitting:  # or what goes on from one of them would lose its beginning
            for job in jobs:
                self._known(job)
            for job in jobs:
                self._may_end(job, "forget", context)
                if shell.scheduler.jobs[job].phase not in ENDED:
                    raise UsageError(f"{job} has not ended; stop it first: `atoll cancel {job}`")
            for job in jobs:
                self._did(context, "forget job", job=job)
                # Its files first: when we are killed in between, it is still there to be forgotten again.
                await shell.drop_files(job)
                await shell.ask(ev.ForgetAsked(job))
        return pb.Empty()

    def _may_end(self, job: str, what: str, context: Context) -> None:
        """Whether the caller may cancel or forget a job. Raises AccessDenied."""
        caller, owner = self._caller(context), self._shell.scheduler.jobs[job].spec.owner
        if not caller.may(Role.ADMINISTER) and owner != caller.name:
            raise AccessDenied(
                f"{job} is a job of {owner or 'the first owner'}, and {caller.name} is not; who may "
                f"administer can {what} it"
            )

    async def Result(self, request: pb.ResultRequest, context: Context) -> pb.ResultReply:  # noqa: N802
        """Names and blobs of the job's newest complete state, or of the kept one that is asked for."""
        self._known(request.job)
        shell = self._shell
        state = shell.scheduler.jobs[request.job]
        self._did(context, "result", job=request.job)
        if not shell.scheduler.ledger.jobs[request.job].has_result:
            raise JobFailed(
                f"{request.job} has stored no checkpoint yet (step {state.step} of {state.steps}, "
                f"{state.phase.value}); wait, or submit with --set checkpoint_every=N"
            )
        graphs = await asyncio.to_thread(shell.graphs.graphs, state.spec.dag_hash, state.spec.eval_dag_hash)
        self._known(request.job)  # it may have been forgotten meanwhile
        checkpoint = exported(shell.scheduler.ledger.jobs[request.job], request)
        hidden = set(state.spec.hidden)
        # A federated job's newest model is one file over the tensors that it began with; the server's
        # state holds it too, uncoded.
        model = checkpoint.tensors.get(STATE, "")
        tensors = state.spec.tensors if model else peer_tensors.model(checkpoint.tensors)
        return pb.ResultReply(
            step=checkpoint.step,
            model=model,
            prefix=exported_prefix(state.spec.federated),
            tensors=[job_pb.TensorBlob(name=n, blob=tensors[n]) for n in sorted(tensors) if n not in hidden],
            aliases=[
                job_pb.Alias(alias=alias, name=name)
                for alias, name in sorted(graphs.train.aliases.items())
                if name not in hidden
            ],
            update=self._update(request.job),
        )

    async def Trace(self, request: pb.TraceRequest, context: Context) -> AsyncIterator[pb.TraceChunk]:  # noqa: N802
        """Every kept span of the job, or those of its last steps."""
        self._known(request.job)
        if request.last_steps:
            for recent in self._shell.runs.of(request.job).recent(request.last_steps):
                yield recent
            return
        chunks = self._shell.runs.of(request.job).chunks()
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk

    async def Metrics(self, request: pb.JobRequest, context: Context) -> AsyncIterator[pb.FileChunk]:  # noqa: N802
        """The job's metrics.csv, as it is now."""
        self._known(request.job)
        run = self._shell.runs.of(request.job)
        run.flush()
        chunks = run.metrics()
        while (data := await asyncio.to_thread(next, chunks, None)) is not None:
            yield pb.FileChunk(data=data)

    async def Checkpoints(self, request: pb.CheckpointsRequest, context: Context) -> pb.CheckpointList:  # noqa: N802
        """The states of a job that can be gone back to, oldest first, and what is wrong with each."""
        self._known(request.job)
        step = request.step if request.HasField("step") else None
        found = chosen(self._shell.scheduler.ledger.jobs[request.job], step)
        listed = await asyncio.to_thread(described, self._shell, request.job, found, hashes=request.verify)
        return pb.CheckpointList(checkpoints=listed)

    async def Credits(self, request: pb.CreditsRequest, context: Context) -> pb.CreditList:  # noqa: N802
        """What workers have given to whose jobs by day, from committed facts."""
        return pb.CreditList(
            credits=credits_of(self._register, self._shell.scheduler.ledger, request.since_s)
        )

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.SubmitReply:  # noqa: N802
        """Queue a job that goes on from a kept checkpoint of another; nothing is uploaded."""
        self._known(request.job)
        old = self._shell.scheduler.ledger.jobs[request.job]
        spec = old.submitted.spec
        steps = request.steps if request.HasField("steps") else spec.training.steps
        training = replace(spec.training, steps=steps)
        owner = self._caller(context).name
        spec = replace(spec, resume_of=request.job, training=training, owner=owner)
        self._did(context, "restore", job=request.job, step=request.step)
        (start,) = chosen(old, request.step)
        wrong = await asyncio.to_thread(self._shell.graphs.torn, spec, start.tensors)
        if wrong:
            raise StorageError(f"{wrong}; `atoll checkpoints {request.job}` shows the others")
        async with self._submitting:
            job = await self._submit(spec, clean(request.submission, 100), start)
        return pb.SubmitReply(job=job, update=self._update(job))

    def _known(self, job: str) -> None:
        jobs = self._shell.scheduler.jobs
        if job not in jobs:
            known = ", ".join(list(jobs)[-5:]) or "none"
            raise UsageError(f"no job {job[:80]!r}; the newest are: {known}")

    def _update(
        self, job: str, *, points: Any = (), with_plan: bool = True, with_costs: bool = True
    ) -> pb.JobUpdate:
        shell = self._shell
        update = job_update(
            shell.scheduler,
            job,
            shell.clock(),
            commit_s=shell.commit_median_s(job),
            points=points,
            with_plan=with_plan,
            with_costs=with_costs,
        )
        return in_names(update, names_of(shell.scheduler.roster))

    # ------------------------------------------------------------ tokens and members

    async def CreateToken(self, request: pb.CreateTokenRequest, context: Context) -> pb.TokenReply:  # noqa: N802
        """A token with which workers join."""
        token = self._tokens.new("workers join without a token")
        self._did(context, "create token", token=token_id(token.presented))
        info = self._tokens.admit(token, clean(request.name, 100), request.lifetime_s, request.max_uses)
        return pb.TokenReply(info=_token_info(info), token=token.encode())

    async def ListTokens(self, request: pb.Empty, context: Context) -> pb.TokenList:  # noqa: N802
        """Every token, without its secret."""
        return pb.TokenList(tokens=[_token_info(token) for token in self._register.tokens.values()])

    async def RevokeToken(self, request: pb.TokenRequest, context: Context) -> pb.Empty:  # noqa: N802
        """Nobody joins with it any more; who has joined stays."""
        if request.id not in self._register.tokens:
            raise UsageError(f"no token {request.id[:80]!r}; `atoll token list` shows them")
        self._did(context, "revoke token", token=request.id)
        self._write(Record(Event.TOKEN_REVOKED, self._shell.clock(), {"id": request.id}))
        self._shell.note(Event.TOKEN_REVOKED, token=request.id)
        return pb.Empty()

    async def Kick(self, request: pb.KickRequest, context: Context) -> pb.Empty:  # noqa: N802
        """Make a worker leave; for good: its certificate opens nothing any more."""
        reason = clean(request.reason, 500)
        if machine_of(request.worker) not in self._register.workers:
            raise UsageError(f"no worker {request.worker[:80]!r}; `atoll status` lists them")
        self._did(context, "kick", worker=request.worker, for_good=request.for_good, reason=reason)
        payload = {"worker": request.worker, "reason": reason, "for_good": request.for_good}
        self._write(Record(Event.WORKER_KICKED, self._shell.clock(), payload))
        await self._shell.ask(ev.KickAsked(request.worker, reason, request.for_good))
        return pb.Empty()

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.Empty:  # noqa: N802
        """Strike a worker that is not here from the register: its certificate opens nothing any more."""
        worker = self._register.named(request.worker)
        if any(machine_of(connected) == worker for connected in self._shell.outboxes):
            raise UsageError(f"{worker} is connected; `atoll kick {worker}` makes it leave first")
        self._did(context, "forget", worker=worker)
        payload = {"worker": worker, "reason": "forgotten", "for_good": True, "forgotten": True}
        self._write(Record(Event.WORKER_KICKED, self._shell.clock(), payload))
        self._shell.note(Event.WORKER_FORGOTTEN, worker=worker)
        # Peers may hold its certificate for good until they hear of it.
        await self._shell.ask(ev.KickAsked(worker, "forgotten by the owner", True))
        return pb.Empty()

    # ------------------------------------------------------------ owners

    async def CreateOwner(self, request: pb.OwnerRequest, context: Context) -> pb.OwnerReply:  # noqa: N802
        """A token of its own for another owner."""
        token = self._tokens.new("there are no tokens, nor owners")
        role = bounds.one_of("role", request.role, Role)
        self._did(context, "create owner", name=clean(request.name, 60), role=role)
        made = self._owners.create(clean(request.name, 60), role, token.presented, _quota(request.quota))
        return pb.OwnerReply(info=_owner_info(made), token=token.encode())

    async def ListOwners(self, request: pb.Empty, context: Context) -> pb.OwnerList:  # noqa: N802
        """Every owner, without secrets."""
        return pb.OwnerList(owners=[_owner_info(owner) for owner in self._owners.all()])

    async def RevokeOwner(self, request: pb.OwnerRequest, context: Context) -> pb.Empty:  # noqa: N802
        """An owner's token opens nothing any more; its jobs stay."""
        self._did(context, "revoke owner", name=clean(request.name, 60))
        self._owners.revoke(request.name)
        return pb.Empty()

    # ------------------------------------------------------------ the authority

    async def ListAuthorities(self, request: pb.Empty, context: Context) -> pb.AuthorityList:  # noqa: N802
        """Authorities that are trusted now, and who has no certificate of the newest one."""
        return self._authorities(self._authority_here())

    async def RotateAuthority(  # noqa: N802
        self, request: pb.RotateAuthorityRequest, context: Context
    ) -> pb.AuthorityList:
        """Begin to exchange the authority for a new one; both are trusted meanwhile."""
        authority = self._authority_here()
        self._did(context, "rotate authority", overlap_s=request.overlap_s)
        authority.rotate(request.overlap_s, self._shell.clock())
        return self._authorities(authority)

    async def DropAuthority(self, request: pb.DropAuthorityRequest, context: Context) -> pb.AuthorityList:  # noqa: N802
        """End an exchange now: the older authority is trusted no more."""
        authority = self._authority_here()
        behind = _behind(self._register, authority)
        if behind and authority.exchanging and not request.anyway:
            raise UsageError(
                f"{len(behind)} workers hold no certificate of the new authority yet, first {behind[0]}: "
                "they would have to join again with a token; wait for them, or give --anyway"
            )
        self._did(context, "drop authority", behind=len(behind))
        authority.drop()
        return self._authorities(authority)

    def _authority_here(self) -> Authorities:
        if self._authority is None:
            raise UsageError("this coordinator runs with --insecure: there is no authority")
        return self._authority

    def _authorities(self, authority: Authorities) -> pb.AuthorityList:
        ends = (0.0, authority.ends_s)  # of the newest, of the one before it
        listed = [
            pb.AuthorityInfo(
                fingerprint=fingerprint(one.certificate_pem), since_s=one.since().timestamp(), ends_s=ends_s
            )
            for one, ends_s in zip(authority.trusted, ends, strict=False)
        ]
        return pb.AuthorityList(
            authorities=listed, ca_pem=authority.trusted_pem, behind=_behind(self._register, authority)
        )

    def _caller(self, context: Context) -> Owner:
        return self._owners.calling(context.invocation_metadata())

    def _did(self, context: Context, what: str, **facts: Any) -> None:
        """Log a call that changes or takes something, before it does. Raises StorageError."""
        self._owners.did(self._caller(context), what, clean(context.peer() or "", 100), **facts)

    def _write(self, record: Record) -> None:
        self._shell.journal.append([record])
        self._register.apply(record)


def _behind(register: Register, authority: Authorities) -> list[str]:
    """Workers that may come but hold no certificate of the newest authority."""
    known = register.workers.values()
    return sorted(w.worker for w in known if not w.barred and not authority.holds_newest(w.worker))


def _job_name(name: str, taken: set[str]) -> str:
    """``gpt-3``: the job's own name and a number that is free."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "job"
    return next(f"{stem}-{n}" for n in itertools.count(1) if f"{stem}-{n}" not in taken)


def _inquiry_spec(request: pb.PlanRequest, training: TrainingSpec) -> JobSpec:
    partitioner = request.partitioner or "op_fence"
    known_partitioner(partitioner)
    check_compression(training.compression)
    pinned = coding.read(PinnedData, request.pinned) if request.HasField("pinned") else None
    nothing = DataSpec((), 1, 1, pinned=pinned)
    return JobSpec(
        "plan",
        training,
        request.dag_hash,
        request.eval_dag_hash,
        {},
        nothing,
        None,
        partitioner,
        request.schedule or "auto",
        standbys=(
            bounds.within("standbys", request.standbys, 0, MAX_STANDBYS)
            if request.HasField("standbys")
            else None
        ),
    )


def _owner_info(owner: Owner) -> pb.OwnerInfo:
    info: pb.OwnerInfo = coding.alike(owner, pb.OwnerInfo, quota=coding.alike(owner.quota, pb.OwnerQuota))
    return info


def _at_owner(spec: JobSpec, roster: Roster, graphs: Graphs) -> JobSpec:
    """Return a job with the worker that has its data, where these are pinned."""
    if spec.data.pinned is None:
        return spec
    check_pinned(spec.training)
    return replace(spec, data=pinned_to(spec.data, roster, graphs.train.inputs))


def _quota(said: pb.OwnerQuota) -> Quota:
    if not 0.0 <= said.weight <= 1000.0:
        raise UsageError(f"weight {said.weight}; give a number up to 1000")
    workers, jobs = (
        bounds.within("workers", said.workers, 0, 10**6),
        bounds.within("jobs", said.jobs, 0, 10**6),
    )
    return Quota(workers, jobs, said.weight or 1.0)


def _token_info(token: Token) -> pb.TokenInfo:
    info: pb.TokenInfo = coding.alike(token, pb.TokenInfo)
    return info
