"""A worker's process: the real session machine over a simulated stream and a simulated compute process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atoll.federated import DatasetFacts, FieldFacts
from atoll.messages.to_worker import Paths, PeerLink, RankPeer
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from tests.sim.compute import Bench, Machine
from tests.sim.coordinator import Coordinator
from tests.sim.network import End, Network, Stream
from tests.sim.secure import Vectors
from tests.sim.stage import Message
from worker.session import events as e
from worker.session import instructions as todo
from worker.session.machine import Session, handle
from worker.session.state import STAGED, held

CONNECT_S = 0.1
CONNECT_TIMEOUT_S = 5.0
MEMORY = 2**30
DIGITS = DatasetFacts("digits", 100, (FieldFacts("image", "float32", (2,)),))
PEER_SILENCE_S = 4.0


def introduction(name: str, incarnation: int = 1, **more: Any) -> ev.Introduction:
    """Return how a worker introduces itself."""
    addresses = (("10.0.0.1", 4000),)
    return ev.Introduction(name, incarnation, "cpu", "model", 1, MEMORY, MEMORY, addresses=addresses, **more)


def opaque(message: Any) -> Any:
    """Return what a session passes on unread."""
    return message


def linked(peers: Iterable[do.RankPeer]) -> tuple[RankPeer, ...]:
    """Return the neighbours that a session is given."""
    return tuple(RankPeer(peer.rank, PeerLink(peer.link.peer, Paths())) for peer in peers)


def event_of(message: do.Message) -> e.Event | None:
    """Return the event that a coordinator's message is to a session, None where the shell alone hears it."""
    match message:
        case do.Assign(job, plan=plan, peers=peers, first_step=first, replay=replay):
            steps, whole = message.spec.training.steps, opaque(message)
            links, pieces = linked(peers), len(plan.replicas[plan.places[message.rank].replica].pieces)
            return e.Assign(
                job, plan.version, links, first, whole, replay, (), plan.exchange, steps, pieces,
                joining=message.joining,
            )  # fmt: skip
        case do.Reconfigure(job, plan, base, step, peers, standby):
            links, joining = linked(peers), message.joining
            return e.Reconfigure(job, plan.version, base, step, links, opaque(message), standby, joining)
        case do.StepStart() | do.StepDiscard() | do.Release() | do.RoundTaken() | do.Dismiss():
            return message
        case do.TrainRound() | do.EvaluateRound() | do.SecureOrder():
            return message
        case do.StepCommit():
            return message
        case do.Participate(job, version):
            return e.Participate(job, version, opaque(message))
        case do.ProbeOps(request):
            return e.ProbeOps(request, opaque(message))
        case do.ProbeLink(request, link):
            return e.ProbeLink(request, PeerLink(link.peer, Paths()), message.seconds, message.max_bytes)
    return None


@dataclass
class Worker(Machine):
    """``coordinator`` is whoever answers at its address; ``peers`` finds the other workers."""

    network: Network = field(kw_only=True)
    coordinator: Callable[[], Coordinator] = field(kw_only=True)
    peers: Callable[[str], Worker | None] = field(kw_only=True)
    applied: Callable[[str, str, int, int], None] = field(default=lambda *_: None, kw_only=True)
    said: Callable[[str, Any], None] = field(default=lambda *_: None, kw_only=True)
    missed: Callable[[str, do.Assign, str], None] = field(default=lambda *_: None, kw_only=True)
    obeyed: Callable[[str, Any, int, int], None] = field(default=lambda *_: None, kw_only=True)
    data: bool = field(default=True, kw_only=True)
    site: str = field(default="", kw_only=True)
    population: str = field(default="", kw_only=True)
    vectors: Vectors = field(default_factory=Vectors, kw_only=True)
    log_steps: int = field(default=1000, kw_only=True)  # that its send log has room for
    copy_bytes: int = field(default=2**30, kw_only=True)  # that it lends to copies
    clock_off_s: float = field(default=0.0, init=False)
    session: Session = field(default_factory=Session, init=False)
    stream: Stream | None = field(default=None, init=False)
    bench: Bench = field(init=False)
    _idle_heartbeat_s: float = field(default=0.0, init=False)
    _beaten_s: float = field(default=0.0, init=False)
    _term: int = field(default=0, init=False)  # the greatest it was welcomed under
    _links: dict[str, Stream] = field(default_factory=dict, init=False)

    def start(self) -> None:
        """Begin a process that knows nothing of an earlier one's session."""
        super().start()
        self.session, self.stream, self._links, self._term = Session(), None, {}, 0
        self._idle_heartbeat_s, self._beaten_s = 0.0, self.clock.now_s
        self.bench = Bench(
            self,
            self.hear,
            self._send_tensors,
            self._store,
            self._has,
            self._applied,
            self._reaches,
            self._tell,
            self._holds,
        )
        self.bench.log.most, self.bench.vectors = self.log_steps, self.vectors
        self.bench.population = self.population
        self._connect()
        self._beat()

    # ------------------------------------------------------------ the session

    def hear(self, event: e.Event) -> None:
        """Step the session and carry out what it wants."""
        before = self.session
        self.session, instructions = handle(before, event)
        if before.phase is not self.session.phase:
            self.clock.tell(f"{self.name} {before.phase} -> {self.session.phase} ({type(event).__name__})")
        for instruction in instructions:
            self._perform(instruction)

    def _perform(self, instruction: todo.Instruction) -> None:
        match instruction:
            case todo.Send(message):
                self.said(self.name, message)
                if self.stream is not None:
                    self.stream.send(1, message)
            case todo.HangUp(reason):
                if self.stream is not None:
                    self.stream.end(reason, 1)
                    self.stream.end(reason, 0, notice_s=self.network.delay_s)
            case todo.Reconnect(after_s, _):
                self.stream = None
                self.after(after_s, self._connect)
            case todo.Quit():
                self.after(0.5, self._quit)
            case _:
                self.bench.obey(instruction)

    def _quit(self) -> None:
        self.hear(e.Drained())
        self.network.died(self)
        self.kill()

    def _beat(self) -> None:
        interval_s = self.coordinator().config.liveness.heartbeat_s
        state, silent_s = self.session, self.clock.now_s - self._beaten_s
        if self.stream is not None and (state.job or silent_s + interval_s / 2 >= self._idle_heartbeat_s):
            self._beaten_s = self.clock.now_s
            self.stream.send(
                1,
                ev.Heartbeat(
                    self.clock.now_s + self.clock_off_s, state.job, state.version,
                    state.repeated if state.standby else state.step,
                    self._counted(), MEMORY, self._waits(), self.bench.log.since,
                ),
            )  # fmt: skip
        self.after(interval_s, self._beat)

    def _counted(self) -> int:
        """Return the progress that it reports: a liar's moves whatever it does."""
        return int(self.clock.now_s) if self.claims else self.bench.progress

    def _waits(self) -> ev.Waits | None:
        if self.claims:
            return ev.Waits(self.claims, "forward", self.session.step, 1e6)
        return None if self.hung else self.bench.waits

    # ------------------------------------------------------------ the coordinator

    def _connect(self) -> None:
        coordinator = self.coordinator()
        random = self.clock.random
        if not coordinator.alive:
            self.after(CONNECT_S, lambda: self._lost("connection refused"))
            return
        if coordinator.frozen or self.network.cut_until_s(self.name, coordinator.name) > self.clock.now_s:
            self.after(CONNECT_TIMEOUT_S, lambda: self._lost("no answer"))
            return
        life, mine = coordinator.life, self.life

        def reach() -> None:
            if not self.alive or self.life != mine:
                return
            if not coordinator.alive or coordinator.life != life:
                self.after(0.0, lambda: self._lost("connection refused"))
            else:
                end = End(self, partial(self._received, coordinator.term), self._lost)
                welcome = partial(self._welcome, coordinator)
                coordinator.accept(end, self.name, self._introduction(), welcome)

        coordinator.clock.after(CONNECT_S * (0.5 + random.random()), reach)

    def _welcome(self, coordinator: Coordinator, stream: Stream) -> None:
        liveness, term = coordinator.config.liveness, coordinator.term

        def hear() -> None:
            self.stream, self._term = stream, max(self._term, term)
            self._idle_heartbeat_s = liveness.idle_heartbeat_s(len(coordinator.outboxes))
            self.hear(e.Welcome(self.name, liveness.heartbeat_s, self._idle_heartbeat_s, term))

        # The welcome is the stream's first message: nothing overtakes it.
        arrival_s = self.clock.now_s + self.network.travel_s("", self.name, 100)
        stream.last_s[1] = arrival_s
        self.after(arrival_s - self.clock.now_s, hear)

    def _received(self, term: int, message: Any) -> None:
        if isinstance(message, do.KeepCopies):
            if not self.session.outdated:
                self.bench.keep(message.copies)
            return
        if isinstance(message, do.StoreCopy):
            self.bench.store_copy(message)
            return
        event = event_of(message)
        if event is None:
            return
        ignored = self.session.ignored
        self.hear(event)
        if self.session.ignored == ignored:
            self.obeyed(self.name, message, term, self._term)

    def _lost(self, reason: str) -> None:
        self.stream = None
        self.hear(e.Disconnected(reason, self.clock.random.random()))

    def _introduction(self) -> ev.Introduction:
        return introduction(
            self.name,
            self.life,
            datasets=(DIGITS,) if self.data else (),
            site=self.site,
            held=held(self.session),
            copies=tuple(self.bench.copies.values()),
            copy_bytes=self.copy_bytes,
        )

    def _holds(self, peer: str, blob: str) -> bool:
        other = self.peers(peer)
        return other is not None and other.alive and blob in other.disk

    def _tell(self, held: ev.CopyHeld | ev.CopyStored) -> None:
        if self.stream is not None:
            self.stream.send(1, held)

    # ------------------------------------------------------------ peers and blobs

    def _send_tensors(self, peer: str, message: Message) -> None:
        other = self.peers(peer)
        if self.network.swallows(self.name, peer):
            return
        if other is None or not other.alive:
            self.after(0.1, lambda: self._peer_lost(peer, "connection refused"))
            return
        stream = self._links.get(peer)
        if stream is None or not all(end.open for end in stream.ends):
            stream = self._dial(other)
        mine = next(side for side, end in enumerate(stream.ends) if end.process is self)
        stream.send(mine, message, 200_000)

    def _dial(self, other: Worker) -> Stream:
        here = End(self, self.bench.arrived, lambda why: self._peer_lost(other.name, why))
        there = End(other, other.bench.arrived, lambda why: other._peer_lost(self.name, why))
        stream = self.network.connect(here, there)
        self._links[other.name] = other._links[self.name] = stream
        return stream

    def _peer_lost(self, peer: str, reason: str) -> None:
        self._links.pop(peer, None)
        self.bench.peer_lost(peer, reason)
        self.hear(e.PeerLost(peer, reason))

    def _reaches(self, peer: str) -> bool:
        other = self.peers(peer)
        return other is not None and other.alive

    def notice_silence(self, peer: Worker) -> None:
        """Give up a link to a peer that still does not answer."""
        if peer.frozen and peer.name in self._links:
            self._links[peer.name].end("silent")

    def killed_for_memory(self) -> None:
        """Lose the stage that is held, where there is one, with all that was logged of it."""
        job, version, step = self.session.job, self.session.version, self.session.step
        if self.session.phase in STAGED:
            self.bench.lose()
            self.hear(e.StageFailed(job, version, step, "killed", gone=True, memory_bytes=MEMORY))

    def revive(self) -> None:
        """Start anew, unless that has happened."""
        if not self.alive:
            self.start()

    def _store(self, blob: str) -> None:
        coordinator = self.coordinator()
        coordinator.folder.blobs.add(blob)
        coordinator.promises.told(self.name, blob, self.clock.now_s)

    def _has(self, work: do.Assign, blob: str) -> bool:
        found = blob in self.coordinator().folder.blobs
        if not found:
            self.missed(self.name, work, blob)
        return found

    def _applied(self, job: str, version: int, step: int) -> None:
        self.applied(self.name, job, version, step)
