"""One device of this machine as a member of the fleet: its session, its compute process, its links.

A thread for each member alone touches its session's state: every event, from whatever thread, goes through
one queue. Strangers' graphs are computed in another process (``worker.hosting``), without this one's key and
sockets; a computation that hangs or dies disturbs nothing here, nor does a coordinator that is away.
"""

from __future__ import annotations

import itertools
import queue
import random
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AccessDenied, AtollError, ProtocolMismatch
from atoll.federated import ConsentWord as Word
from compressors import CODECS
from hostos.networks import ANYWHERE
from protos import PROTOCOL_VERSION, coding
from protos import atoll_control_pb2 as pb
from protos.devices import device_name
from worker.apps.host import AppHost
from worker.blobs import BlobCache, BlobFiles
from worker.control.bulk import Bulk
from worker.control.enroll import find_work_address
from worker.control.remote_store import metered
from worker.control.stream import Stream
from worker.data.registry import known_facts
from worker.federated.consent import Consent
from worker.hosting.apps_only import AppsOnly
from worker.hosting.copies import Copies
from worker.hosting.host import ComputeHost
from worker.hosting.peer_blobs import PeerBlobs
from worker.hosting.protections import protections
from worker.hosting.requests import HostPorts
from worker.hosting.sandbox import chosen
from worker.machine.cpu import beside_computing
from worker.machine.device import own_address
from worker.machine.own_share import MemoryShare
from worker.manners.keeper import Manners
from worker.manners.limits import shown_limits
from worker.manners.traffic import Traffic
from worker.pipe.status import Waiting
from worker.session import events, instructions, machine
from worker.session import wire as messages
from worker.session.state import WELCOMED
from worker.session.wire import (
    AuthoritiesNamed,
    Beside,
    CopiesAsked,
    CopyWanted,
    PeerExpected,
    PeerRevoked,
    StandbysExpected,
)
from worker.transport.contract import TransportConfig, Way
from worker.transport.local import DeviceNetwork, LocalLinks

if TYPE_CHECKING:
    from worker.config import WorkerConfig
    from worker.control.enroll import Membership
    from worker.control.renewal import Renewal

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


Inner = events.Event | Beside | ConsentChanged | MannersChanged | AddressChanged


class Shared:
    """What the devices of one daemon have in common: the machine's membership, cache and traffic."""

    membership: Membership  # of the machine, once it has joined
    renewal: Renewal  # the same
    cache: BlobCache  # the same
    port: int = 0  # where peers reach any of the devices

    def __init__(self, config: WorkerConfig, devices: int) -> None:
        """``config``: of the machine."""
        self.config, self.devices = config, devices
        self.traffic, self.links = Traffic(), LocalLinks()
        self.stopping = threading.Event()
        self.lock = threading.Lock()  # of the membership

    def find_coordinator(self) -> None:
        """Find where the coordinator takes sessions now. Raises as ``find_work_address``."""
        found = find_work_address(self.config, self.membership)
        with self.lock:
            self.membership = replace(found, identity=self.membership.identity)
        self.trust(found)

    def trust(self, member: Membership) -> None:
        """Trust the authorities that the coordinator's greeting named."""
        if member.identity is not None:
            self.trust_authorities(member.identity.ca_pem, member.overlap_s)

    def trust_authorities(self, ca_pem: bytes, left_s: float) -> None:
        """Trust these authorities from now on."""
        try:
            self.renewal.trust(ca_pem, left_s)
        except AtollError as error:
            # What is open stays open: a job may end in peace. The next connection is refused in these words.
            log.warning("authority.not_trusted", reason=str(error))


class Member:
    """A device, from joining to leaving: ``prepare``, ``enter``, ``start``, ``serve``, ``close``."""

    def __init__(self, config: WorkerConfig, shared: Shared) -> None:
        """``config``: of this device."""
        self._config, self._shared = config, shared
        self._events: queue.SimpleQueue[Inner] = queue.SimpleQueue()
        self._state = machine.Session()
        self._incarnation = secrets.randbits(63)
        self._random = random.Random(self._incarnation)
        self._stopping = shared.stopping
        self._stream: Stream | None = None
        self._streams = 0  # opened so far: what the older ones say counts no more
        self._heartbeat_s = self._idle_heartbeat_s = 0.5
        self._beats = itertools.count(1)
        self._welcomed = threading.Event()
        self._gone = threading.Event()
        self._apps: AppHost | None = None
        self._manners = Manners()
        self._ports: HostPorts | None = None  # while it is open
        self._closing = threading.Lock()
        self._network: DeviceNetwork
        self._bulk: Bulk
        self._copies: Copies
        self._peers: PeerBlobs
        self._consent = Consent(config.state_dir, coordinator=f"{config.host}:{config.port}")
        self._host = (AppsOnly if config.apps_only else ComputeHost)(config, self._consent)
        self.end: AtollError | None = None  # why it had to go

    # ---------------------------------------------------------------- its life

    @property
    def name(self) -> str:
        """The worker id of the device, once the machine has joined."""
        return device_name(self._shared.membership.worker, self._config.number)

    @property
    def device(self) -> pb.DeviceFacts:
        """Facts of the device, once it has started."""
        return self._host.device

    def memory_under(self, config: WorkerConfig) -> MemoryShare:
        """Return how the device's memory would be shared under other limits."""
        return self._host.memory_under(config)

    def prepare(self) -> None:
        """Start a compute process. Raises StorageError, UsageError."""
        self._host.prepare()

    def enter(self) -> None:
        """Open the links and ways to the coordinator's store. Raises ConnectionFailed."""
        config, shared = self._config, self._shared
        listen = config.listen if not config.number else None
        transport = TransportConfig(
            use_proxy=config.use_proxy,
            coordinator=config.host,
            max_connections=TransportConfig().max_connections * (shared.devices if listen else 1),
        )
        member = self._membership
        network = self._network = DeviceNetwork(
            shared.links,
            member.identity,
            listen,
            self._peer_lost,
            transport,
            name=member.name,
            traffic=shared.traffic,
            joined=self._peer_joined,
        )
        shared.port = network.port or shared.port
        self._bulk = Bulk(lambda member: member.channel(config), member)
        blobs = BlobFiles(
            self._bulk,
            shared.cache,
            config.max_upload_bytes_per_s,
            shared.traffic,
            lambda: not self._state.connected,
        )
        copies = self._copies = Copies(
            blobs,
            shared.cache,
            config.blob_dir,
            config.copy_bytes,
            self._send,
            lambda holder: self._peers.near(holder),
            owner=config.number,
        )
        peers = self._peers = PeerBlobs(network, shared.cache.path, lambda: copies.offered)
        self._ports = HostPorts(
            network,
            blobs,
            metered(self._bulk.batches, shared.traffic),
            self._events.put,
            self._send,
            lambda holders: blobs.prefer(list(map(peers.near, holders))),
            beside_computing(),
            copies.take,
        )
        self._apps = AppHost(config, self._host.make_room) if config.allow_apps else None

    def start(self) -> None:
        """Begin to compute. UsageError where the device is not there."""
        assert self._ports is not None  # noqa: S101 - started before it has entered
        self._host.start(self.name, self._ports, self._stopping.is_set)

    def begin(self, manners: Manners) -> None:
        """Open the session; ``manners`` hold already."""
        self._take_up(manners)
        threading.Thread(target=self._beat, name="atoll-heartbeat", daemon=True).start()
        device, config = self._host.device, self._config
        log.info(
            "worker.joined",
            worker=self.name,
            coordinator=self._shared.membership.work_address,
            protections=protections(device.kind, chosen(config.sandbox, device.kind)).line(),
            memory=str(self._host.memory_under()),
        )
        self._open_stream()

    def serve(self) -> None:
        """Work until the session is over."""
        try:
            self._loop()
        finally:
            self._gone.set()

    def post(self, event: Inner) -> None:
        """Have an event handled; from any thread."""
        self._events.put(event)

    def renewed(self, *, key: bool) -> None:
        """Use the machine's new identity for every connection from now on; those that are open stay.
        ``key``: it has a new one."""
        member = self._membership
        if member.identity is not None:
            self._network.renew(member.identity)
        if key:
            self._bulk.renewed(member)

    def close(self) -> None:
        """End everything that there is of it, within ``leave_timeout_s``; any number of times."""
        self._gone.set()
        with self._closing:
            ports, self._ports = self._ports, None
            if ports is not None:
                self._shut_down()
            self._host.stop(0.0)

    @property
    def _membership(self) -> Membership:
        return replace(self._shared.membership, device=self._config.number)

    def _loop(self) -> None:
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
            if isinstance(event, CopiesAsked):
                if not self._state.outdated:
                    self._copies.keep(event.copies)
                continue
            if isinstance(event, CopyWanted):
                if not self._state.outdated:
                    self._copies.store(event)
                continue
            if isinstance(event, AuthoritiesNamed):
                self._shared.trust_authorities(event.ca_pem, event.left_s)
                continue
            if isinstance(event, AddressChanged):
                self._move()
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
        self._copies.may_work(self._state.phase is machine.Phase.IDLE)
        self._note(before, event)
        return todo

    def _perform_all(self, todo: Iterable[instructions.Instruction]) -> None:
        for instruction in todo:
            self._perform(instruction)

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
                if dismissed and self.end is None:
                    word = "dismissed for good" if for_good else "dismissed"
                    self.end = AccessDenied(f"the coordinator {word} this worker: {reason}")
                self._events.put(events.Drained())
            case _:
                self._host.do(instruction)

    def _shut_down(self) -> None:
        self._copies.close()
        self._peers.close()
        deadline_s = time.monotonic() + self._config.leave_timeout_s
        if self._apps is not None:
            self._apps.stop()
        stream = self._stream
        if stream is not None:
            stream.close()
        self._host.stop(max(0.1, deadline_s - time.monotonic()) / 2)
        closing = threading.Thread(target=self._network.close, name="atoll-close", daemon=True)
        closing.start()
        closing.join(max(0.1, deadline_s - time.monotonic()))
        self._bulk.close()
        log.info("worker.left", worker=self.name)

    # ---------------------------------------------------------------- a guest's manners

    def _take_up(self, manners: Manners) -> None:
        """Hold to other limits from now on, pause or resume; the coordinator hears of it at once."""
        before, limits = self._manners, manners.limits
        if manners == before:
            return
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
                self._apps = AppHost(self._config, self._host.make_room)
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

    def _guest(self) -> pb.GuestLimits | None:
        manners, memory_bytes = self._manners, self._host.device.memory_limit_bytes
        return messages.guest_limits(manners.limits, manners.paused, memory_bytes, self._config.apps_only)

    # ---------------------------------------------------------------- the coordinator

    def _open_stream(self) -> None:
        member, config = self._membership, self._config
        self._streams += 1
        self._stream = Stream(
            partial(member.async_channel, config),
            member.metadata,
            member.work_address,
            self._introduce(self._shared.port),  # each time: data may have been registered meanwhile
            config.outgoing_messages,
            self._receive,
            partial(self._stream_ended, self._streams),
        )

    def _move(self) -> None:
        """Go on from another address: nobody at the other end of what is open hears of it by itself.

        The session is opened at once, without a look for the work port: soon the coordinator gives us up.
        """
        before = self._stream
        self._open_stream()
        if before is not None:
            before.close(wait=False)
        self._network.moved()
        self._bulk.reopen()
        if self._apps is not None:
            self._apps.moved()

    def _reconnect(self, after_s: float) -> None:
        """Thread: after a pause, find the coordinator's work port again and open a stream."""
        opened = self._streams
        if self._stopping.wait(after_s) or self._gone.is_set():
            return
        try:
            self._shared.find_coordinator()
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
        if self._stopping.is_set() or self._gone.is_set() or number != self._streams:
            return
        if isinstance(error, FATAL):
            self._refused(error)
        else:
            self._lost_coordinator(str(error or "the coordinator closed the session"))

    def _lost_coordinator(self, reason: str) -> None:
        self._events.put(events.Disconnected(reason, self._random.random()))

    def _refused(self, error: AtollError) -> None:
        self.end = error
        self._events.put(events.Dismiss(str(error), for_good=True))

    def _send(self, message: pb.FromWorker) -> None:
        if not self._consent.sends(message):
            return
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
                site=config.site or (self._shared.membership.worker if self._shared.devices > 1 else ""),
                codecs=sorted(CODECS),
                incarnation=self._incarnation,
                codec_speeds=self._host.codec_speeds,
                datasets=self._datasets(),
                held=messages.held_stage(self._state),
                guest=self._guest(),
                copies=self._copies.held,
                copy_bytes=self._copies.lent_bytes,
            )
        )
        if not self._consent.sends(message):
            del message.introduction.datasets[:]
        return message

    def _datasets(self) -> list[pb.DatasetFacts]:
        """Facts of registered data sets; a damaged folder must not keep the worker out."""
        if self._config.number:  # they are the machine's, and its first device's
            return []
        try:
            return [coding.write(facts, pb.DatasetFacts) for facts in known_facts(self._config.state_dir)]
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
        if self._config.number:
            return
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
            if self._gone.is_set():
                return
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
                progress=self._host.progress + self._network.progress(state.peers),
                memory_bytes=self._host.memory_bytes,
                memory_peak_bytes=self._host.memory_peak_bytes,
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
