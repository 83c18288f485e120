"""The worker process: gRPC and threads around the session machine.

The main thread alone touches the session's state: every event, from whatever thread, goes through
one queue. Strangers' graphs are computed in another process (``worker.hosting``), without this one's key
and sockets; a computation that hangs or dies disturbs nothing here, nor does a coordinator that is away.
"""

from __future__ import annotations

import itertools
import queue
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AccessDenied, AtollError, ConnectionFailed, ProtocolMismatch
from atoll.federated import ConsentWord as Word
from compressors import CODECS
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos.convert_federated import dataset_to_proto
from protos.networks import ANYWHERE
from worker.apps.host import AppHost
from worker.blobs import BlobCache, BlobFiles
from worker.config import WorkerConfig, make_config, remember
from worker.control.address_watch import watch_address
from worker.control.bulk import Bulk
from worker.control.enroll import find_work_address, join
from worker.control.remote_store import metered
from worker.control.renewal import Renewal
from worker.control.stream import Stream
from worker.data.registry import known_facts
from worker.federated.consent import Consent
from worker.hosting.host import ComputeHost, HostPorts
from worker.hosting.protections import protections
from worker.hosting.sandbox import chosen
from worker.machine.conditions import MachineConditions
from worker.machine.device import machine_memory, memory_limit, own_address
from worker.machine.malloc import keep_chunk_memory
from worker.manners.applied import read_applied
from worker.manners.keeper import Keeper, Manners
from worker.manners.limits import shown_limits
from worker.manners.traffic import Traffic
from worker.manners.verdict import Conditions
from worker.pipe.status import Waiting
from worker.session import events, instructions, machine
from worker.session import wire as messages
from worker.session.state import WELCOMED
from worker.session.wire import AuthoritiesNamed, PeerExpected, PeerRevoked, StandbysExpected
from worker.transport.contract import TransportConfig, Way
from worker.transport.network import PeerNetwork

if TYPE_CHECKING:
    from protos.credentials import Identity
    from worker.control.enroll import Membership

log = structlog.get_logger()

FATAL = (AccessDenied, ProtocolMismatch)
EXPECTED_DIAL_S = 10.0
STEP_PHASES = frozenset(
    {machine.Phase.TRAINING, machine.Phase.WAITING, machine.Phase.APPLYING, machine.Phase.EVALUATING}
    | {machine.Phase.ENROLLED, machine.Phase.TRAINING_ROUND, machine.Phase.EVALUATING_ROUND}
)


@dataclass(frozen=True, slots=True)
class ConsentChanged:
    """Event: this machine's owner has given its word on an app, a job or a data set."""


@dataclass(frozen=True, slots=True)
class MannersChanged:
    """Event: this machine's owner, or the machine itself, lets a guest take something else from now on."""

    manners: Manners


@dataclass(frozen=True, slots=True)
class AddressChanged:
    """Event: this machine has another address; what is open has fallen silent."""


Told = ConsentChanged | MannersChanged | AddressChanged
Inner = events.Event | PeerExpected | PeerRevoked | StandbysExpected | AuthoritiesNamed | Told


class Daemon:
    """A worker, from joining to leaving. ``run`` once, in the main thread."""

    def __init__(self, config: WorkerConfig, conditions: Conditions | None = None) -> None:
        """``conditions``: of this machine; None: as its system tells them."""
        self._config = config
        self._events: queue.SimpleQueue[Inner] = queue.SimpleQueue()
        self._state = machine.Session()
        self._incarnation = secrets.randbits(63)
        self._random = random.Random(self._incarnation)
        self._stopping = threading.Event()
        self._stream: Stream | None = None
        self._streams = 0  # opened so far: what the older ones say counts no more
        self._heartbeat_s = self._idle_heartbeat_s = 0.5
        self._beats = itertools.count(1)
        self._end: AtollError | None = None
        self._welcomed = threading.Event()
        self._apps: AppHost | None = None
        self._manners = Manners()
        self._traffic = Traffic()
        self._keeper = Keeper(
            config.state_dir,
            conditions or MachineConditions(),
            lambda manners: self._events.put(MannersChanged(manners)),
            lambda: self._traffic.today,
            self._checked_memory,
        )
        self._membership: Membership
        self._member_lock = threading.Lock()
        self._renewal: Renewal
        self._network: PeerNetwork
        self._consent = Consent(config.state_dir)
        self._host = ComputeHost(config, self._consent)

    # ---------------------------------------------------------------- the life of the process

    def run(self) -> None:
        """Join, work, leave. Raises the error that ended it; returns after a wish to leave."""
        # Before the first thread of many: who has an arena of its own keeps it.
        keep_chunk_memory()
        restore = self._catch_signals()
        try:
            self._host.prepare()
            self._membership = join(self._config, self._stopping.wait)
            self._serve()
        except ConnectionFailed:
            if not self._stopping.is_set():
                raise
        finally:
            self._host.stop(0.0)
            restore()
        if self._end is not None:
            raise self._end

    def leave(self, reason: str) -> None:
        """Go as soon as possible; safe in a signal handler."""
        self._stopping.set()
        self._events.put(events.LeaveAsked(reason))

    def _serve(self) -> None:
        config, member = self._config, self._membership
        transport = TransportConfig(use_proxy=config.use_proxy, coordinator=config.host)
        network = PeerNetwork(
            member.identity,
            config.listen,
            lost=self._peer_lost,
            config=transport,
            name=member.worker,
            traffic=self._traffic,
            joined=self._peer_joined,
        )
        bulk = Bulk(lambda member: member.channel(config), member)
        self._network = network
        cache = BlobCache(config.blob_dir, config.cache_bytes)
        ports = HostPorts(
            network,
            BlobFiles(bulk, cache, config.max_upload_bytes_per_s, self._traffic),
            metered(bulk.batches, self._traffic),
            self._events.put,
            self._send,
        )
        self._apps = AppHost(config) if config.allow_apps else None
        self._renewal = Renewal(config, lambda: self._membership, partial(self._renewed, bulk))
        try:
            device = self._host.start(member.worker, ports, self._stopping.is_set)
            remember(config)
            self._begin_keeping()
            threading.Thread(target=self._beat, name="atoll-heartbeat", daemon=True).start()
            watching = (
                config.host,
                config.port,
                partial(self._events.put, AddressChanged()),
                self._stopping.wait,
            )
            threading.Thread(target=watch_address, args=watching, name="atoll-address", daemon=True).start()
            keeping = (self._stopping.wait,)
            threading.Thread(
                target=self._renewal.keep, args=keeping, name="atoll-renewal", daemon=True
            ).start()
            self._trust(member)
            log.info(
                "worker.joined",
                worker=member.worker,
                coordinator=member.work_address,
                protections=protections(device.kind, chosen(config.sandbox, device.kind)).line(),
            )
            self._open_stream()
            self._loop(bulk)
        finally:
            self._stopping.set()
            self._shut_down(network, bulk)

    def _loop(self, bulk: Bulk) -> None:
        while self._state.phase is not machine.Phase.GONE:
            event = self._events.get()
            if isinstance(event, PeerExpected):
                self._expect_peer(event)
                continue
            if isinstance(event, StandbysExpected):
                self._expect_standbys(event)
                continue
            if isinstance(event, PeerRevoked):
                log.warning("peer.revoked", peer=event.peer, reason=event.reason)
                self._network.bar(event.peer, f"its certificate was revoked: {event.reason}")
                continue
            if isinstance(event, AuthoritiesNamed):
                self._trust_authorities(event.ca_pem, event.left_s)
                continue
            if isinstance(event, AddressChanged):
                self._move(bulk)
                continue
            if isinstance(event, ConsentChanged):
                if self._apps is not None:
                    self._apps.consent_changed()
                self._say_consent()
                continue
            if isinstance(event, events.Participate) and not self._consents(event):
                continue
            if isinstance(event, MannersChanged):
                self._take_up(event.manners)
                continue
            todo = self._handle(event)
            if isinstance(event, events.Welcome) and not self._state.outdated:
                self._heartbeat_s = event.heartbeat_s
                self._idle_heartbeat_s = max(event.heartbeat_s, event.idle_heartbeat_s)
                self._welcomed.set()
                if self._apps is not None:
                    self._apps.attend(self._membership)
                self._host.report_codecs()
                for joined in self._network.reported():
                    self._send(messages.peer_joined(*joined))
                self._say_consent()
            if isinstance(event, events.Release):
                self._consent.close(event.job, event.reason)
            self._perform_all(todo)

    def _handle(self, event: events.Event) -> tuple[instructions.Instruction, ...]:
        before = self._state
        self._state, todo = machine.handle(before, event)
        self._note(before, event)
        return todo

    def _perform_all(self, todo: Iterable[instructions.Instruction]) -> None:
        for instruction in todo:
            self._perform(instruction)

    # ---------------------------------------------------------------- a guest's manners

    def _begin_keeping(self) -> None:
        """Take up what holds already, before the coordinator hears of this worker."""
        applied = read_applied(self._config.state_dir)
        if applied is not None:
            self._traffic.resume(applied.day, applied.day_bytes)
        self._keeper.look()
        self._take_up(self._keeper.manners)
        self._keeper.start()

    def _take_up(self, manners: Manners) -> None:
        """Hold to other limits from now on, pause or resume; the coordinator hears of it at once."""
        before, limits = self._manners, manners.limits
        if manners == before:
            return
        self._traffic.limit(limits.upload_mbit, limits.download_mbit)
        if limits.cpu_share != before.limits.cpu_share:
            self._host.limit_share(limits.cpu_share)
        if self._host.limit_memory(manners.memory_bytes, manners.gpu_memory_bytes) and not before.paused:
            self._pause(replace(manners, paused=manners.paused or "takes up another memory limit"))
        if manners.paused:
            self._pause(manners)
        else:
            self._manners = manners
            self._perform_all(self._handle(events.ResumeAsked()))
            if self._apps is None and self._config.allow_apps:
                self._apps = AppHost(self._config)
                if self._welcomed.is_set():
                    self._apps.attend(self._membership)
        self._send(self._heartbeat())
        log.info("limits.taken_up", paused=manners.paused, **shown_limits(limits))

    def _pause(self, manners: Manners) -> None:
        self._manners = manners
        apps, self._apps = self._apps, None
        if apps is not None:
            apps.stop()
        self._perform_all(self._handle(events.PauseAsked(manners.paused)))
        self._send(self._heartbeat())

    def _checked_memory(self, settings: Mapping[str, Any]) -> tuple[int, int]:
        """Budgets of memory and GPU memory in the settings, bytes. UsageError for what is not there."""
        config = make_config({"state_dir": self._config.state_dir, "host": self._config.host}, {})
        device, (_, total) = self._host.device, machine_memory()
        memory_limit(
            config.memory_bytes, 0, device.memory_bytes if device.kind == "cpu" else total, "this machine"
        )
        if device.kind != "cpu":
            memory_limit(config.gpu_memory_bytes, 0, device.memory_bytes, "this GPU")
        return config.memory_bytes, config.gpu_memory_bytes

    def _guest(self) -> pb.GuestLimits | None:
        manners = self._manners
        return messages.guest_limits(manners.limits, manners.paused, self._host.device.memory_limit_bytes)

    def _note(self, before: machine.Session, event: events.Event) -> None:
        """Log what a person watching this worker wants to see; a step's own phases only on debug."""
        now = self._state
        if now.phase is not before.phase:
            write = log.debug if {now.phase, before.phase} <= STEP_PHASES else log.info
            write(
                "session.phase", phase=str(now.phase), cause=type(event).__name__, job=now.job, step=now.step
            )
        elif now.ignored != before.ignored:
            log.debug("event.ignored", event_kind=type(event).__name__, phase=str(before.phase))

    def _perform(self, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.Send(message):
                self._send(messages.to_proto(message))
            case instructions.Reconnect(after_s, reason):
                log.warning("session.lost", reason=reason, again_in_s=round(after_s, 2))
                threading.Thread(
                    target=self._reconnect, args=(after_s,), name="atoll-reconnect", daemon=True
                ).start()
            case instructions.HangUp(reason):
                log.warning("session.refused", reason=reason)
                if self._stream is not None:
                    self._stream.close(wait=False)
            case instructions.Quit(reason, dismissed, for_good):
                if dismissed and self._end is None:
                    word = "dismissed for good" if for_good else "dismissed"
                    self._end = AccessDenied(f"the coordinator {word} this worker: {reason}")
                self._events.put(events.Drained())
            case _:
                self._host.do(instruction)

    def _renewed(self, bulk: Bulk, identity: Identity) -> None:
        """Use a new identity for every connection from now on; those that are open stay."""
        with self._member_lock:
            before = self._membership.identity
            self._membership = replace(self._membership, identity=identity)
        self._network.renew(identity)
        if before is None or before.key_pem != identity.key_pem:
            bulk.renewed(self._membership)

    def _trust(self, member: Membership) -> None:
        """Trust the authorities that the coordinator's greeting named."""
        if member.identity is not None:
            self._trust_authorities(member.identity.ca_pem, member.overlap_s)

    def _trust_authorities(self, ca_pem: bytes, left_s: float) -> None:
        try:
            self._renewal.trust(ca_pem, left_s)
        except AtollError as error:
            # What is open stays open: a job may end in peace. The next connection is refused in these words.
            log.warning("authority.not_trusted", reason=str(error))

    def _shut_down(self, network: PeerNetwork, bulk: Bulk) -> None:
        deadline_s = time.monotonic() + self._config.leave_timeout_s
        self._keeper.stop()
        if self._apps is not None:
            self._apps.stop()
        stream = self._stream
        if stream is not None:
            stream.close()
        self._host.stop(max(0.1, deadline_s - time.monotonic()) / 2)
        closing = threading.Thread(target=network.close, name="atoll-close", daemon=True)
        closing.start()
        closing.join(max(0.1, deadline_s - time.monotonic()))
        bulk.close()
        log.info("worker.left")

    # ---------------------------------------------------------------- the coordinator

    def _open_stream(self) -> None:
        member, config = self._membership, self._config
        self._streams += 1
        self._stream = Stream(
            partial(member.async_channel, config),
            member.metadata,
            member.work_address,
            self._introduce(self._network.port),  # each time: data may have been registered meanwhile
            config.outgoing_messages,
            self._receive,
            partial(self._stream_ended, self._streams),
        )

    def _move(self, bulk: Bulk) -> None:
        """Go on from another address: nobody at the other end of what is open hears of it by itself.

        The session is opened at once, without a look for the work port: soon the coordinator gives us up.
        """
        before = self._stream
        self._open_stream()
        if before is not None:
            before.close(wait=False)
        self._network.moved()
        bulk.reopen()
        if self._apps is not None:
            self._apps.moved()

    def _reconnect(self, after_s: float) -> None:
        """Thread: after a pause, find the coordinator's work port again and open a stream."""
        opened = self._streams
        if self._stopping.wait(after_s):
            return
        try:
            found = find_work_address(self._config, self._membership)
            with self._member_lock:
                self._membership = replace(found, identity=self._membership.identity)
            self._trust(found)
        except FATAL as error:
            self._refused(error)
        except AtollError as error:
            if self._streams == opened:  # else there is one from another address
                self._lost_coordinator(str(error))
        else:
            if self._streams == opened:
                self._open_stream()

    def _receive(self, message: pb.ToWorker) -> None:
        try:
            self._events.put(messages.event_from(message))
        except AtollError as error:
            # A faulty assignment or commit must be answered, or the job waits for ever.
            log.error("message.refused", reason=str(error))
            if message.WhichOneof("body") in messages.ANSWERED:
                self._send(messages.to_proto(messages.refusal(message, str(error))))

    def _stream_ended(self, number: int, error: AtollError | None) -> None:
        if self._stopping.is_set() or number != self._streams:
            return
        if isinstance(error, FATAL):
            self._refused(error)
        else:
            self._lost_coordinator(str(error or "the coordinator closed the session"))

    def _lost_coordinator(self, reason: str) -> None:
        self._events.put(events.Disconnected(reason, self._random.random()))

    def _refused(self, error: AtollError) -> None:
        self._end = error
        self._events.put(events.Dismiss(str(error), for_good=True))

    def _send(self, message: pb.FromWorker) -> None:
        self._consent.sends(message)
        stream = self._stream
        if stream is not None and not stream.send(message):
            log.warning("session.congested", queued=self._config.outgoing_messages)

    def _introduce(self, port: int) -> pb.FromWorker:
        config = self._config
        addresses: tuple[tuple[str, int], ...] = ()
        if config.inbound:
            own = own_address(config.host, config.port) or "127.0.0.1"
            listening = config.listen_host
            host = own if listening in ANYWHERE else listening
            addresses = tuple((h, p or port) for h, p in config.advertise) or ((host, port),)
        message = pb.FromWorker(
            introduction=pb.Introduction(
                protocol=PROTOCOL_VERSION,
                name=config.shown_name,
                device=self._host.device,
                peer_addresses=[pb.Address(host=h, port=p) for h, p in addresses],
                site=config.site,
                codecs=sorted(CODECS),
                incarnation=self._incarnation,
                codec_speeds=self._host.codec_speeds,
                datasets=self._datasets(),
                held=messages.held_stage(self._state),
                guest=self._guest(),
            )
        )
        self._consent.sends(message)
        return message

    def _datasets(self) -> list[pb.DatasetFacts]:
        """Facts of registered data sets; a damaged folder must not keep the worker out."""
        try:
            return [dataset_to_proto(facts) for facts in known_facts(self._config.state_dir)]
        except AtollError as error:
            log.error("data.unreadable", reason=str(error))
            return []

    # ---------------------------------------------------------------- consent

    def _consents(self, event: events.Participate) -> bool:
        """True where the session may take up an invitation; else the coordinator hears why not."""
        if self._state.outdated or self._state.phase not in WELCOMED:
            return True  # the session ignores it
        try:
            answer = self._consent.judge(event.work)
        except AtollError as error:
            failed = instructions.ClientFailed(event.job, 0, str(error), "load")
            self._send(messages.to_proto(failed))
            return False
        if answer is not None:
            self._withdraw(answer)
            self._send(pb.FromWorker(consent=answer))
        return answer is None

    def _say_consent(self) -> None:
        """Tell the coordinator the owner's word on every job that is open here, and obey it."""
        try:
            answers = self._consent.changed()
        except AtollError as error:
            log.error("consent.unreadable", reason=str(error))
            return
        for answer in answers:
            self._withdraw(answer)
            if answer.job != self._state.job:
                self._send(pb.FromWorker(consent=answer))

    def _withdraw(self, answer: pb.Consent) -> None:
        """Stop a job that runs here without its consent, whatever the coordinator says."""
        if answer.word != Word.GIVEN and answer.job == self._state.job:
            self._state, todo = machine.handle(
                self._state, events.Release(answer.job, self._state.version, answer.reason)
            )
            for instruction in todo:
                self._perform(instruction)

    # ---------------------------------------------------------------- threads around the work

    def _beat(self) -> None:
        """Thread: heartbeats, whatever the computation does; fewer of a worker that nobody waits for."""
        silent_s = 0.0
        while not self._stopping.wait(interval_s := self._heartbeat_s if self._welcomed.is_set() else 0.1):
            if not self._welcomed.is_set():
                continue
            state = self._state
            silent_s += interval_s
            # An app's node is as busy as the worker of a job, and no session shows it.
            idle = not state.job and self._apps is None
            if idle and silent_s + interval_s / 2 < self._idle_heartbeat_s:
                continue
            silent_s = 0.0
            self._send(self._heartbeat())

    def _heartbeat(self) -> pb.FromWorker:
        state = self._state
        waits = self._host.waiting or Waiting("", "", 0, time.monotonic())
        return pb.FromWorker(
            heartbeat=pb.Heartbeat(
                sequence=next(self._beats),
                worker_time_s=time.time(),
                job=state.job,
                plan_version=state.version,
                step=state.repeated if state.standby else state.step,
                progress=self._host.progress + self._network.progress(),
                memory_bytes=self._host.memory_bytes,
                waits_for=waits.peer,
                waits_s=time.monotonic() - waits.since_s,
                waits_what=waits.what,
                waits_step=waits.step,
                logged_from=self._host.logged_from,
                guest=self._guest(),
            )
        )

    def _peer_lost(self, peer: str, reason: str) -> None:
        self._events.put(events.PeerLost(peer, reason))

    def _peer_joined(self, peer: str, way: Way | None, relay: str) -> None:
        if way is not None:
            log.info("peer.joined", peer=peer, way=str(way), relay=relay or None)
        self._send(messages.peer_joined(peer, way, relay))

    def _expect_peer(self, expected: PeerExpected) -> None:
        self._network.expect(expected.peer, expected.paths, EXPECTED_DIAL_S)

    def _expect_standbys(self, expected: StandbysExpected) -> None:
        if expected.job != self._state.job or self._state.outdated:
            return
        self._host.stand_by(expected.job, expected.ranks, checks=expected.checks)
        for link in expected.links:
            self._network.expect(link.worker, link.paths, EXPECTED_DIAL_S)

    def _catch_signals(self) -> Callable[[], None]:
        """Leave on Ctrl+C or SIGTERM; returns what puts the old handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def leave(number: int, _: object) -> None:
            self.leave(f"stopped by {signal.Signals(number).name}")

        old = {n: signal.signal(n, leave) for n in (signal.SIGINT, signal.SIGTERM)}
        # `atoll-worker apps` and `jobs` tell a running daemon that its owner has spoken.
        old[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: self._events.put(ConsentChanged()))

        def restore() -> None:
            for number, handler in old.items():
                signal.signal(number, handler)

        return restore
