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
from typing import TYPE_CHECKING, TypeGuard

import structlog

from atoll.errors import AccessDenied, AtollError
from atoll.federated import ConsentWord as Word
from atoll.messages import from_worker as told
from atoll.messages.to_worker import KeepCopies, PeerLink, Revoked, Standbys, StoreCopy, TrustAuthorities
from compressors import CODECS
from hostos.net.networks import ANYWHERE
from protos import PROTOCOL_VERSION, coding
from protos import atoll_control_pb2 as pb
from protos.devices import device_name
from protos.session import to_coordinator
from worker.apps.host import AppHost
from worker.connections import Connections
from worker.control.reopening import SessionStream
from worker.data.registry import known_facts
from worker.data.weights import Claimed
from worker.federated.owner.consent import Consent
from worker.hosting.apps_only import AppsOnly
from worker.hosting.contained.protections import protections
from worker.hosting.contained.sandbox import chosen
from worker.hosting.host import ComputeHost
from worker.machine.device import own_address
from worker.machine.own_share import MemoryShare
from worker.manners.activity import DeviceActivity
from worker.manners.keeper import Manners
from worker.manners.limits import shown_limits
from worker.session import events, instructions, machine
from worker.session import wire as messages
from worker.session.state import WELCOMED, held
from worker.session.wire import Beside
from worker.transport.contract import Way

if TYPE_CHECKING:
    from worker.config import WorkerConfig
    from worker.control.enroll import Membership
    from worker.shared import Shared

log = structlog.get_logger()

EXPECTED_DIAL_S = 10.0
STEP_PHASES = frozenset(
    {machine.Phase.TRAINING, machine.Phase.WAITING, machine.Phase.APPLYING, machine.Phase.EVALUATING}
    | {machine.Phase.ENROLLED, machine.Phase.TRAINING_ROUND, machine.Phase.EVALUATING_ROUND}
)


@dataclass(frozen=True, slots=True)
class ConsentChanged:
    """Event: this machine's owner has given its word on an app, a job or a data set, or changed weights."""


@dataclass(frozen=True, slots=True)
class MannersChanged:
    """Event: this machine's owner, or the machine itself, lets a guest take something else from now on."""

    manners: Manners


@dataclass(frozen=True, slots=True)
class AddressChanged:
    """Event: this machine has another address; what is open has fallen silent."""


@dataclass(frozen=True, slots=True)
class DeviceChanged:
    """Event: a site has more or fewer processes than the coordinator knows."""


Own = ConsentChanged | MannersChanged | AddressChanged | DeviceChanged
Inner = events.Event | Beside | Own


class Member:
    """A device, from joining to leaving: ``prepare``, ``enter``, ``start``, ``serve``, ``close``."""

    def __init__(self, config: WorkerConfig, shared: Shared) -> None:
        """``config``: of this device."""
        self._config, self._shared = config, shared
        self._events: queue.SimpleQueue[Inner] = queue.SimpleQueue()
        self._state = machine.Session()
        self.activity = _activity(self._state)  # read by other threads
        self._incarnation = secrets.randbits(63)
        self._random = random.Random(self._incarnation)
        self._stopping = shared.stopping
        self._heartbeat_s = self._idle_heartbeat_s = 0.5
        self._beats = itertools.count(1)
        self._welcomed = threading.Event()
        self._gone = threading.Event()
        self._stream = SessionStream(
            config,
            lambda: self._membership,
            self._introduce,
            self._receive,
            shared.find_coordinator,
            self._lost_coordinator,
            self._refused,
            shared.stopping,
            self._gone,
        )
        self._apps: AppHost | None = None
        self._manners = Manners()
        self._weights = Claimed(config.state_dir)
        self._entered = False  # and not closed
        self._closing = threading.Lock()
        self._open: Connections  # once it has entered
        self._consent = Consent(config.state_dir, coordinator=f"{config.host}:{config.port}")
        self._host = _host_of(config, self._consent, shared)
        self.end: AtollError | None = None  # why it had to go

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
        self._open = Connections(
            config,
            shared,
            self._membership,
            self._events.put,
            self._send,
            self._peer_lost,
            self._peer_joined,
            lambda: not self._state.connected,
        )
        shared.port = self._open.network.port or shared.port
        self._entered = True
        self._apps = AppHost(config, self._host.make_room) if config.allow_apps else None

    def start(self) -> None:
        """Begin to compute. UsageError where the device is not there."""
        ports = replace(self._open.host, resized=lambda: self.post(DeviceChanged()))
        self._host.start(self.name, ports, self._stopping.is_set)

    def begin(self, manners: Manners) -> None:
        """Open the session; ``manners`` hold already."""
        self._take_up(manners)
        threading.Thread(target=self._beat, name="atoll-heartbeat", daemon=True).start()
        _log_joined(self.name, self._config, self._shared, self._host)
        self._stream.open()

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
        self._open.renewed(self._membership, key=key)

    def close(self) -> None:
        """End everything that there is of it, within ``leave_timeout_s``; any number of times."""
        self._gone.set()
        with self._closing:
            entered, self._entered = self._entered, False
            if entered:
                self._shut_down()
            self._host.stop(0.0)

    @property
    def _membership(self) -> Membership:
        return replace(self._shared.membership, device=self._config.number)

    def _loop(self) -> None:
        while self._state.phase is not machine.Phase.GONE:
            event = self._events.get()
            if isinstance(event, events.Event):
                if not _reads_data(event, self.name) or self._consents(event):
                    self._take(event)
            else:
                self._take_beside(event)

    def _take_beside(self, event: Beside | Own) -> None:
        """Handle what changes no phase of the session."""
        match event:
            case PeerLink():
                self._open.peers.know(event)
                self._open.network.expect(event.worker, event.paths, EXPECTED_DIAL_S)
            case Standbys():
                self._expect_standbys(event)
            case Revoked(peer, reason):
                log.warning("peer.revoked", peer=peer, reason=reason)
                self._open.network.bar(peer, f"its certificate was revoked: {reason}")
            case KeepCopies() if not self._state.outdated:
                self._open.copies.keep(event.copies)
            case StoreCopy() if not self._state.outdated:
                self._open.copies.store(event)
            case TrustAuthorities():
                self._shared.trust_authorities(event.ca_pem, event.left_s)
            case AddressChanged():
                self._move()
            case DeviceChanged():  # with another introduction
                self._stream.move()
            case MannersChanged(manners):
                self._take_up(manners)
            case ConsentChanged():
                if self._apps is not None:
                    self._apps.consent_changed()
                self._say_consent()
                self._say_weights()

    def _take(self, event: events.Event) -> None:
        """Handle an event of the session."""
        todo = self._handle(event)
        if isinstance(event, events.Welcome) and not self._state.outdated:
            self._heartbeat_s = event.heartbeat_s
            self._idle_heartbeat_s = max(event.heartbeat_s, event.idle_heartbeat_s)
            self._welcomed.set()
            if self._apps is not None:
                self._apps.attend(self._membership)
            self._host.report_codecs()
            for joined in self._open.network.reported():
                self._say(_joined(*joined))
            self._say_consent()
            self._say_weights()
        if isinstance(event, events.Release):
            self._consent.close(event.job, event.reason)
        self._perform_all(todo)

    def _handle(self, event: events.Event) -> tuple[instructions.Instruction, ...]:
        before = self._state
        self._state, todo = machine.handle(before, event)
        self.activity = _activity(self._state)
        self._open.copies.may_work(self._state.phase is machine.Phase.IDLE)
        _log_change(before, self._state, event)
        return todo

    def _perform_all(self, todo: Iterable[instructions.Instruction]) -> None:
        for instruction in todo:
            self._perform(instruction)

    def _perform(self, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.Send(message):
                self._say(message)
            case instructions.Reconnect(after_s, reason):
                log.warning("session.lost", reason=reason, again_in_s=round(after_s, 2))
                self._stream.reopen(after_s)
            case instructions.HangUp(reason):
                log.warning("session.refused", reason=reason)
                self._stream.close(wait=False)
            case instructions.Quit(reason, dismissed, for_good):
                if dismissed and self.end is None:
                    word = "dismissed for good" if for_good else "dismissed"
                    self.end = AccessDenied(f"the coordinator {word} this worker: {reason}")
                self._events.put(events.Drained())
            case _:
                self._host.do(instruction)

    def _shut_down(self) -> None:
        self._open.end_copies()
        deadline_s = time.monotonic() + self._config.leave_timeout_s
        if self._apps is not None:
            self._apps.stop()
        self._stream.close()
        self._host.stop(max(0.1, deadline_s - time.monotonic()) / 2)
        self._open.close(max(0.1, deadline_s - time.monotonic()))
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
        self._say(self._heartbeat())
        log.info("limits.taken_up", paused=manners.paused, **shown_limits(limits))

    def _pause(self, manners: Manners) -> None:
        self._manners = manners
        apps, self._apps = self._apps, None
        if apps is not None:
            apps.stop()
        self._perform_all(self._handle(events.PauseAsked(manners.paused)))
        self._say(self._heartbeat())

    def _guest(self) -> told.Guest:
        manners, memory_bytes = self._manners, self._host.device.memory_limit_bytes
        return messages.guest_limits(manners.limits, manners.paused, memory_bytes, self._config.apps_only)

    # ---------------------------------------------------------------- the coordinator

    def _move(self) -> None:
        """Go on from another address: nobody at the other end of what is open hears of it by itself."""
        self._stream.move()
        self._open.moved()
        if self._apps is not None:
            self._apps.moved()

    def _receive(self, message: pb.ToWorker) -> None:
        try:
            self._events.put(messages.event_from(message))
        except AtollError as error:
            # A faulty assignment or commit must be answered, or the job waits for ever.
            log.error("message.refused", reason=str(error))
            if message.WhichOneof("body") in messages.ANSWERED:
                self._say(messages.refusal(message, str(error)))

    def _lost_coordinator(self, reason: str) -> None:
        self._events.put(events.Disconnected(reason, self._random.random()))

    def _refused(self, error: AtollError) -> None:
        self.end = error
        self._events.put(events.Dismiss(str(error), for_good=True))

    def _say(self, message: object) -> None:
        self._send(to_coordinator(message))

    def _send(self, message: pb.FromWorker) -> None:
        if self._consent.sends(message) and not self._stream.send(message):
            log.warning("session.congested", queued=self._config.outgoing_messages)

    def _introduce(self) -> pb.FromWorker:
        config, shared, stage = self._config, self._shared, held(self._state)
        message = pb.FromWorker(
            introduction=pb.Introduction(
                protocol=PROTOCOL_VERSION,
                name=config.shown_name,
                device=self._host.device,
                peer_addresses=[pb.Address(host=h, port=p) for h, p in peer_addresses(config, shared.port)],
                site=config.site or (shared.membership.worker if shared.devices > 1 else ""),
                codecs=sorted(CODECS),
                incarnation=self._incarnation,
                codec_speeds=self._host.codec_speeds,
                datasets=registered(config),  # each time: data may have been registered meanwhile
                held=None if stage is None else coding.write(stage, pb.HeldStage),
                guest=coding.write(self._guest(), pb.GuestLimits),
                copies=[coding.write(copy, pb.CopyHeld) for copy in self._open.copies.held],
                copy_bytes=self._open.copies.lent_bytes,
            )
        )
        if not self._consent.sends(message):
            del message.introduction.datasets[:]
        return message

    # ---------------------------------------------------------------- consent

    def _consents(self, event: events.Participate | events.Assign) -> bool:
        """True where the session may take up an invitation; else the coordinator hears why not."""
        if self._state.outdated or self._state.phase not in WELCOMED:
            return True  # the session ignores it
        try:
            answer = self._consent.judge(event.message)
        except AtollError as error:
            self._say(_not_judged(event, str(error)))
            return False
        if answer is not None:
            self._withdraw(answer)
            self._say(answer)
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
                self._say(answer)

    def _withdraw(self, answer: told.ConsentSaid) -> None:
        """Stop a job that runs here without its consent, whatever the coordinator says."""
        if answer.word != Word.GIVEN and answer.job == self._state.job:
            self._state, todo = machine.handle(
                self._state, events.Release(answer.job, self._state.version, answer.reason)
            )
            self._perform_all(todo)

    def _say_weights(self) -> None:
        """Tell the coordinator which weights this machine's owner added."""
        if not self._config.number and (hashes := self._weights.told_anew(self._shared.cache)) is not None:
            self._say(told.HeldWeights(hashes))

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
            self._say(self._heartbeat())

    def _heartbeat(self) -> told.Heartbeat:
        state = self._state
        found = self._host.waiting
        return told.Heartbeat(
            worker_time_s=time.monotonic(),  # as Spans have it
            job=state.job,
            version=state.version,
            step=state.repeated if state.standby else state.step,
            progress=self._host.progress + self._open.network.progress(state.peers),
            memory_bytes=self._host.memory_bytes,
            waits=None
            if found is None
            else told.Waits(found.peer, found.what, found.step, time.monotonic() - found.since_s),
            logged_from=self._host.logged_from,
            guest=self._guest(),
            memory_peak_bytes=self._host.memory_peak_bytes,
            sequence=next(self._beats),
        )

    def _peer_lost(self, peer: str, reason: str) -> None:
        self._events.put(events.PeerLost(peer, reason))

    def _peer_joined(self, peer: str, way: Way | None, relay: str) -> None:
        if way is not None:
            log.info("peer.joined", peer=peer, way=str(way), relay=relay or None)
        self._say(_joined(peer, way, relay))

    def _expect_standbys(self, expected: Standbys) -> None:
        if expected.job != self._state.job or self._state.outdated:
            return
        self._host.stand_by(expected.job, messages.ranks_of(expected.peers), checks=expected.checks)
        for link in messages.links_of(expected.peers):
            self._open.network.expect(link.worker, link.paths, EXPECTED_DIAL_S)


def _host_of(config: WorkerConfig, consent: Consent, shared: Shared) -> ComputeHost | AppsOnly:
    return AppsOnly(config, consent) if config.apps_only else ComputeHost(config, consent, shared.ranks)


def _log_joined(worker: str, config: WorkerConfig, shared: Shared, host: ComputeHost | AppsOnly) -> None:
    device, network = host.device, shared.ranks is not None
    log.info(
        "worker.joined",
        worker=worker,
        coordinator=shared.membership.work_address,
        protections=protections(device.kind, chosen(config.sandbox, device.kind), network=network).line(),
        memory=str(host.memory_under()),
        processes=device.processes or 1,
    )


def _log_change(before: machine.Session, now: machine.Session, event: events.Event) -> None:
    """Log what a person watching this worker wants to see; a step's own phases only on debug."""
    if now.phase is not before.phase:
        write = log.debug if {now.phase, before.phase} <= STEP_PHASES else log.info
        write("session.phase", phase=str(now.phase), cause=type(event).__name__, job=now.job, step=now.step)
    elif now.ignored != before.ignored:
        log.debug("event.ignored", event_kind=type(event).__name__, phase=str(before.phase))


def peer_addresses(config: WorkerConfig, port: int) -> tuple[tuple[str, int], ...]:
    """Return where peers may reach this machine, whose own port is ``port``; nowhere without inbound."""
    if not config.inbound:
        return ()
    own = own_address(config.host, config.port) or "127.0.0.1"
    host = own if config.listen_host in ANYWHERE else config.listen_host
    return tuple((h, p or port) for h, p in config.advertise) or ((host, port),)


def registered(config: WorkerConfig) -> list[pb.DatasetFacts]:
    """Return facts of registered data sets; a damaged folder must not keep the worker out."""
    if config.number:  # they are the machine's, and its first device's
        return []
    try:
        return [coding.write(facts, pb.DatasetFacts) for facts in known_facts(config.state_dir)]
    except AtollError as error:
        log.error("data.unreadable", reason=str(error))
        return []


def _activity(state: machine.Session) -> DeviceActivity:
    return DeviceActivity("", str(state.phase), state.job, state.step, state.connected)


def _joined(peer: str, way: Way | None, relay: str) -> told.PeerJoined:
    """How a peer is joined; None: not any more."""
    return told.PeerJoined(peer, way or "", relay)


def _reads_data(event: events.Event, worker: str) -> TypeGuard[events.Participate | events.Assign]:
    """Whether an event asks a worker for data of its machine."""
    return isinstance(event, events.Participate) or (
        isinstance(event, events.Assign) and event.data_of == worker
    )


def _not_judged(event: events.Participate | events.Assign, why: str) -> told.ConsentSaid | told.ClientFailed:
    """What the coordinator hears where an invitation cannot be judged."""
    if isinstance(event, events.Assign):
        return told.ConsentSaid(event.job, Word.REFUSED, why)
    return told.ClientFailed(event.job, 0, why, "load")
