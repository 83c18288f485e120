"""The coordinator process: two ports, one shell, and an orderly end.

The entry port (server TLS) takes Entry without a token, Owner and Blobs with the owner's. The
work port (client certificate required) takes Work, Blobs and Data. gRPC in Python cannot ask
for an optional client certificate, hence two. torch is never imported here.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc
import structlog

from atoll.errors import StorageError, UsageError
from atoll.version import __version__
from coordinator.apps.hub import AppDesk
from coordinator.apps.service import NodeApps, OwnerApps
from coordinator.config import CoordinatorConfig
from coordinator.messages import instructions as do
from coordinator.messages.instructions import Addresses
from coordinator.relay.book import RelayLimits
from coordinator.relay.server import Relay
from coordinator.services.access.authorities import Authorities
from coordinator.services.access.interceptor import Calls, EntryAccess, EntryThrottle, WorkerAccess
from coordinator.services.access.owners import Owners
from coordinator.services.access.tokens import Tokens
from coordinator.services.backup import drop_holdings
from coordinator.services.blobs.gathering import Gathering
from coordinator.services.blobs.service import BlobService, OwnerRights, WorkerRights
from coordinator.services.blobs.sweep import sweep_for_ever
from coordinator.services.doors import Door, StageData
from coordinator.services.owners.service import OwnerService
from coordinator.services.prometheus import Exporter
from coordinator.services.recovery import SNAPSHOT_EVERY, Folded, recover
from coordinator.services.workers.relay_ways import RelayWays
from coordinator.services.workers.work import WorkService
from coordinator.shell import Shell, scheduler_for
from coordinator.storage.data_provider import DataProvider
from coordinator.storage.graph_store import GraphStore
from coordinator.storage.journal import Fenced, Journal
from coordinator.storage.mirrored_blobs import blob_store
from coordinator.storage.run_log import Logs, RunLogs
from hostos.allotted import COORDINATOR_THREADS, check_threads
from hostos.descriptors import limit_now, numbers_in_use, raise_limit, shares
from hostos.files.folder_lock import FolderLock, Holder
from hostos.files.folder_version import claim_version, raise_version
from hostos.files.private_files import state_folder
from hostos.log_stream import LogBudget, log_stream
from hostos.net.addresses import join_address, parse_address
from hostos.net.networks import ANYWHERE
from hostos.signals import endings
from protos import atoll_apps_pb2_grpc as apps_rpc
from protos import atoll_control_pb2_grpc as rpc
from protos.connections import ConnectionBound, Known, PortBound
from protos.credentials import (
    CurrentIdentity,
    JoinToken,
    fingerprint,
    join_command,
    secret_hash,
    server_credentials,
)
from protos.relay_tickets import made_key_file
from protos.telemetry import Event

LOCK_FILE = "serving"
KEPT = ("journal.sqlite", "blobs", "ca", "address.json", LOCK_FILE)  # by which a state folder is known as one
FOLDER_VERSION = 5  # raised as docs/decisions/023-versions-of-wire-and-disk.md says
OLDEST_FOLDER = 1  # that is read as it is
MAX_STREAMS = 128  # of one connection to the entry port
CONNECTIONS_A_SESSION = 4  # of a worker: the session, blobs, those before a renewal, apps
SCRAPERS = 8  # connections to the metrics' port
SPARE_DESCRIPTORS = 1024  # beside a session of every worker: newcomers, owners, files
MAX_PORT = 65535
GRACE_S = 0.3  # for calls in progress when the server stops
COMMAND_CHECK_S = 2.0  # a coordinator that nobody uses notices so late that another commands
COMMAND_ANSWER_S = 30.0
RENEWAL_CHECK_S = 3600.0
RENEW_AFTER = dt.timedelta(days=7)  # of the coordinator's own certificate
FOLD_CHECK_S = 1.0
FOLD_AGAIN_S = 60.0  # after one that could not be written
FULL_COLLECTION_AFTER = 100  # collections of the middle generation

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Started:
    """A coordinator that takes calls. ``join_token`` and ``owner_token`` are None without TLS."""

    entry_port: int
    work_port: int
    join_command: str
    join_token: str | None
    owner_token: str | None
    relay_port: int | None = None  # None: no relay here


class Server:
    """One coordinator inside a running event loop: ``start``, then ``stop``.

    It holds its state folder's lock from the constructor to ``stop``: of two coordinators on one folder
    each would delete what the other needs. UsageError names the one that is there.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        state_folder(config.state_dir, KEPT)
        claim_version(config.state_dir, FOLDER_VERSION, ("blobs",), OLDEST_FOLDER)
        self._lock = FolderLock(config.state_dir / LOCK_FILE, partial(_refusal, config.state_dir))
        try:
            raise_version(config.state_dir, FOLDER_VERSION)
            self.journal = Journal(config.journal_url)
        except BaseException:
            self._lock.release()
            raise
        try:
            self._restore()
        except BaseException:
            self.journal.close()
            self._lock.release()
            raise

    def _restore(self) -> None:
        """Everything that the state folder holds, read back."""
        config = self.config
        drop_holdings(config.state_dir)
        begun_s, begun = time.time(), time.monotonic()
        # Wall time that never jumps, so that silence is measured truly.
        self._clock: Callable[[], float] = lambda: begun_s + (time.monotonic() - begun)
        self.journal.claim(self._clock())
        folded = recover(self.journal, config.keep_checkpoints)
        self.ledger, self.register = folded.ledger, folded.register
        self.ledger.take_superseded()
        if folded.records >= SNAPSHOT_EVERY:
            self.journal.fold(folded.number, folded.encoded(), self._clock())
        else:
            self.journal.unfolded = folded.records
        self.blobs = blob_store(
            config.blob_dir, config.blobs_url, config.max_blob_bytes, config.blob_quota_bytes
        )
        lifetime = dt.timedelta(seconds=config.certificate_lifetime_s)
        folder = config.state_dir / "ca"
        self.authority = None if config.insecure else Authorities(folder, lifetime, self._clock())
        self.shell = Shell(
            config,
            scheduler_for(config, self.ledger, self._clock()),
            self.journal,
            self.blobs,
            GraphStore(self.blobs),
            self._clock,
            Logs(config.log_lines),
            RunLogs(config.runs_dir, config.trace_bytes),
        )
        self._gathering = Gathering(self.shell)
        made = self.authority.server_identity() if self.authority is not None else None
        self.identity = CurrentIdentity(made) if made is not None else None
        self.shell.restored(folded.records)
        self.desk = AppDesk(self.shell)
        self.exporter: Exporter | None = None
        self.relay: Relay | None = None
        self._relays: Addresses = ()
        self._servers: list[grpc.aio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._exchanged = asyncio.Event()

    async def start(self) -> Started:
        """Listen. UsageError when a port is taken, StorageError when the disk refuses."""
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> Started:
        config = self.config
        identity = self.identity
        self._shares = shares(limit_now(), len(numbers_in_use()), relay=config.relaying.port is not None)
        wanted = config.work_port or (config.entry_port + 1 if config.entry_port else 0)
        work_port = await self._serve_work(wanted, identity)
        relay_port = await self._serve_relays(work_port)
        tokens = Tokens(self.shell, self.register, self.authority, work_port)
        if self.authority is not None:
            self.authority.changed = partial(self._authorities_changed, self.authority, tokens)
        owner_token = tokens.owner_token()
        first = secret_hash(JoinToken.decode(owner_token).presented) if owner_token else None
        owners = Owners(config.state_dir, first, self._clock)
        owners.changed = lambda: self.shell.scheduler.allow(owners.quotas())
        owners.changed()
        owner = OwnerService(self.shell, self.register, self.authority, tokens, owners)
        entry_port = await self._serve_entry(config.entry_port, identity, owner, owners, work_port)
        if config.metrics_port is not None:
            book = self.relay.book if self.relay is not None else None
            self.exporter = Exporter(self.shell, config.metrics_host, config.metrics_port, book)
        bound = self._connection_bound(entry_port, work_port)
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                self.shell.run(),
                self.shell.tick(),
                self._command(),
                self._fold_now_and_then(),
                self._renew_now_and_then(),
                bound.keep(),
                sweep_for_ever(self.shell),
            )
        ]
        self._lock.note(join_address(config.host, entry_port))
        join_token = tokens.join_token()
        log.info(
            Event.SERVER_STARTED.value,
            version=__version__,
            term=self.journal.term,
            entry_port=entry_port,
            work_port=work_port,
            insecure=config.insecure,
        )
        if config.insecure:
            log.warning("server.insecure", note="no TLS, no tokens: for experiments on this machine only")
        return Started(
            entry_port,
            work_port,
            self._join_command(entry_port, join_token),
            join_token,
            owner_token,
            relay_port,
        )

    async def broken(self) -> None:
        """Wait until one of the tasks that must never end has ended; raises what ended it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _command(self) -> None:
        """Look now and then whether this coordinator still commands; Fenced ends it."""
        while True:
            await asyncio.sleep(COMMAND_CHECK_S)
            try:
                await asyncio.wait_for(asyncio.to_thread(self.journal.check), COMMAND_ANSWER_S)
            except TimeoutError:
                raise Fenced(
                    f"the journal's database did not answer within {COMMAND_ANSWER_S:.0f} s: another "
                    "coordinator may command by now; this one ends, start it again when the database answers"
                ) from None

    async def _fold_now_and_then(self) -> None:
        """Keep snapshots of the journal, so that a start reads little of it."""
        while True:
            await asyncio.sleep(FOLD_CHECK_S)
            if self.journal.unfolded < SNAPSHOT_EVERY or not self.shell.settled:
                continue
            try:
                # All that was decided is on the disk; what will be while the copy is encoded is not in it.
                copy = Folded(self.ledger, self.register, self.journal.last_number()).copy()
                text = await asyncio.to_thread(copy.encoded)
                self.journal.fold(copy.number, text, self._clock())
            except Fenced:
                raise
            except StorageError as error:
                log.warning(Event.STORAGE_FAILED.value, reason=str(error))
                await asyncio.sleep(FOLD_AGAIN_S)

    async def _renew_now_and_then(self) -> None:
        while True:
            self._exchanged.clear()
            left_s = self.authority.left_s(self._clock()) if self.authority is not None else 0.0
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._exchanged.wait(), min(RENEWAL_CHECK_S, left_s or RENEWAL_CHECK_S)
                )
            try:
                if self.authority is not None:
                    self.authority.end_if_due(self._clock())
                self.renew(dt.datetime.now(dt.UTC))
            except StorageError as error:
                log.warning(Event.STORAGE_FAILED.value, reason=str(error))
                await asyncio.sleep(FOLD_AGAIN_S)

    def _authorities_changed(self, authority: Authorities, tokens: Tokens) -> None:
        """Have everybody who is here trust the authorities that count from now on, and those alone."""
        if self.identity is not None:
            self.identity.replace(authority.server_identity())
        tokens.name_authorities(authority)
        left_s = authority.left_s(self._clock())
        self.shell.tell_all(do.TrustAuthorities(authority.trusted_pem, left_s))
        self._exchanged.set()
        newest = fingerprint(authority.newest.certificate_pem)
        log.warning(
            Event.AUTHORITY_CHANGED.value, newest=newest, trusted=len(authority.trusted), left_s=left_s
        )

    def renew(self, now: dt.datetime) -> None:
        """Show new connections a new certificate once a week, and in time before a short one ends."""
        if self.authority is None or self.identity is None:
            return
        shown = self.identity.now
        if now >= min(shown.renewal_due(), shown.issued() + RENEW_AFTER):
            self.identity.replace(self.authority.server_identity(now))
            log.info(Event.CERTIFICATE_RENEWED.value, worker="", until=str(self.identity.now.expires()))

    async def stop(self) -> None:
        """Stop listening and write what is left; within ``stop_within_s``."""
        for outbox in list(self.shell.outboxes.values()):
            outbox.close("the coordinator stops")
        self.desk.stop()
        await asyncio.gather(*(server.stop(GRACE_S) for server in self._servers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.exporter is not None:
            self.exporter.close()
        if self.relay is not None:
            await self.relay.stop()
        await self.shell.aggregators.stop()
        self.shell.stop()
        self.journal.close()
        self._lock.release()
        log.info(Event.SERVER_STOPPED.value)

    # ------------------------------------------------------------ ports

    def _connection_bound(self, entry_port: int, work_port: int) -> ConnectionBound:
        config, of_ports = self.config, self._shares
        most, unknown_s = config.connections_per_address, config.idle_connection_s
        a_worker = CONNECTIONS_A_SESSION * config.sessions_per_address
        # Half of what a port may hold stays free for who is known, and for who is about to be.
        ports = {
            entry_port: PortBound(most, of_ports.entry // 2, unknown_s, self._entry_known),
            work_port: PortBound(a_worker, of_ports.work // 2, unknown_s, self._work_known),
        }
        if self.exporter is not None:  # where nobody says who he is
            ports[self.exporter.port] = PortBound(SCRAPERS, SCRAPERS, unknown_s)
        return ConnectionBound(ports, self._clock)

    async def _serve_work(self, port: int, identity: CurrentIdentity | None) -> int:
        insecure = identity is None
        calls = Calls(self.config.calls_per_worker, "worker")
        sessions = Calls(self.config.sessions_per_address, "address")
        known = self._work_known = Known()
        server = self._new_server(
            WorkerAccess(self.register, insecure, calls, known),
            ("grpc.max_allowed_incoming_connections", self._shares.work),
        )
        rpc.add_WorkServicer_to_server(
            WorkService(self.shell, self.register, self.authority, calls, sessions, known, self._gathering),
            server,
        )
        rights = WorkerRights(self.shell, self._gathering, insecure)
        rpc.add_BlobsServicer_to_server(BlobService(self.blobs, rights, self.shell.chains), server)
        rpc.add_DataServicer_to_server(StageData(self.shell, DataProvider(self.blobs), insecure), server)
        apps_rpc.add_AppWorkServicer_to_server(NodeApps(self.desk, insecure), server)
        return await self._listen(server, port, identity, mutual=True)

    async def _serve_relays(self, work_port: int) -> int | None:
        """Make tickets for the relays there are, and run the own one; returns its port. UsageError when a
        port that was asked for is taken: without a wish the relay is left out."""
        config, relaying = self.config, self.config.relaying
        if not relaying.used:
            return None
        key, port = made_key_file(config.relay_key_path), None
        if relaying.port is not None:
            next_one = work_port + 1 if config.entry_port and work_port < MAX_PORT else 0
            limits = RelayLimits(
                rate_bytes_per_s=relaying.line_bps / 8 or math.inf, day_bytes=relaying.day_bytes or math.inf
            ).within(self._shares.relay)
            relay = Relay(key, limits, self._clock)
            try:
                port = await relay.start(config.host, relaying.port or next_one)
            except UsageError as error:
                if relaying.port:
                    raise
                log.warning("relay.left_out", reason=str(error), remedy="give a free --relay-port")
            else:
                self.relay = relay
                log.info(Event.RELAY_STARTED.value, port=port)
        own = (("", port),) if port is not None else ()
        self._relays = (*own, *relaying.others)
        self.shell.relays = RelayWays(key, self._relays, relaying, self._clock)
        return port

    async def _serve_entry(
        self,
        port: int,
        identity: CurrentIdentity | None,
        owner: OwnerService,
        owners: Owners,
        work_port: int,
    ) -> int:
        config = self.config
        rules = EntryThrottle(
            config.wrong_token_delay_s, config.wrong_tokens_at_once, config.calls_per_address
        )
        known = self._entry_known = Known()
        server = self._new_server(
            EntryAccess(owners if identity is not None else None, self.register, rules, self._clock, known),
            # A stranger's stream has a window of 64 KiB, and it must not grow with what he sends. A call
            # that may send large messages gets 1 MiB a round trip once it is being read.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_connection_idle_ms", round(1000 * config.idle_connection_s)),
            ("grpc.max_allowed_incoming_connections", self._shares.entry),
        )
        door = Door(
            self.register,
            self.journal,
            self.authority,
            work_port,
            config.max_workers,
            self._clock,
            self._relays,
        )
        rpc.add_EntryServicer_to_server(door, server)
        rpc.add_OwnerServicer_to_server(owner, server)
        apps_rpc.add_AppsServicer_to_server(OwnerApps(self.desk, owners), server)
        owners_rights = OwnerRights(self.shell, self._gathering)
        rpc.add_BlobsServicer_to_server(BlobService(self.blobs, owners_rights), server)
        return await self._listen(server, port, identity, mutual=False)

    def _new_server(
        self, access: grpc.aio.ServerInterceptor[Any, Any], *options: tuple[str, int]
    ) -> grpc.aio.Server:
        config, size = self.config, self.config.max_message_bytes
        server = grpc.aio.server(
            interceptors=[access],
            maximum_concurrent_rpcs=config.max_calls,
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                # Another coordinator on the same port must be an error, not a silent half.
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
                ("grpc.keepalive_permit_without_calls", 1),
                # A line that was cut without a word holds a stream and a descriptor until somebody asks.
                ("grpc.keepalive_time_ms", round(1000 * config.keepalive_s)),
                ("grpc.keepalive_timeout_ms", round(1000 * config.keepalive_timeout_s)),
                ("grpc.http2.ping_timeout_ms", round(1000 * config.keepalive_timeout_s)),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.server_handshake_timeout_ms", round(1000 * config.handshake_within_s)),
                *options,
            ],
        )
        self._servers.append(server)
        return server

    async def _listen(
        self, server: grpc.aio.Server, port: int, identity: CurrentIdentity | None, *, mutual: bool
    ) -> int:
        address = join_address(self.config.host, port)
        try:
            if identity is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, server_credentials(identity, mutual=mutual))
        except RuntimeError:
            bound = 0
        if not bound:
            raise UsageError(
                f"cannot listen on {address}: the port is taken or the address is not this machine's; "
                f"give another {'--work-port or --listen' if mutual else '--listen'}"
            )
        await server.start()
        return bound

    def _join_command(self, entry_port: int, token: str | None) -> str:
        host, port = self.config.host, entry_port
        if self.config.advertise:
            host, port = parse_address(self.config.advertise, entry_port)
        named = "" if host in ANYWHERE else host
        if token is None:
            return f"atoll-worker join {join_address(named or 'HOST', port)} --insecure"
        return join_command(JoinToken.decode(token), named, port)


# ---------------------------------------------------------------- running it


class Running:
    """A coordinator in a thread of its own, for tests and programs: ``with serve(config) as c``."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._ready: Future[Started] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self.server: Server | None = None
        self._thread = threading.Thread(
            target=self._main, args=(config,), name="atoll-coordinator", daemon=True
        )
        self._thread.start()
        self.started = self._ready.result(30)

    def _main(self, config: CoordinatorConfig) -> None:
        asyncio.run(self._run(config))

    async def _run(self, config: CoordinatorConfig) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        try:
            self.server = Server(config)
            started = await self.server.start()
        except Exception as error:  # noqa: BLE001 - the caller raises it
            self._ready.set_exception(error)
            return
        self._ready.set_result(started)
        await self._ending.wait()
        await self.server.stop()

    def call(self, work: Callable[[Server], Any]) -> Any:
        """Run ``work(server)`` in the coordinator's thread and return what it returns, or raise the same."""
        assert self._loop is not None  # noqa: S101 - started in __init__
        done: Future[Any] = Future()

        def run() -> None:
            assert self.server is not None  # noqa: S101 - started in __init__
            try:
                done.set_result(work(self.server))
            except Exception as error:  # noqa: BLE001 - the caller raises it
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(30)

    def stop(self) -> None:
        """Stop it and wait until its thread has ended."""
        if self._thread.is_alive() and self._loop is not None and self._ending is not None:
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(config: CoordinatorConfig) -> Running:
    """Start a coordinator in this process; its ports are in ``started``."""
    return Running(config)


def serve_forever(config: CoordinatorConfig, announce: Callable[[Started], None]) -> None:
    """Run until SIGINT, SIGTERM or SIGHUP; ``announce`` is called once calls are taken."""
    _log_to_stderr()
    check_threads(COORDINATOR_THREADS)
    allowed = raise_limit(CONNECTIONS_A_SESSION * config.max_workers + SPARE_DESCRIPTORS)
    if allowed < config.max_workers + SPARE_DESCRIPTORS:
        log.warning(
            "server.few_descriptors",
            allowed=allowed,
            wanted=config.max_workers + SPARE_DESCRIPTORS,
            note="a session takes one: raise the hard limit of open files (`ulimit -Hn`, LimitNOFILE=)",
        )
    asyncio.run(_serve_forever(config, announce))


async def _serve_forever(config: CoordinatorConfig, announce: Callable[[Started], None]) -> None:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    leave = endings()
    for number in leave:
        loop.add_signal_handler(number, ending.set)
    server = Server(config)
    announce(await server.start())
    # What importing left behind is no garbage: with a thousand sessions a look through all of it, too, stops
    # every answer for a sixth of a second. What sessions hold lives as long as they: look rarely.
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION_AFTER)
    broke = asyncio.create_task(server.broken())
    await asyncio.wait({asyncio.create_task(ending.wait()), broke}, return_when=asyncio.FIRST_COMPLETED)
    failure = broke.exception() if broke.done() else None
    broke.cancel()
    if failure is not None:
        # Better to end and be started again from the journal than to answer and do nothing.
        log.critical("server.broke", error=repr(failure))
    for number in leave:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once, threads that plan too
    try:
        await asyncio.wait_for(server.stop(), config.stop_within_s)
    except TimeoutError:
        log.warning("server.stop_slow", waited_s=config.stop_within_s)
        # Threads that still plan or hash must not hold the process.
        os._exit(0 if failure is None else 1)
    if failure is not None:
        raise failure


def _log_to_stderr() -> None:
    """Events from info on, one a line: coloured on a terminal, JSON elsewhere."""
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            LogBudget(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(log_stream(sys.stderr)),
    )


def _refusal(folder: Path, holder: Holder) -> str:
    where = f" on {holder.address}" if holder.address else ""
    return (
        f"another coordinator (process {holder.process or '?'}{where}) runs from {folder}; stop it, or give "
        "this one its own --state-dir"
    )
