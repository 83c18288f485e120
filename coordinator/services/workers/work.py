"""The Work service: one stream a worker, its messages to events, the scheduler's words back."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from atoll.errors import (
    AccessDenied,
    AtollError,
    BadFrame,
    ConnectionFailed,
    ProtocolMismatch,
    StorageError,
    UsageError,
)
from atoll.messages.to_worker import Welcome
from atoll.version import __version__
from coordinator.membership.addresses import passed_on
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.pipeline.history import current
from coordinator.services.access.callers import host_of, network_of, worker_of
from coordinator.services.blobs.gathering import JOB as GATHERING
from coordinator.services.blobs.gathering import Gathering
from coordinator.services.blobs.rights import StageRole, leaves_of, put_by, role_of
from coordinator.services.owners.views import credits_of
from coordinator.services.workers.resolving import resolved
from coordinator.services.workers.wire import (
    introduction_from,
    message_from,
    no_way,
    probe_ops_message,
    to_worker,
)
from coordinator.shell import Outbox, Shell
from hostos.budget import REFUSALS, REFUSALS_PER_S, Budget
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.connections import Known
from protos.devices import machine_of
from protos.grpc_errors import refuse
from protos.message_sizes import COUNTED_FROM, read
from protos.receipts import MOST_ROWS, signed, stated
from protos.session import said_to_worker
from protos.telemetry import Event
from protos.text_limits import LINE_CHARS, LINES_CHARS, LINES_CHARS_PER_S, clean

if TYPE_CHECKING:
    from coordinator.services.access.authorities import Authorities
    from coordinator.services.access.interceptor import Calls
    from coordinator.services.access.register import Register

    Context = grpc.aio.ServicerContext[Any, Any]

INTRODUCTION_WITHIN_S = 10.0
MAX_LOG_FIELDS_CHARS = 8192
MAX_SPANS_A_MESSAGE = 20_000
REPLACED = (
    "another process has taken over this worker's session: it runs from a copy of the same state folder; "
    "give each worker a folder of its own, and join again from this one with a token"
)
_sessions = itertools.count(1)

log = structlog.get_logger()


def _place(context: Context) -> str:
    """What a worker's sessions are counted by: its address; on this machine each caller by itself."""
    host = host_of(context)
    try:
        near = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        near = True
    return context.peer() or "" if near else network_of(context)


async def _parsed(message: bytes) -> pb.FromWorker:
    """Raises BadFrame."""
    if len(message) <= COUNTED_FROM:
        return read(pb.FromWorker, message)
    return await asyncio.to_thread(read, pb.FromWorker, message)


class WorkService(rpc.WorkServicer):
    """Sessions of enrolled workers."""

    def __init__(
        self,
        shell: Shell,
        register: Register,
        authority: Authorities | None,
        calls: Calls,
        sessions: Calls,
        known: Known | None = None,
        gathering: Gathering | None = None,
    ) -> None:
        """``authority`` None: the coordinator runs without TLS, and workers say who they are. ``calls`` are
        counted by worker, ``sessions`` by address; ``known``: connections of workers that were admitted."""
        self._shell = shell
        self._register = register
        self._authority = authority
        self._insecure = authority is None
        self._calls, self._sessions = calls, sessions
        self._known = known or Known()
        self._gathering = gathering or Gathering(shell)
        self._lines: dict[str, Budget] = {}  # of every worker that ever came
        self._refusals = Budget(REFUSALS, REFUSALS_PER_S)

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> None:
        """A worker's stream, from its introduction until either side ends it; its messages come unparsed."""
        try:
            worker = worker_of(context, self._insecure)
            with self._calls.one_of(worker), self._sessions.one_of(_place(context)):
                introduction = await self._admit(worker, request_iterator, context)
                self._known.add(context.peer() or "")
                await self._serve(worker, introduction, request_iterator, context)
        except AtollError as error:
            self._say_refused(context, error)
            await refuse(context, error)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:  # noqa: N802
        """A new certificate for an enrolled worker's new key; that it may call at all was checked before."""
        worker, authority = machine_of(worker_of(context, self._insecure)), self._authority
        if authority is None:
            raise UsageError("this coordinator runs with --insecure: there are no certificates")
        certificate = authority.sign(request.csr_pem, worker)
        log.info(Event.CERTIFICATE_RENEWED.value, worker=worker)
        return pb.RenewReply(certificate_pem=certificate, ca_pem=authority.trusted_pem)

    async def Given(self, request: pb.Empty, context: Context) -> pb.CreditList:  # noqa: N802
        """What the calling machine has given by day, all of its devices."""
        machine = machine_of(worker_of(context, self._insecure))
        return pb.CreditList(credits=credits_of(self._register, self._shell.scheduler.ledger, 0.0, machine))

    async def Receipt(self, request: pb.Empty, context: Context) -> pb.ReceiptReply:  # noqa: N802
        """A signed statement of what the calling machine has given. Without TLS nobody could check it."""
        if self._authority is None:
            raise UsageError("this coordinator runs with --insecure: nobody could check a receipt")
        machine = machine_of(worker_of(context, self._insecure))
        given = self._shell.scheduler.ledger.given()
        rows = [row.shown() for row in given if machine_of(row.worker) == machine][:MOST_ROWS]
        known = self._register.workers.get(machine)
        statement = stated(machine, known.name if known is not None else "", self._shell.clock(), rows)
        receipt = signed(statement, self._authority.newest)
        return pb.ReceiptReply(
            statement=statement, signature=receipt.signature, authority_pem=receipt.authority_pem
        )

    async def _serve(
        self,
        worker: str,
        introduction: ev.Introduction,
        requests: AsyncIterator[bytes],
        context: Context,
    ) -> None:
        shell = self._shell
        liveness = shell.config.liveness
        idle_s = liveness.idle_heartbeat_s(len(shell.outboxes) + 1)
        welcome = Welcome(worker, liveness.heartbeat_s, idle_s, shell.journal.term, shell.clock())
        await context.write(said_to_worker(welcome))
        authority = self._authority
        if authority is not None and authority.exchanging:  # it may have begun since the worker's greeting
            left_s = authority.left_s(shell.clock())
            trusted = do.TrustAuthorities(authority.trusted_pem, left_s)
            await context.write(to_worker(trusted, shell.graphs, no_way))
        outbox = Outbox(worker, next(_sessions), asyncio.Queue(), asyncio.current_task())
        shell.attach(outbox)
        shell.post(ev.SessionOpened(worker, outbox.session, introduction))
        who = {"worker": worker, "name": introduction.name, "session": outbox.session}
        log.info(Event.SESSION_OPENED.value, **who)
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            while (message := await outbox.queue.get()) is not None:
                converted = await self._converted(worker, message)
                if converted is not None:
                    await context.write(converted)
        except asyncio.CancelledError:
            if not outbox.overdue:
                raise
        finally:
            reader.cancel()
            if shell.outboxes.get(worker) is outbox:
                del shell.outboxes[worker]
            shell.post(ev.SessionClosed(worker, outbox.session))
            log.info(Event.SESSION_CLOSED.value, **who, reason=outbox.reason)
        if outbox.replaced:
            # A worker opens its next session after the end of the last: who still listens is another process.
            await refuse(context, AccessDenied(REPLACED))
        if outbox.overdue:
            await refuse(context, ConnectionFailed(outbox.reason))

    async def _admit(self, worker: str, requests: AsyncIterator[bytes], context: Context) -> ev.Introduction:
        barred = self._register.refusal(worker)
        if barred is not None:
            raise AccessDenied(barred)
        try:
            unread = await asyncio.wait_for(anext(aiter(requests)), INTRODUCTION_WITHIN_S)
        except (StopAsyncIteration, TimeoutError):
            raise BadFrame("the session ended before its introduction") from None
        first = await _parsed(unread)
        if first.WhichOneof("body") != "introduction":
            raise BadFrame(f"the first message is {first.WhichOneof('body')}, not an introduction")
        theirs = first.introduction.protocol
        if theirs != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"protocol mismatch: the coordinator (atoll {__version__}) speaks protocol "
                f"{PROTOCOL_VERSION}, this worker {theirs}; update the older of the two"
            )
        introduction = introduction_from(first.introduction)
        return await self._placed(worker, introduction, host_of(context))

    async def _placed(self, worker: str, introduction: ev.Introduction, seen: str) -> ev.Introduction:
        """With those of its addresses that others may be asked to dial."""
        stated = introduction.addresses
        addresses, nearby = passed_on(await resolved(stated), seen)
        if stated and not addresses:
            who = {"worker": worker, "name": introduction.name}
            log.warning("session.addresses_withheld", **who, seen=seen, stated=stated)
        return replace(introduction, addresses=addresses, nearby=nearby, seen=seen)

    def _say_refused(self, context: Context, error: AtollError) -> None:
        shell = self._shell
        if not self._refusals.take(shell.clock()):
            return
        fields: dict[str, Any] = {"peer": clean(context.peer() or "", 200), "reason": clean(str(error), 500)}
        if left_out := self._refusals.refused():
            fields["left_out_before"] = left_out
        shell.note(Event.SESSION_REFUSED, "warning", **fields)

    async def _read(self, requests: AsyncIterator[bytes], outbox: Outbox) -> None:
        worker, session, shell = outbox.worker, outbox.session, self._shell
        try:
            async for unread in requests:
                try:
                    request = await _parsed(unread)
                    message = message_from(request)
                    if message is None:
                        self._note(worker, request)
                        continue
                except AtollError as error:
                    message = ev.Malformed(f"{worker} sent a malformed message: {error}")
                if isinstance(message, ev.CopyStored) and message.job == GATHERING:
                    self._gathering.answered(worker, message)
                    continue
                if isinstance(message, ev.CopyStored):
                    message = await self._with_copy_checked(worker, message)
                if isinstance(message, ev.StateStored):
                    await self._stored(worker, session, message)
                else:
                    shell.post(ev.Arrived(worker, session, message))
        except grpc.aio.AioRpcError as error:
            outbox.reason = outbox.reason or str(error.details())
        finally:
            outbox.queue.put_nowait(None)

    async def _stored(self, worker: str, session: int, message: ev.StateStored) -> None:
        """Check a report and wait until it is handled; its blobs give way to no other upload meanwhile."""
        shell, names = self._shell, set(message.tensors.values())
        role = role_of(shell.scheduler, shell.graphs, worker)
        if not (
            isinstance(role, StageRole)
            and role.state.job == message.job
            and current(role.state, message.version)
        ):
            shell.promises.reported(worker, names)
            shell.post(ev.Arrived(worker, session, message))  # too late to count
            return
        shell.reported.update(names)
        try:
            try:
                checked: ev.PeerMessage = await self._with_blobs_checked(message, role)
            except AtollError as error:
                checked = ev.Malformed(f"{worker} sent a malformed message: {error}")
            with contextlib.suppress(StorageError):  # the shell says it, and stops the jobs
                await shell.ask(ev.Arrived(worker, session, checked))
        finally:
            shell.promises.reported(worker, names)
            shell.reported.subtract(names)
            shell.reported += Counter()  # those of count 0 go

    async def _with_blobs_checked(self, message: ev.StateStored, role: StageRole) -> ev.StateStored:
        """A stage's word is not enough: its blobs must be whole in the store, and hold the tensors that
        it stores, no others; one that a stage before it stores too is that one's to say."""
        shell = self._shell
        n_bytes, shared = 0, frozenset[str]()

        def look() -> tuple[str, str]:
            nonlocal n_bytes, shared
            named = {} if message.kept else message.tensors
            absent = [name for name, blob in named.items() if not shell.blobs.has(blob)]
            if absent:
                return f"{len(absent)} of its blobs are not in the store, first {absent[0]!r}", ""
            if message.error:
                return message.error, ""
            own, shared = role.snapshot(), role.shared()
            lacking = own.keys() - message.tensors.keys()
            if lacking:
                return "", f"{len(lacking)} tensors of its stage are not in it, first {min(lacking)!r}"
            if message.kept:  # on its own disk: what these are is looked at when they come
                beyond = message.tensors.keys() - own.keys() - shared
                return "", f"{min(beyond)!r} is not a tensor that its stage stores" if beyond else ""
            n_bytes = sum(map(shell.blobs.held, set(message.tensors.values())))
            forged = shell.graphs.forged(message.tensors, own)
            if forged and not all(map(shell.blobs.has, message.tensors.values())):
                return forged, ""  # it rotted here, and is dropped
            return "", forged

        try:
            error, forged = await asyncio.to_thread(look)
        except StorageError as failed:  # the store's failure, and none of the worker's
            error, forged = str(failed), ""
        if not error and not forged:
            tensors = {name: blob for name, blob in message.tensors.items() if name not in shared}
            return replace(message, tensors=tensors, n_bytes=n_bytes)
        return replace(message, tensors={}, error=error, forged=forged)

    async def _with_copy_checked(self, worker: str, message: ev.CopyStored) -> ev.CopyStored:
        """A part of a snapshot counts as one of a checkpoint does: when its blobs are whole in the store, and
        are what the stage stores."""
        shell = self._shell
        copies = put_by(shell.scheduler, worker)
        copy = next((copy for copy in copies if copy.name == message.name), None)
        if copy is None or message.error:
            return message
        found = copy

        def look() -> str:
            try:
                if not all(map(shell.blobs.has, found.tensors.values())):
                    return "its blobs are not in the store"
                return shell.graphs.forged(found.tensors, leaves_of(shell.graphs, found.plan, found.rank))
            except AtollError as failed:
                return str(failed)

        return replace(message, error=await asyncio.to_thread(look))

    async def _converted(self, worker: str, message: do.Message) -> pb.ToWorker | None:
        """The message as pb2; what needs a DAG is built in a thread."""
        shell = self._shell
        if isinstance(message, do.ProbeOps):
            if not message.signatures:
                return probe_ops_message(message, {})
            spec = shell.scheduler.spec_of(message.job) or shell.planner.inquired(message.job)
            if spec is None:
                return None
            dags = spec.dag_hash, spec.eval_dag_hash
            return await asyncio.to_thread(
                lambda: probe_ops_message(message, dict(shell.graphs.graphs(*dags).probes))
            )
        way = partial(shell.relays.way, worker) if shell.relays is not None else no_way
        if isinstance(message, do.Assign | do.Participate | do.KeepCopies):
            return await asyncio.to_thread(to_worker, message, shell.graphs, way)
        return to_worker(message, shell.graphs, way)

    def _note(self, worker: str, request: pb.FromWorker) -> None:
        """Spans and log lines: kept for people, bounded, deciding nothing."""
        shell = self._shell
        if request.WhichOneof("body") == "log":
            line = request.log
            fields: dict[str, Any] = {
                "event": clean(line.event, 200),
                "fields": clean(line.fields_json, MAX_LOG_FIELDS_CHARS),
            }
            budget = self._lines.setdefault(worker, Budget(LINES_CHARS, LINES_CHARS_PER_S))
            size = LINE_CHARS + sum(len(text) for text in fields.values())
            if not budget.take(shell.clock(), size):
                return
            if left_out := budget.refused():
                fields["left_out_before"] = left_out
            shell.say(
                Event.WORKER_LOG.value,
                clean(line.level, 16),
                clean(line.job, 200),
                worker,
                fields,
                shell.clock(),
            )
            return
        spans = request.spans
        if len(spans.spans) > MAX_SPANS_A_MESSAGE:
            raise BadFrame(f"{len(spans.spans)} spans in one message; at most {MAX_SPANS_A_MESSAGE}")
        if shell.scheduler.spec_of(spans.job, worker) is None:
            return
        known = shell.scheduler.roster.workers.get(worker)
        offset_s = known.clock_offset_s if known is not None else None
        if offset_s is None:  # before its first heartbeat: its clock began anywhere, and they have just ended
            offset_s = shell.clock() - max((s.end_s for s in spans.spans if isfinite(s.end_s)), default=0.0)
        shell.runs.of(spans.job).traced(pb.TraceChunk(worker=worker, clock_offset_s=offset_s, spans=spans))
