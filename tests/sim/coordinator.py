"""The coordinator's process: the real scheduler and ledger in a shell whose disk and threads are simulated.

Its folder outlives it: journalled records, in the form in which they are written, and blobs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.exchange import Exchange, PairTable
from atoll.microbatch import ScheduleName, block_ranges
from atoll.opdag import TensorMeta
from atoll.plan import LinkSpec, Piece, Plan, Replica, stage_of
from coordinator.config import CoordinatorConfig
from coordinator.messages import batch as batches
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.encoding import from_json, to_json
from coordinator.messages.facts import CoordinatorStarted, Fact, Ledger, Record, from_record, to_record
from coordinator.shell import scheduler_for
from coordinator.storage.journal import Fenced
from coordinator.storage.promises import Promises
from tests.sim.clock import Process, digest
from tests.sim.network import End, Network, Stream

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from coordinator.scheduler import Scheduler

NAME = "coordinator"
BATCH = 64
PLAN_S = 0.2
WRITE_S = 0.002
AGGREGATE_S = 0.3
RETRY_STORAGE_S = 5.0
COMMAND_CHECK_S = 2.0
SNAPSHOT_EVERY = 7  # records
OPS = {"op": 1000}
NEEDS = ev.Needs(step_flops=400_000)  # as simulated workers time ops, about 0.4 s on one
UPDATE_META = TensorMeta((10,), "float32")


@dataclass
class Folder:
    """What lies on the coordinator's disk."""

    records: list[Record] = field(default_factory=list)
    blobs: set[str] = field(default_factory=set)
    write_s: float = WRITE_S
    full: bool = False
    term: int = 0
    snapshot: tuple[int, str] = (0, "")  # of how many records, and their fold as it is written

    def claim(self, at_s: float) -> int:
        """Have another coordinator command; returns its term."""
        self.term += 1
        self.write(CoordinatorStarted(self.term), at_s)
        return self.term

    def check(self, term: int) -> None:
        """Raise Fenced when a coordinator of a later term commands."""
        if term != self.term:
            raise Fenced(f"term {self.term} was claimed after {term}")

    def fold(self) -> Ledger:
        """Return the ledger that a coordinator started now would have, of the snapshot and what follows."""
        covered, text = self.snapshot
        ledger = from_json(Ledger, json.loads(text)) if covered else Ledger()
        replayed = Ledger()
        for number, record in enumerate(self.records):
            fact = from_record(record)
            assert fact is not None, f"{record.kind} cannot be read back"
            replayed.apply(fact)
            if number >= covered:
                ledger.apply(fact)
        # Blobs of replaced checkpoints are handed out once, before a snapshot or after it.
        assert replace(ledger, superseded=set()) == replace(replayed, superseded=set()), "a snapshot differs"
        return ledger

    def keep(self, ledger: Ledger) -> None:
        """Write the fold of all records as a snapshot, now and then."""
        if len(self.records) >= self.snapshot[0] + SNAPSHOT_EVERY:
            self.snapshot = len(self.records), json.dumps(to_json(ledger))

    def write(self, fact: Fact, at_s: float) -> Fact:
        """Add a fact to the journal; returns it as it will be read back."""
        record = to_record(fact, at_s)
        self.records.append(replace(record, payload=json.loads(json.dumps(record.payload))))
        back = from_record(self.records[-1])
        assert back == fact, f"{fact} is read back as {back}"
        return back


@dataclass
class Outbox:
    """A worker's session as the coordinator holds it."""

    worker: str
    session: int
    stream: Stream


@dataclass
class Coordinator(Process):
    """``recorded`` hears of each fact once it is durable, ``performed`` of what is carried out or logged."""

    network: Network = field(kw_only=True)
    folder: Folder = field(default_factory=Folder, kw_only=True)
    config: CoordinatorConfig = field(
        default_factory=lambda: CoordinatorConfig(state_dir=Path("/nowhere")), kw_only=True
    )
    recorded: Callable[[Fact], None] = field(default=lambda fact: None, kw_only=True)
    performed: Callable[[do.Instruction], None] = field(default=lambda done: None, kw_only=True)
    fewest: int = field(default=1, kw_only=True)  # stages of a plan
    stages: int = field(default=3, kw_only=True)  # at most
    peer_stages: int = field(default=1, kw_only=True)  # the same of every other peer; the rest has one fewer
    rings: bool = field(default=False, kw_only=True)  # the first stage of a pipeline has the last piece, too
    slowness: float = field(default=1.0, kw_only=True)  # of its threads
    step_s: Callable[[list[str]], float] = field(default=lambda workers: 1.0, kw_only=True)  # as predicted
    grown_s: Callable[[int, int], float] = field(default=lambda own, grown: 1.0, kw_only=True)  # a step's
    term: int = field(default=0, init=False)
    scheduler: Scheduler = field(init=False)
    promises: Promises = field(default_factory=Promises, init=False)
    outboxes: dict[str, Outbox] = field(default_factory=dict, init=False)
    shadow: Ledger = field(default_factory=Ledger, init=False)  # fold of what is durable
    _events: list[ev.Event] = field(default_factory=list, init=False)
    _busy: bool = field(default=False, init=False)
    unwritten: list[Fact] = field(default_factory=list, init=False)
    _deferred: list[do.Instruction] = field(default_factory=list, init=False)  # until those are written
    _sessions: int = field(default=0, init=False)

    def start(self) -> None:
        """Begin, perhaps anew, from what the folder holds."""
        super().start()
        self.term = self.folder.claim(self.clock.now_s)
        self.shadow = self.folder.fold()
        self.scheduler = scheduler_for(self.config, self.folder.fold(), self.clock.now_s)
        self.scheduler.ledger.take_superseded()
        self.promises = Promises()
        self.outboxes, self._events, self._busy, self.unwritten, self._deferred = {}, [], False, [], []
        self.after(self.config.liveness.heartbeat_s / 2, self._tick)
        self.after(COMMAND_CHECK_S, self._check)

    @property
    def settled(self) -> bool:
        """Whether everything that was decided is on the disk."""
        return self.alive and not self._busy and not self.unwritten

    def commands(self) -> bool:
        """Whether it may act upon its journal; a coordinator of an earlier term ends at once."""
        try:
            self.folder.check(self.term)
        except Fenced as fenced:
            self.clock.tell(f"{self.name} ends: {fenced}")
            self.kill()
            self.network.died(self)
            return False
        return True

    def _check(self) -> None:
        if self.commands():
            self.after(COMMAND_CHECK_S, self._check)

    # ------------------------------------------------------------ events

    def post(self, event: ev.Event) -> None:
        """Queue an event."""
        self._events.append(event)
        if not self._busy:
            self._busy = True
            self.after(0.0, self._handle)

    def _tick(self) -> None:
        self.post(ev.Tick())
        self.after(self.config.liveness.heartbeat_s / 2, self._tick)

    def _handle(self) -> None:
        batch, self._events = self._events[:BATCH], self._events[BATCH:]
        caused = [self.scheduler.handle(event, self.clock.now_s) for event in batch]
        for event in batch:
            if isinstance(event, ev.Arrived) and isinstance(event.message, ev.StateStored):
                self.promises.reported(event.worker, event.message.tensors.values())
        facts = batches.facts(caused)
        if not facts:
            self._perform(caused, durable=True)
            return
        if self.folder.full or self.unwritten:
            if not self.unwritten:
                self.post(ev.StorageFailed("the disk is full"))
                self.after(RETRY_STORAGE_S, self._retry)
            self.unwritten += facts
            self._perform(caused, durable=False)
            self._deferred += [i for instructions in caused for i in batches.deferred(instructions)]
            return
        # The write ends somewhere in this time; a process killed before its end may leave either.
        write_s = self.folder.write_s * (0.5 + self.clock.random.random())
        written_s = write_s * self.clock.random.random()
        self.after(written_s, lambda: self._write(facts))
        self.after(write_s, lambda: self._perform(caused, durable=True))

    def _write(self, facts: Iterable[Fact]) -> None:
        if not self.commands():
            return
        for fact in facts:
            self.shadow.apply(self.folder.write(fact, self.clock.now_s))
            self.clock.tell(f"journal {type(fact).__name__} {_shown(fact)}")
            self.recorded(fact)
        self.folder.keep(self.shadow)

    def _retry(self) -> None:
        if self.folder.full:
            self.after(RETRY_STORAGE_S, self._retry)
            return
        facts, self.unwritten = self.unwritten, []
        deferred, self._deferred = self._deferred, []
        self._write(facts)
        if self.alive:
            self._carry_out(deferred)
            self.post(ev.StorageRecovered())

    def _perform(self, caused: list[list[do.Instruction]], *, durable: bool) -> None:
        for instructions in caused:
            self._carry_out(batches.consequences(instructions, durable=durable))
        for instruction in batches.words(caused):
            self.performed(instruction)
            if isinstance(instruction, do.SweepBlobs):
                self.sweep()
            elif isinstance(instruction, do.Log) and instruction.level != "debug":
                shown = " ".join(f"{k}={v}" for k, v in instruction.fields.items() if v != "")
                self.clock.tell(f"{instruction.event} {instruction.job} {shown}")
        self._busy = bool(self._events)
        if self._busy:
            self.after(0.0, self._handle)

    def _carry_out(self, instructions: Iterable[do.Instruction]) -> None:
        for instruction in instructions:
            self.performed(instruction)
            self.carry_out(instruction)

    def sweep(self) -> None:
        """Delete blobs of replaced checkpoints that nobody counts on."""
        superseded = self.scheduler.ledger.take_superseded(self.scheduler.blobs_in_flight())
        self.promises.lapse(self.clock.now_s - self.config.unneeded_blob_s)
        self.folder.blobs -= {blob for blob in superseded if not self.promises.stands(blob)}

    # ------------------------------------------------------------ instructions

    def carry_out(self, instruction: do.Instruction) -> None:
        """Do what the scheduler wants done; what takes time answers with an event."""
        match instruction:
            case do.SendTo(worker, message):
                outbox = self.outboxes.get(worker)
                if outbox is not None:
                    outbox.stream.send(0, message)
            case do.CloseSession(worker, session, reason):
                outbox = self.outboxes.get(worker)
                if outbox is not None and outbox.session == session:
                    self._drop(outbox, reason)
            case do.ReadJob(job):
                self._later(PLAN_S, ev.JobRead(job, OPS, NEEDS))
            case do.MakePlan():
                self._later(PLAN_S, self.plan(instruction))
            case do.ChooseLinks(job, attempt):
                self._later(PLAN_S, ev.LinksFailed(job, attempt, "the simulated planner chooses none"))
            case do.JudgeFleet():
                self._later(PLAN_S, self.judge_fleet(instruction))
            case do.OpenAggregator(job, _, at_round, state):
                model = ev.Blob(digest("model", job, at_round, state), 1000)
                self.folder.blobs.add(model.hash)
                inputs = {"x": TensorMeta((4, 2), "float32")}
                self._later(AGGREGATE_S, ev.AggregatorOpened(job, at_round, model, inputs, (UPDATE_META,)))
            case do.AggregateRound():
                self._aggregate(instruction)
            case do.EvaluateModel(job, at_round):
                self._later(AGGREGATE_S, ev.CentrallyEvaluated(job, at_round, 1.0, {}, 10))
            case do.DropBlobs(blobs):
                self.folder.blobs -= set(blobs) - self.scheduler.ledger.referenced_blobs()

    def _later(self, seconds: float, event: ev.Event) -> None:
        self.after(seconds * self.slowness, lambda: self.post(event))

    def plan(self, asked: do.MakePlan) -> ev.Event:
        """Cut the job evenly over the first workers of the fleet: the real planner is tried elsewhere."""
        training = asked.spec.training
        workers, count = [device.worker for device in asked.fleet.devices], training.replica_count or 1
        count = count if len(workers) >= count else 1
        ends = [block.stop for block in block_ranges(training.n_micro, training.blocks)]
        borders = [0, *(ends[len(ends) * (at + 1) // count - 1] for at in range(count))]
        replicas: list[Replica] = []
        local = training.local_exchange
        exchange = (local or Exchange()).among(count, training.quorum, training.grace_s)
        for micros in pairwise(borders):
            # Replicas of other cuts than the one before: as many stages as are left to it.
            own = workers[: self.stages if count == 1 else max(1, len(workers) // (count - len(replicas)))]
            if local is not None:
                own = own[: max(1, self.peer_stages - len(replicas) % 2)]
            workers = workers[len(own) :]
            if len(own) < self.fewest:
                return ev.PlanFailed(asked.job, asked.attempt, f"stage {len(own)} lacks a worker")
            replicas.append(self._pipeline(asked.spec, own, micros))
        plan = Plan(
            asked.job, asked.version, asked.spec.dag_hash, asked.spec.eval_dag_hash, "even",
            ScheduleName.GPIPE, training.n_micro, tuple(replicas), blocks=training.blocks,
            exchange=_with_table(exchange, count) if count > 1 else None,
        )  # fmt: skip
        return ev.PlanMade(asked.job, asked.attempt, plan)

    def judge_fleet(self, asked: do.JudgeFleet) -> ev.Event:
        """Predict swaps as ``step_s`` says; compare the plans of a job's own workers and of a fleet that has
        grown, as ``grown_s`` says."""
        workers = [place.worker for place in asked.plan.places]
        swapped = {
            (rank, name): self.step_s([*workers[:rank], name, *workers[rank + 1 :]])
            for rank, name in asked.swaps
            if name not in workers
        }
        found = ev.FleetJudged(asked.job, asked.attempt, self.step_s(workers), swapped)
        if not asked.own:
            return found
        own, grown = (
            self.plan(do.MakePlan(asked.job, 0, asked.plan.version + 1, asked.spec, fleet))
            for fleet in (asked.fleet.subset(asked.own), asked.fleet)
        )
        if not isinstance(own, ev.PlanMade) or not isinstance(grown, ev.PlanMade):
            return found
        all_of_them = tuple(place.worker for place in grown.plan.places)
        seconds = self.grown_s(len(own.plan.places), len(all_of_them))
        words = f"{len(all_of_them)} workers"
        return replace(found, own_s=1.0, grown_s=seconds, workers=all_of_them, shape=words)

    def _pipeline(self, spec: JobSpec, workers: Sequence[str], micros: tuple[int, int]) -> Replica:
        ops, n = len(spec.tensors), len(workers)
        ring = self.rings and 1 < n < ops
        edges = [at * ops // (n + ring) for at in range(n + ring + 1)]
        evaluated = spec.eval_data is not None
        pieces = [Piece(a, b, a if evaluated else 0, b if evaluated else 0, 1) for a, b in pairwise(edges)]
        own = [[piece] for piece in pieces[:n]]
        own[0] += pieces[n:]
        stages = tuple(stage_of(worker, mine) for worker, mine in zip(workers, own, strict=True))
        links = (LinkSpec(a, b) for at in range(n + ring - 1) for a, b in ((at, at + 1), (at + 1, at)))
        return Replica(micros, stages, tuple(links))

    def _aggregate(self, asked: do.AggregateRound) -> None:
        good = {name: update.update for name, update in asked.updates.items()}
        good |= {name: held.blob for name, held in asked.sums.items()}
        # A coordinator that takes a folder over deletes what nothing names yet: an update that had just come.
        absent = {name: "cannot be read" for name, blob in good.items() if blob not in self.folder.blobs}
        good = {name: blob for name, blob in good.items() if name not in absent}
        counted = len(good) + sum(len(asked.sums[name].samples) - 1 for name in good if name in asked.sums)
        if counted < asked.least:
            few = ev.Aggregated(asked.job, asked.round, asked.attempt, None, None, dropped=absent)
            return self._later(AGGREGATE_S, few)
        state = ev.Blob(digest("state", asked.job, asked.round, sorted(good.items())), 1000)
        model = ev.Blob(digest("model", asked.job, asked.round + 1, state.hash), 1000)
        self.folder.blobs |= {state.hash, model.hash}
        summed = ev.Aggregated(asked.job, asked.round, asked.attempt, state, model, dropped=absent)
        return self._later(AGGREGATE_S, summed)

    # ------------------------------------------------------------ sessions

    def accept(self, end: End, worker: str, introduction: ev.Introduction, welcome: Any) -> None:
        """Open a worker's session on a stream whose other end is ``end``."""
        self._sessions += 1
        session = self._sessions

        def heard(message: ev.PeerMessage) -> None:
            self.post(ev.Arrived(worker, session, message))

        def closed(reason: str) -> None:
            outbox = self.outboxes.get(worker)
            if outbox is not None and outbox.session == session:
                del self.outboxes[worker]
            self.post(ev.SessionClosed(worker, session))

        stream = self.network.connect(End(self, heard, closed, repeats=False), end)
        before = self.outboxes.get(worker)
        if before is not None:
            self._drop(before, "a newer session replaced this one")
        self.outboxes[worker] = Outbox(worker, session, stream)
        welcome(stream)
        self.post(ev.SessionOpened(worker, session, replace(introduction)))

    def _drop(self, outbox: Outbox, reason: str) -> None:
        outbox.stream.end(reason, 0)
        outbox.stream.end(reason, 1, notice_s=self.network.delay_s)


def _shown(fact: Fact) -> str:
    names = ("job", "version", "step", "round", "outcome", "reason")
    return " ".join(f"{name}={getattr(fact, name)}" for name in names if hasattr(fact, name))


def _with_table(exchange: Exchange, ranks: int) -> Exchange:
    """Have pairs drawn by rates, all alike, where a rule does so."""
    return replace(exchange, pairs=PairTable((1.0,) * ranks**2)) if exchange.rule == "saps" else exchange
