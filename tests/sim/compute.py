"""A simulated compute process: obeys a session's instructions, with times instead of tensors and hashes
instead of weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.errors import BadFrame
from atoll.plan import Place, Plan
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.jobs import BESIDE
from coordinator.pipeline.history import version_at
from strategies.exchanges.partners import groups_of as groups_of
from tests.sim import populations
from tests.sim.clock import Process, digest
from tests.sim.local_steps import LOCAL_STEP_S
from tests.sim.own_steps import OwnSteps
from tests.sim.populations import roster
from tests.sim.secure import InMemory, Vectors, answered
from tests.sim.send_log import Kept, SendLog, Wanted
from tests.sim.stage import PART, Held, Key, Message, Part, Tensors
from tests.sim.values import NAN, batches, forward, joined, micro_losses, number, square_norms, told, update
from worker.session import events as e
from worker.session import instructions as todo

STEP_S = 0.4
LOAD_S = 0.6
WARM_S = 0.1  # the same where every tensor is on this machine's disk
FETCH_S = 0.3  # a copy, in the background
KEEP_S = 0.2  # a snapshot, on this machine's disk
TENSOR_BYTES = 100_000
APPLY_S = 0.03
STORE_S = 0.5
EVALUATE_S = 0.1
ROUND_S = 1.0
REPEAT_S = 0.1  # a step that is repeated
AGAIN_S = 1.0  # until a neighbour that may not have heard of the plan is asked again
RECONFIGURE_S = 0.05


def whole(message: Any) -> Any:
    """Return a coordinator's own message, which a simulated session passes on."""
    return message


@dataclass
class Machine(Process):
    """A process that computes; ``hung``: what it computes now never ends; ``claims``: the worker that it
    pretends to wait for; ``poison``: what it computes is not finite; ``slanders``: it only says so;
    ``diverges_at``: the step at which the model itself is not finite any more; ``cheats_from``: the first at
    which its gradients are others; ``slips``: they are where it repeats steps."""

    slowness: float = field(default=1.0, kw_only=True)
    hung: bool = field(default=False, kw_only=True)
    claims: str = field(default="", kw_only=True)
    poison: bool = field(default=False, kw_only=True)
    slanders: bool = field(default=False, kw_only=True)
    diverges_at: float = field(default=math.inf, kw_only=True)
    disk: set[str] = field(default_factory=set, kw_only=True)  # blobs, whatever becomes of the process
    cheats_from: float = field(default=math.inf, kw_only=True)
    slips: bool = field(default=False, kw_only=True)

    @property
    def misleads(self) -> bool:
        """Whether it has computed wrong, or may."""
        return self.slips or self.cheats_from < math.inf

    def start(self) -> None:
        """Begin a life in which computations end."""
        super().start()
        self.hung, self.claims, self.poison, self.slanders = False, "", False, False
        self.cheats_from, self.slips = math.inf, False


def tensors_of(plan: Plan, place: Place, names: list[str]) -> list[str]:
    """Return the names of a stage's tensors, of all of its pieces."""
    pieces = plan.replicas[place.replica].stages[place.stage].pieces
    return [name for piece in pieces for name in names[piece.start : piece.stop]]


@dataclass
class Bench(OwnSteps):
    """One worker's computations, one after another."""

    process: Machine
    post: Callable[[e.Event], None]
    send: Callable[[str, Message], None]  # to a peer
    store: Callable[[str], None]  # a blob, into the coordinator's store
    has: Callable[[do.Assign, str], bool]  # whether the store has a blob
    applied: Callable[[str, int, int], None]  # job, version, step: for the checks
    reaches: Callable[[str], bool]  # whether a peer is there
    tell: Callable[[ev.CopyHeld | ev.CopyStored], None] = lambda held: None  # the coordinator, of copies
    holds: Callable[[str, str], bool] = lambda peer, blob: False  # whether a peer can send a blob
    held: Held | None = None
    repeats: Held | None = None  # a stage on its way to the step in flight
    standby: bool = False  # ... that repeats every later step as well
    queue: deque[e.StepCommit | e.Reconfigure] = field(default_factory=deque)  # of a standby
    _commits: deque[e.StepCommit] = field(default_factory=deque)  # of a peer, to be repeated
    _commit: Any = None  # of which one is under way
    log: SendLog = field(default_factory=SendLog)
    joined: str = ""
    member: InMemory | None = None  # of the job's secure rounds
    population: str = ""  # that it speaks for
    vectors: Vectors = field(default_factory=Vectors)
    copies: dict[str, ev.CopyHeld] = field(default_factory=dict)
    warm: list[bool] = field(default_factory=list)  # of each stage that was loaded, but for spot checks
    inbox: dict[Key, str] = field(default_factory=dict)
    kept: dict[Key, str] = field(default_factory=dict)  # what neighbours send again
    parts: dict[Key, str] = field(default_factory=dict)  # of other replicas
    running: tuple[str, int, int] | None = None
    progress: int = 0
    _asked_s: float = 0.0  # when the step under way was asked for
    _asking: bool = False  # a step that is repeated is under way
    _said_loaded: bool = False
    _sent: dict[Key, str] = field(default_factory=dict)
    _due: bool = False  # the step under way has computed for long enough to send something
    _joining: bool = False  # ... and is a round
    _turn: int = 0
    _computed_s: float = 0.0  # since the step under way was asked for
    _went: str | None = None  # forwards, in the step that is repeated
    _closed: str | None = None  # ... by the last piece, of a stage that has it beside the first
    _loss: str | None = None  # of the step that is repeated, once what its pipeline sends is here
    _wanted: list[Wanted] = field(default_factory=list)  # of steps that are repeated here as well
    _loading: bool = False
    _order: int = 0  # of copies

    def obey(self, instruction: todo.Instruction) -> None:
        """Carry out one instruction; what takes time answers with an event."""
        match instruction:
            case e.Assign(message=work):
                self._load(whole(work))
            case todo.RunStep(job, version, step) if self.held is not None and self.held.stepwise:
                self.running, self._due, self._joining = (job, version, step), False, False
                self._asked_s, self._computed_s = self.process.clock.now_s, 0.0
                self._later(LOCAL_STEP_S, self._own_step)
            case todo.RunRound(job, version, step):
                self.running, self._due, self._joining = (job, version, step), False, False
                self._asked_s, self._computed_s = self.process.clock.now_s, 0.0
                self._later(APPLY_S, self._begin_round)
            case todo.RunStep(job, version, step) if self.held is not None and self.held.plan.local:
                self.running, self._due, self._joining = (job, version, step), False, False
                self._asked_s, self._computed_s = self.process.clock.now_s, 0.0
                self._later(LOCAL_STEP_S, self._local_step)
            case todo.RunStep(job, version, step):
                self.running, self._due, self._joining = (job, version, step), False, False
                self._asked_s, self._computed_s = self.process.clock.now_s, 0.0
                self._later(STEP_S / 2, self._begin)
            case e.StepCommit():
                self.log.trim(instruction.replay_from, instruction.step)
                self._later(APPLY_S, lambda: self._apply(instruction))
            case todo.Reconfigure(order, repeating=True) | todo.RepeatStep(order):
                if isinstance(order, e.StepCommit):
                    self.log.trim(order.replay_from, order.step)
                self.queue.append(order)
                if self.repeats is not None and not self._asking and self._said_loaded:
                    self._repeat()
            case todo.Reconfigure(change):
                self._reconfigure(change, whole(change.message))
            case todo.Evaluate(commit):
                job, version, step = commit.job, commit.version, commit.step
                self._later(EVALUATE_S, lambda: self._evaluate(job, version, step))
            case e.StepDiscard() | todo.Interrupt():
                self._stop()
            case e.Release(job, version):
                self.lose()
                self._forget(lambda key: key[0] == job and key[1] <= version)
            case e.ProbeOps(request, ops):
                timings = dict.fromkeys(whole(ops).signatures, (0.01, 0.02))
                self._later(0.1, lambda: self.post(ev.OpsProbed(request, timings)))
            case e.ProbeLink(request, link):
                answer = ev.LinkProbed(request, link.worker, 0.04, 50e6)
                self._later(0.05, lambda: self.post(answer))
            case e.Participate(job, version):
                self._later(LOAD_S, lambda: self._join(job, version))
            case e.TrainRound(job, at_round):
                self._later(ROUND_S, lambda: self._train(job, at_round, instruction))
            case e.SecureOrder():
                if self.member is not None:
                    self.post(answered(self.member, instruction))
            case e.EvaluateRound(job, at_round):
                self._later(EVALUATE_S, lambda: self._test(job, at_round))

    def lose(self) -> None:
        """Hold nothing any more."""
        self._stop()
        self.held, self.joined, self.log = None, "", SendLog(most=self.log.most)
        self._wanted.clear()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        """Compute for a while, unless what comes first stops it."""
        turn, takes_s = self._turn, seconds * self.process.slowness

        def done() -> None:
            if turn == self._turn and not self.process.hung:
                self.progress += 1
                self._computed_s += takes_s
                act()

        self.process.after(takes_s, done)

    def _stop(self) -> None:
        self._turn += 1
        self.running = self.repeats = None
        self._asking = self._said_loaded = self.standby = self._loading = False
        self.queue.clear()
        self._commits.clear()

    def _forget(self, which: Callable[[Key], bool]) -> None:
        for messages in (self.inbox, self._sent, self.parts):
            for key in [key for key in messages if which(key)]:
                del messages[key]

    @property
    def waits(self) -> ev.Waits | None:
        """What the step under way waits for; None while it computes, or where there is none."""
        held, running = self.held, self.running
        if self.repeats is not None:
            return self._waits_for_repeats(self.repeats)
        if held is None or running is None or not self._due:
            return None
        if held.plan.local:
            return self._waits_of_peer(held, running)
        if (*running, False) in self._sent:
            awaited = next((w for w, r in held.others.items() if (*running, r) not in self.parts), "")
            return (
                ev.Waits(awaited, "part", running[2], self.process.clock.now_s - self._asked_s)
                if awaited
                else None
            )
        sent = (*running, True) in self._sent
        if (sent and held.last) or (not sent and held.stage == 0):
            return None
        behind = not sent or (held.closes and running[2] not in held.values)
        peer, what = (held.neighbour(-1), "forward") if behind else (held.neighbour(+1), "backward")
        return ev.Waits(peer, what, running[2], self.process.clock.now_s - self._asked_s)

    # ------------------------------------------------------------ stages

    def _load(self, work: do.Assign) -> None:
        self._stop()
        self._loading = True
        spec, place = work.spec, work.plan.places[work.rank]
        names = tensors_of(work.plan, place, sorted(spec.tensors))
        blobs = {name: work.tensors.get(name) or spec.tensors[name] for name in names}
        warm = self.process.disk.issuperset(blobs.values())
        first = work.replay.first_step if work.replay is not None else work.first_step
        self.log = SendLog(work.job, first, self.log.most)
        self._wanted.clear()

        def loaded() -> None:
            disk = self.process.disk
            gone = [blob for blob in blobs.values() if blob not in disk and not self.has(work, blob)]
            if gone:
                reason = f"blob {gone[0][:8]} is not there"
                self.post(e.StageFailed(work.job, work.plan.version, work.first_step, reason))
                return
            self.kept.clear()
            self._loading = False
            if work.plan.version < BESIDE:
                self.warm.append(warm)
            self.repeats = Held(work, work.plan, blobs, first, first)
            self.standby = work.replay is not None and work.replay.standby
            self._commits = deque(work.replay.commits if work.replay is not None else ())
            self._repeat()

        self._later(WARM_S if warm else LOAD_S, loaded)

    # ------------------------------------------------------------ copies

    def keep(self, copies: tuple[do.StageCopy, ...]) -> None:
        """Keep these copies and no others, as soon as there is time for that."""
        self._order += 1
        self.copies = {}
        self._keep_next(copies, self._order)

    def _keep_next(self, copies: tuple[do.StageCopy, ...], order: int) -> None:
        if order != self._order or not copies:
            return
        busy = self.held is not None or self.repeats is not None or self._loading
        if busy and not copies[0].holder:
            self.process.after(FETCH_S, lambda: self._keep_next(copies, order))
            return
        self.process.after(FETCH_S, lambda: self._kept(copies, order))

    def _kept(self, copies: tuple[do.StageCopy, ...], order: int) -> None:
        if order != self._order:
            return
        copy, *rest = copies
        place = copy.plan.places[copy.rank]
        blobs = [copy.tensors[name] for name in tensors_of(copy.plan, place, sorted(copy.tensors))]
        blobs = list(copy.tensors.values()) if copy.holder else blobs
        new = [blob for blob in blobs if blob not in self.process.disk]
        if copy.holder and not all(self.holds(copy.holder, blob) for blob in new):
            self.tell(ev.CopyHeld(copy.job, copy.name, error=f"{copy.holder} does not send it"))
            self._keep_next(tuple(rest), order)
            return
        self.process.disk.update(blobs)
        n_bytes, came = len(blobs) * TENSOR_BYTES, len(new) * TENSOR_BYTES
        held = ev.CopyHeld(copy.job, copy.name, n_bytes, came, FETCH_S if new else 0.0)
        self.copies[copy.name] = held
        self.tell(held)
        self._keep_next(tuple(rest), order)

    # ------------------------------------------------------------ other workers for some stages

    def _reconfigure(self, change: e.Reconfigure, work: do.Reconfigure) -> None:
        held, job, version, step = self.held, change.job, change.version, change.step
        assert held is not None, f"{self.process.name} holds nothing to go on with"
        at = held.plan.last_step(held.step, held.work.spec.training.steps) if change.joining else held.step
        at += held.taken if held.stepwise and not change.joining else 0
        assert at == step, f"{self.process.name} goes on at {step} with the state after {at}"
        self._stop()
        held.plan = work.plan
        held.outputs.clear()
        held.values.clear()
        if work.store:
            self._snapshot(held, held.ran, held.step - 1)
        self._connect(held, job, version, step)

    def _connect(self, held: Held, job: str, version: int, step: int) -> None:

        def connected() -> None:
            peers = (*held.neighbours.values(), *held.others)
            away = [peer for peer in peers if not self.reaches(peer)]
            if away:
                self.post(e.StageFailed(job, version, step, "cannot connect", away[0]))
            else:
                self.post(ev.Loaded(job, version, RECONFIGURE_S))

        self._later(RECONFIGURE_S, connected)

    # ------------------------------------------------------------ steps that are repeated

    def _repeat(self) -> None:
        """Ask for what the neighbours sent in the next step, or be loaded after the last."""
        held = self.repeats
        assert held is not None
        if held.plan.local:
            self._repeat_own(held)
            return
        work = held.work
        self._asking = False
        if held.step == work.first_step and not self._said_loaded:
            self._said_loaded = True
            if not self.standby:
                self.held, self.repeats = held, None
            version = work.plan.version
            message = ev.Loaded(work.job, version, LOAD_S, digests=tuple(held.digests))
            self.post(message)
            if not self.standby:
                return
        if held.step >= work.first_step and not self._goes_on(held):
            return
        self._asking = True
        self._asked_s, self._went, self._closed, self._loss = self.process.clock.now_s, None, None, None
        self._ask(held, held.step)
        self._go_on()

    def _ask(self, held: Held, step: int) -> None:
        """Ask for what is missing of the step, and again where nobody answers."""
        if held is not self.repeats or held.step != step or not self._asking:
            return
        senders = self._senders(held)
        for what in self._missing(held):
            self.send(senders[what], Wanted(self.process.name, held.work.job, self._era(held), step, what))
        self.process.after(AGAIN_S, lambda: self._ask(held, step))

    def _goes_on(self, held: Held) -> bool:
        """Do what a standby has heard: True where that is to repeat a step."""
        while self.queue:
            order = self.queue[0]
            assert order.step == held.step, f"{self.process.name} has {held.step} steps, next is {order.step}"
            if isinstance(order, e.StepCommit):
                return True
            self.queue.popleft()
            held.plan = whole(order.message).plan
            if not order.standby:
                self._stop()
                self.held = held
                self._connect(held, order.job, order.version, order.step)
                return False
        return False

    def _era(self, held: Held) -> int:
        """Return the version of the step that is repeated."""
        if held.step >= held.work.first_step:
            return self.queue[0].version
        assert held.work.replay is not None
        eras = [(era.version, era.first_step) for era in held.work.replay.eras]
        return version_at(eras, held.step, 0)

    def _answered(self, answer: Kept) -> None:
        held = self.repeats
        if held is None or not self._asking:
            return
        if held.plan.local:
            self._answered_own(held, answer)
            return
        if (answer.job, answer.version, answer.step) != (held.work.job, self._era(held), held.step):
            return  # to somebody that this process was before
        if self._senders(held).get(answer.forwards) != answer.sender:
            return  # ... in another rank: real workers take a message from the peer that they await it from
        self.progress += 1
        if answer.value is None:
            reason = f"a message of step {answer.step} has left the send log"
            self._stop()
            self.post(e.StageFailed(held.work.job, held.work.plan.version, held.work.first_step, reason))
            return
        key = (answer.job, answer.version, answer.step, answer.forwards)
        if answer.forwards not in self._missing(held):
            return  # it is here, or was asked for while another stage was
        self.kept[key] = answer.value
        self._go_on()

    def _missing(self, held: Held) -> list[int]:
        """Return which messages of the step that is repeated are not here."""
        at = (held.work.job, self._era(held), held.step)
        wanted = [*held.neighbours, *(PART + replica for replica in dict.fromkeys(held.others.values()))]
        return [what for what in wanted if (*at, what) not in self.kept]

    def _waits_for_repeats(self, held: Held) -> ev.Waits | None:
        if self._asking and held.plan.local:
            waited_s, away = self.process.clock.now_s - self._asked_s, self._missing_own(held)
            peer = next(iter(away.values()), "")
            return ev.Waits(peer, "replay", self._commit.step, waited_s) if peer else None
        if not self._asking or not (missing := self._missing(held)):
            return None
        waited_s = self.process.clock.now_s - self._asked_s
        return ev.Waits(self._senders(held)[missing[0]], "replay", held.step, waited_s)

    def _senders(self, held: Held) -> dict[int, str]:
        """Return who sends each message of a step."""
        return {**held.neighbours, **{PART + replica: peer for peer, replica in held.others.items()}}

    def _go_on(self) -> None:
        """Compute the forward of the step that is repeated once its input is here, the rest with its loss."""
        held = self.repeats
        assert held is not None
        job, step, version = held.work.job, held.step, self._era(held)
        if self._went is None:
            given = self._given(held, step) if held.stage == 0 else self.kept.get((job, version, step, True))
            if given is None:
                return
            self._went = forward(given, held.tensors, held.names(0))
            self._record(version, step, True, self._went)
        came = self.kept.get((job, version, step, True))
        if held.closes and self._closed is None and came is not None:
            self._closed = forward(came, held.tensors, held.names(1))
            self._record(version, step, False, self._closed)
        missing = self._missing(held)
        if self._loss is None and not any(what < PART for what in missing):
            self._loss = self._went if held.last else self.kept[job, version, step, False]
            if not held.closes:
                self._record(version, step, False, self._loss)
            self._record(version, step, PART + held.replica, self._loss)
            missing = self._missing(held)
        if not missing:
            self._later(REPEAT_S, self._repeated)

    def _repeated(self) -> None:
        """End a step that is repeated, and apply it as it was."""
        held = self.repeats
        assert held is not None
        assert held.work.replay is not None
        job, step, version, replay = held.work.job, held.step, self._era(held), held.work.replay
        if step < held.work.first_step:
            scale = replay.scales[step - replay.first_step]
        else:
            order = self.queue.popleft()
            assert isinstance(order, e.StepCommit)
            scale = order.gradient_scale
        given = self._given(held, step) if held.stage == 0 else self.kept[job, version, step, True]
        loss = self._loss
        assert loss is not None
        taken = "" if held.last else loss
        parts = {r: self.kept[job, version, step, PART + r] for r in held.others.values()}
        parts[held.replica] = loss
        used = joined(",".join(parts[replica] for replica in sorted(parts)))
        used = digest("slip", used) if self.process.slips else used
        held.digests.append(told(held.tensors, step, used, given, taken))
        held.tensors = update(held.tensors, step, used, scale)
        held.step, held.ran = step + 1, version
        self.applied(job, version, step)
        if self.standby:
            self.post(e.StepApplied(job, version, step))
        if held.step in replay.stores:
            self._snapshot(held, version, step)
        self._repeat()

    def _record(self, version: int, step: int, forwards: int, value: str) -> None:
        """Log a message that is sent to who repeats the step as well."""
        self.log.add(version, step, forwards, value)
        wanted, self._wanted = self._wanted, []
        for one in wanted:
            self._asked(one)

    def _asked(self, wanted: Wanted) -> None:
        """Send again what was sent in a step; who repeats it as well does so when it is there."""
        value = self.log.find(wanted)
        if self.log.job != wanted.job:
            return  # it has not heard of the plan: who asks does so again
        if value is None and self.held is None:
            self._wanted.append(wanted)
        else:
            sender = self.process.name
            answer = Kept(sender, wanted.job, wanted.version, wanted.step, wanted.forwards, value)
            self.send(wanted.by, answer)

    def peer_lost(self, peer: str, reason: str) -> None:
        """A peer that is to send messages again is gone."""
        held = self.repeats
        waits = self._asking or not self.standby
        if held is not None and waits and peer in (*held.neighbours.values(), *held.others):
            self._stop()
            work = held.work
            self.post(e.StageFailed(work.job, work.plan.version, work.first_step, reason, peer))

    # ------------------------------------------------------------ steps

    def arrived(self, message: Message) -> None:
        """Take in a neighbour's message; it may be early."""
        if isinstance(message, Wanted):
            self._asked(message)
            return
        if isinstance(message, Kept):
            self._answered(message)
            return
        if self.held is None:
            return  # real workers take no message before they are loaded
        if isinstance(message, Part):
            self.parts[message.job, message.version, message.step, message.replica] = message.value
            self.progress += 1
            if self.held is not None and self.held.plan.local:
                self._peer_arrived(message)
            else:
                self._join_replicas()
            return
        self.inbox[message.job, message.version, message.step, message.forwards] = message.value
        self.progress += 1
        if self.held is not None and self.held.plan.local:
            self._peer_arrived(message)
            return
        self._forward()
        self._close()
        self._backward()

    def _begin(self) -> None:
        self._due = True
        self._forward()
        self._close()

    def _given(self, held: Held, step: int) -> str:
        return batches(step, held.plan.blocks, held.blocks)

    def _forward(self) -> None:
        held, running = self.held, self.running
        if held is None or running is None or not self._due or (*running, True) in self._sent:
            return
        job, version, step = running
        given = self._given(held, step) if held.stage == 0 else self.inbox.get((job, version, step, True))
        if given is None:
            return
        assert step == held.step, f"{self.process.name} runs step {step} on the state after {held.step} steps"
        value = self._made(held, step, given, 0)
        self._sent[*running, True] = value
        self.log.add(version, step, True, value)
        if held.last:
            held.values[step] = value
            self._later(STEP_S / 2, self._backward)
        else:
            self.send(held.neighbour(+1), Tensors(job, version, step, True, value))
            self._backward()

    def _made(self, held: Held, step: int, given: str, piece: int) -> str:
        """Return what a piece makes of what it is given."""
        whole = piece == len(held.pipeline.stages[held.stage].pieces) - 1
        spoiled = self.process.poison or (held.ends and whole and step >= self.process.diverges_at)
        if spoiled:
            return ",".join(NAN for _ in held.blocks)
        return forward(given, held.tensors, held.names(piece))

    def _close(self) -> None:
        """Compute the loss of what came forwards, and send it back, where stage 0 has the last piece."""
        held, running = self.held, self.running
        if held is None or running is None or not held.closes or running[2] in held.values:
            return
        came = self.inbox.get((*running, True))
        if came is None or (*running, True) not in self._sent:
            return
        job, version, step = running
        held.values[step] = loss = self._made(held, step, came, 1)
        self.log.add(version, step, False, loss)
        self.send(held.neighbour(-1), Tensors(job, version, step, False, loss))

    def _backward(self) -> None:
        held, running = self.held, self.running
        if held is None or running is None or (*running, True) not in self._sent:
            return
        if (*running, False) in self._sent:
            return
        job, version, step = running
        loss = held.values.get(step) if held.last else self.inbox.get((job, version, step, False))
        if loss is None:
            return
        held.values[step] = loss
        self._sent[*running, False] = loss
        if not held.closes:
            self.log.add(version, step, False, loss)
        if held.stage:
            self.send(held.neighbour(-1), Tensors(job, version, step, False, loss))
        self.log.add(version, step, PART + held.replica, loss)
        for peer in held.others:
            self.send(peer, Part(job, version, step, held.replica, loss))
        self._join_replicas()

    def _join_replicas(self) -> None:
        """Report the step once every replica's part of it is here."""
        held, running = self.held, self.running
        if held is None or running is None or (*running, False) not in self._sent:
            return
        job, version, step = running
        found = {replica: self.parts.get((*running, replica)) for replica in held.others.values()}
        found[held.replica] = own = held.values[step]
        if None in found.values():
            return
        total = joined(",".join(str(found[replica]) for replica in sorted(found)))
        used = digest("cheat", total) if step >= self.process.cheats_from and total != NAN else total
        held.outputs[step] = used
        given = self._given(held, step) if held.stage == 0 else self.inbox.get((*running, True), "")
        taken = "" if held.last else own
        training, shared = held.work.spec.training, len(held.plan.replicas) > 1
        losses: tuple[float, ...] = ()
        if held.ends:
            losses = micro_losses(own, training.n_micro, training.blocks, held.blocks)
        shown = number(total) if training.blocks == 1 else sum(losses, 0.0)
        norms = square_norms(held.tensors, sorted(held.tensors), used)
        message = ev.StepReady(
            job, version, step, losses if shared else (shown,) if held.ends else (), norms,
            finite=total != NAN and not self.process.slanders, forward_s=self._computed_s,
            digest=told(held.tensors, step, used, given, taken),
        )  # fmt: skip
        self.running = None
        self.post(message)

    def _apply(self, commit: e.StepCommit) -> None:
        job, version, step = commit.job, commit.version, commit.step
        held = self.held
        assert held is not None, f"{self.process.name} applies step {step} and holds nothing"
        if held.plan.local:
            self._apply_own(commit)
        else:
            held.tensors = update(held.tensors, step, held.outputs.pop(step), commit.gradient_scale)
        if commit.own:
            self.post(e.StepApplied(job, version, step))
            return
        held.values.pop(step, None)
        held.step, held.ran = step + 1, version
        self.applied(job, version, step)
        self._forget(lambda key: key[0] == job and key[2] <= step)
        if commit.store or commit.keep:
            self._snapshot(held, version, step, keep=commit.keep)
        self.post(e.StepApplied(job, version, step))

    def _snapshot(self, held: Held, version: int, step: int, *, keep: bool = False) -> None:
        snapshot, work = dict(held.tensors), self._keep if keep else self._store
        self.process.after(KEEP_S if keep else STORE_S, lambda: work(held, version, step, snapshot))

    def _keep(self, held: Held, version: int, step: int, tensors: dict[str, str]) -> None:
        if held is not self.held and held is not self.repeats:
            return
        self.process.disk.update(tensors.values())
        job = held.work.job
        self.post(ev.StateStored(job, version, step, tensors, kept=True))

    def store_copy(self, order: do.StoreCopy) -> None:
        """Put what is on this disk of a copy into the store."""
        self.process.after(STORE_S, lambda: self._copy_stored(order))

    def _copy_stored(self, order: do.StoreCopy) -> None:
        gone = self.process.disk.isdisjoint(order.blobs)
        for blob in () if gone else order.blobs:
            self.store(blob)
        self.tell(ev.CopyStored(order.job, order.name, "they are not here any more" if gone else ""))

    def _store(self, held: Held, version: int, step: int, tensors: dict[str, str]) -> None:
        if held is not self.held and held is not self.repeats:
            return
        for value in tensors.values():
            self.store(value)
        job = held.work.job
        self.post(ev.StateStored(job, version, step, tensors))

    def _evaluate(self, job: str, version: int, step: int) -> None:
        held = self.held
        loss = number(digest("evaluation", step)) if held is not None and held.ends else None
        self.post(ev.EvalReady(job, version, step, loss))

    # ------------------------------------------------------------ federated rounds

    def _join(self, job: str, version: int) -> None:
        self.joined, self.member = job, self.vectors.member(self.process.name, job)
        mine = roster(self.population) if self.population else {}
        loaded = ev.Loaded(job, version, LOAD_S, gateways=("site",))
        self.post(replace(loaded, population=self.population, clients=mine))

    def _train(self, job: str, at_round: int, order: Any) -> None:
        if order.gathers:
            return self._gather(job, at_round, order)
        if order.clients:
            summed = populations.answer(self.process.name, job, order)
            self.store(summed.update)
            return self.post(summed)
        blob = digest(
            self.process.name, self.process.life, job, at_round, order.model.full.hash, order.exchange
        )
        if order.exchange and self.member is not None:
            try:
                self.member.begin(order)
                value = int(blob[:6], 16)
                self.vectors.held[blob] = self.member.masked(order.exchange, value), value
            except BadFrame as error:
                return self.post(ev.ClientFailed(job, at_round, str(error)))
        if order.gateway:
            self.process.disk.add(blob)
        else:
            self.store(blob)
        answer = ev.UpdateReady(job, at_round, blob, 1000, 10, 2, metrics={"loss": 1.0}, train_s=ROUND_S)
        return self.post(replace(answer, gateway=order.gateway, exchange=order.exchange))

    def _gather(self, job: str, at_round: int, order: Any) -> None:
        """Sum what those keep for this worker who can be reached."""
        here = [kept for kept in order.gathers if self._has_near(kept.client, kept.update.hash)]
        rows = {kept.client: ev.Row(kept.n_samples, kept.steps, 0.0, 0.0, 0.0) for kept in here}
        blob = digest("sum", job, at_round, sorted(kept.update.hash for kept in here))
        self.store(blob)
        host = ev.HostRows(rows, {}, {}, {}, order=order.order)
        self.post(ev.UpdateReady(job, at_round, blob if rows else "", 1000, 10, 2, host=host))

    def _has_near(self, client: str, blob: str) -> bool:
        own = client == self.process.name
        return blob in self.process.disk if own else self.reaches(client) and self.holds(client, blob)

    def _test(self, job: str, at_round: int) -> None:
        self.post(ev.ClientEvaluated(job, at_round, 10, 1.0))
