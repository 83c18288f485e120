"""The shell around the scheduler: one queue of events, instructions carried out in order.

Events that wait together are handled together and share one journal transaction; nothing is sent
to a worker before the facts it rests on are on the disk. Planning runs in threads (``planner_pool``).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import structlog

from atoll.errors import StorageError
from atoll.messages.to_worker import RelayOffer
from atoll.worker_names import is_id, with_names
from coordinator.aggregation.supervisor import Aggregators
from coordinator.config import CoordinatorConfig
from coordinator.federated.driver import FederatedDriver
from coordinator.messages import batch as batches
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import Fact, JobEnded, Ledger, to_record
from coordinator.messages.jobs import ENDED
from coordinator.pipeline.driver import PipelineDriver
from coordinator.planner_pool import PlannerPool
from coordinator.scheduler import Scheduler
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.delta_chains import DeltaChains
from coordinator.storage.graph_store import GraphStore
from coordinator.storage.health import Health
from coordinator.storage.journal import Fenced, Journal
from coordinator.storage.promises import Promises
from coordinator.storage.run_log import Logs, Point, RunLogs
from protos.telemetry import Event as Name

BATCH = 256
RETRY_STORAGE_S = 1.0
COMMITS_KEPT = 64
CLOSE_WITHIN_S = 5.0  # to say what is queued to a worker whose session ends; it may have stopped reading
log = structlog.get_logger()


@dataclass(slots=True)
class Outbox:
    """One session's bounded outgoing queue; None ends the session. ``task`` serves its stream, and is
    cancelled with ``overdue`` set where what was queued cannot be sent."""

    worker: str
    session: int
    queue: asyncio.Queue[do.Message | None]
    task: asyncio.Task[Any] | None = None
    reason: str = ""
    replaced: bool = False
    overdue: bool = False

    def close(self, reason: str) -> None:
        """End the session once what is queued was sent, or could not be within CLOSE_WITHIN_S."""
        self.reason = self.reason or reason
        self.queue.put_nowait(None)
        if self.task is not None:
            asyncio.get_running_loop().call_later(CLOSE_WITHIN_S, self._give_up)

    def _give_up(self) -> None:
        if self.task is not None:
            self.overdue = True
            self.task.cancel()

    def cut_off(self, reason: str) -> None:
        """End the session; what is queued is not sent."""
        while not self.queue.empty():
            self.queue.get_nowait()
        self.close(reason)


class Relays(Protocol):
    """Makes tickets for the relays that are there."""

    def way(self, worker: str, peer: str, use: do.RelayUse) -> RelayOffer | None:
        """Return ``worker``'s way to ``peer`` by relays."""


@dataclass(slots=True)
class _Posted:
    event: ev.Event
    at: float
    done: asyncio.Future[None] | None


def scheduler_for(config: CoordinatorConfig, ledger: Ledger, now_s: float) -> Scheduler:
    """Return a scheduler of every kind of job that there is."""
    return Scheduler(config, ledger, now_s, (PipelineDriver, FederatedDriver))


@dataclass(slots=True)
class Shell:
    """Runs one scheduler; every method belongs to the event loop's thread."""

    config: CoordinatorConfig
    scheduler: Scheduler
    journal: Journal
    blobs: BlobStore
    graphs: GraphStore
    clock: Callable[[], float]
    logs: Logs
    runs: RunLogs
    outboxes: dict[str, Outbox] = field(default_factory=dict)
    changed: dict[str, asyncio.Event] = field(default_factory=dict)  # job -> woken at each change
    logged: asyncio.Event = field(default_factory=asyncio.Event)
    commit_s: dict[str, deque[float]] = field(default_factory=dict)
    reported: Counter[str] = field(default_factory=Counter)  # blobs of messages that are not handled yet
    promises: Promises = field(default_factory=Promises)
    chains: DeltaChains = field(default_factory=DeltaChains)
    observe: Callable[[do.Instruction], None] = lambda instruction: None
    moved: Callable[[do.MemberMoved], None] = lambda moved: None
    relays: Relays | None = None
    aggregators: Aggregators = field(init=False)
    planner: PlannerPool = field(init=False)
    health: Health = field(init=False)
    _events: asyncio.Queue[_Posted] = field(default_factory=asyncio.Queue)
    _unwritten: list[Fact] = field(default_factory=list)
    _deferred: list[do.Instruction] = field(default_factory=list)  # until those are written
    _retry_s: float = 0.0
    _sweeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.aggregators = Aggregators(self.blobs, self.post)
        self.planner = PlannerPool(self.graphs, self.post)
        self.health = Health(self.config.state_dir, time.monotonic)

    # ------------------------------------------------------------ events

    def post(self, event: ev.Event) -> None:
        """Queue an event."""
        self._events.put_nowait(_Posted(event, time.perf_counter(), None))

    def uploading(self, worker: str) -> None:
        """Bytes came from a worker beside its session; cheap, so that every chunk may say it."""
        known = self.scheduler.roster.workers.get(worker)
        if known is not None and self.clock() - known.member.seen_s > self.config.liveness.heartbeat_s / 2:
            self.post(ev.Uploading(worker))

    def attach(self, outbox: Outbox) -> None:
        """Send what its worker is to hear through ``outbox`` from now on; the one before it ends."""
        before = self.outboxes.get(outbox.worker)
        self.outboxes[outbox.worker] = outbox
        if before is not None:
            before.replaced = True
            before.cut_off("a newer session replaced this one")

    async def ask(self, event: ev.Event) -> None:
        """Queue an event and wait until it was handled and its facts are on the disk.

        Raises StorageError when they could not be written.
        """
        done = asyncio.get_running_loop().create_future()
        self._events.put_nowait(_Posted(event, time.perf_counter(), done))
        await done

    async def run(self) -> None:
        """Handle events until cancelled; raises Fenced when another coordinator commands."""
        while True:
            batch = [await self._events.get()]
            while len(batch) < BATCH and not self._events.empty():
                batch.append(self._events.get_nowait())
            self._handle(batch)

    async def tick(self) -> None:
        """Post ticks until cancelled."""
        every_s = self.config.liveness.heartbeat_s / 2
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(every_s)
            now_s = time.monotonic()
            self.health.lag.note(max(0.0, now_s - began_s - every_s), now_s)
            if self.journal.fenced:  # somebody's call found out
                raise Fenced(self.journal.fenced)
            self.post(ev.Tick())
            self.runs.flush()
            self._retry_storage()

    def stop(self) -> None:
        """End what runs beside the queue."""
        for task in self._tasks:
            task.cancel()
        self.planner.stop()
        self.runs.close()

    def _handle(self, batch: list[_Posted]) -> None:
        now_s = self.clock()
        todo: list[tuple[_Posted, list[do.Instruction]]] = []
        for posted in batch:
            try:
                todo.append((posted, self.scheduler.handle(posted.event, now_s)))
            except Exception as error:
                # Our own mistake: say so, and keep serving everybody else. What is in memory by now, the
                # journal must have too.
                log.exception("scheduler.broke", event_kind=type(posted.event).__name__)
                _resolve(posted, error)
                todo.append((posted, self.scheduler.effects.out))
        caused = [instructions for _, instructions in todo]
        facts = batches.facts(caused)
        try:
            failure = self._write(facts, now_s)
        except Fenced as fenced:
            for posted in batch:
                _resolve(posted, fenced)
            raise
        for posted, instructions in todo:
            for instruction in batches.consequences(instructions, durable=failure is None):
                self._attempt(instruction, now_s)
            if failure is not None:
                self._deferred += batches.deferred(instructions)
            _resolve(posted, failure if any(isinstance(i, do.Journal) for i in instructions) else None)
            self._note_commit(posted, instructions)
        later = batches.words(caused)
        ended = [fact.job for fact in facts if isinstance(fact, JobEnded)]
        if later or ended:
            # What people read waits until the sessions have begun to say what workers wait for.
            asyncio.get_running_loop().call_soon(self._tell, later, ended, now_s)

    def _tell(self, instructions: list[do.Instruction], ended: list[str], now_s: float) -> None:
        for instruction in instructions:
            self._attempt(instruction, now_s)
        for job in ended:
            try:
                self.runs.of(job).close()  # whoever hears that it ended finds all figures in its files
            except Exception:
                log.exception("shell.broke", instruction="close the files of a job that ended")

    def _note_commit(self, posted: _Posted, instructions: list[do.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, do.SendTo) and isinstance(instruction.message, do.StepCommit):
                job = instruction.message.job
                took_s = time.perf_counter() - posted.at
                self.commit_s.setdefault(job, deque(maxlen=COMMITS_KEPT)).append(took_s)
                return

    def commit_median_s(self, job: str) -> float | None:
        """The coordinator's share of a step: last StepReady read to last StepCommit queued."""
        taken = self.commit_s.get(job)
        return median(taken) if taken else None

    # ------------------------------------------------------------ storage

    @property
    def settled(self) -> bool:
        """Whether the ledger is the fold of what is on the disk; asked between two batches."""
        return not self._unwritten

    def _write(self, facts: list[Fact], now_s: float) -> StorageError | None:
        if not facts:
            return None
        if self._unwritten:
            self._unwritten += facts
            return StorageError(self.scheduler.effects.storage or "the journal cannot be written")
        began_s = time.monotonic()
        try:
            self.journal.append([to_record(fact, now_s) for fact in facts])
            self.health.append.note(time.monotonic() - began_s, began_s)
        except Fenced:
            raise
        except StorageError as error:
            self._unwritten += facts
            self._retry_s = now_s + RETRY_STORAGE_S
            self.post(ev.StorageFailed(str(error)))
            return error
        return None

    def _retry_storage(self) -> None:
        now_s = self.clock()
        if not self._unwritten or now_s < self._retry_s:
            return
        try:
            self.journal.append([to_record(fact, now_s) for fact in self._unwritten])
        except Fenced:
            raise
        except StorageError:
            self._retry_s = now_s + RETRY_STORAGE_S
            return
        self._unwritten.clear()
        deferred, self._deferred = self._deferred, []
        for instruction in deferred:
            self._attempt(instruction, now_s)
        self.post(ev.StorageRecovered())
        self._spawn(self.sweep_superseded())

    # ------------------------------------------------------------ instructions

    def _attempt(self, instruction: do.Instruction, now_s: float) -> None:
        try:
            self._perform(instruction, now_s)
        except Exception:
            log.exception("shell.broke", instruction=type(instruction).__name__)

    def _perform(self, instruction: do.Instruction, now_s: float) -> None:
        self.observe(instruction)
        match instruction:
            case do.SendTo(worker, message):
                self.tell(worker, message)
            case do.Measured(job, step, name, value):
                self.runs.of(job).measured(Point(step, name, value, now_s))
                self.wake(job)
            case do.Notify(job):
                self.wake(job)
            case do.Log():
                self._log(instruction, now_s)
            case do.CloseSession(worker, session, reason):
                outbox = self.outboxes.get(worker)
                if outbox is not None and outbox.session == session:
                    outbox.close(reason)
            case do.MemberMoved():
                self.moved(instruction)
            case do.MakePlan():
                self._spawn(self.planner.make_plan(instruction))
            case do.ChooseLinks() | do.JudgeFleet():
                self._spawn(self.planner.judge(instruction))
            case do.ReadJob(job):
                self._spawn(self.planner.read_job(instruction, self.scheduler.ledger.jobs[job]))
            case do.SweepBlobs():
                self._spawn(self.sweep_superseded())
            case do.OpenAggregator() | do.AggregateRound() | do.EvaluateModel():
                self.aggregators.ask(instruction)
            case do.CloseAggregator(job):
                self.aggregators.close(job)
            case do.DropBlobs(blobs):
                self._spawn(self._drop_blobs(blobs))

    def tell_all(self, message: do.Message) -> None:
        """Send a message to every worker that is connected."""
        for worker in list(self.outboxes):
            self.tell(worker, message)

    def tell(self, worker: str, message: do.Message) -> None:
        """Queue a message to a worker; who is not connected misses it."""
        outbox = self.outboxes.get(worker)
        if outbox is None:
            return
        if outbox.queue.qsize() >= self.config.outgoing_messages:
            outbox.cut_off(f"{self.config.outgoing_messages} messages wait for this worker; it does not read")
            return
        outbox.queue.put_nowait(message)
        if isinstance(message, do.Dismiss):
            outbox.queue.put_nowait(None)

    def wake(self, job: str) -> None:
        """Tell everybody who watches ``job``."""
        event = self.changed.pop(job, None)
        if event is not None:
            event.set()

    def change_of(self, job: str) -> asyncio.Event:
        """Set at the job's next change."""
        return self.changed.setdefault(job, asyncio.Event())

    def _log(self, line: do.Log, now_s: float) -> None:
        self.say(line.event, line.level, line.job, "coordinator", dict(line.fields), now_s)

    def say(
        self, event: str, level: str, job: str, source: str, fields: Mapping[str, Any], now_s: float
    ) -> None:
        """One log line, to the process's log and to `atoll logs`."""
        fields = self._with_names(fields, source)
        shown = {"by": source, **({"job": job} if job else {}), **fields}
        shown["what"] = shown.pop("event", None)
        write = getattr(log, level if level in ("debug", "info", "warning", "error") else "info")
        write(event, **{key: value for key, value in shown.items() if value is not None})
        if level != "debug":
            self.logs.add(now_s, level, event, source, job, fields)
            self.logged.set()
            self.logged = asyncio.Event()

    def note(self, event: Name, level: str = "info", **fields: Any) -> None:
        """Write a line of the coordinator's own to both logs, of no job."""
        self.say(event.value, level, "", "coordinator", fields, self.clock())

    def _with_names(self, fields: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Fields of a log line in whose words workers are named; beside a worker's id stands its name."""
        roster = self.scheduler.roster.workers
        if not any(isinstance(value, str) and "w-" in value for value in (source, *fields.values())):
            return dict(fields)
        names = {worker: known.introduction.name for worker, known in roster.items()}
        found = {
            key: with_names(value, names) if isinstance(value, str) and not is_id(value) else value
            for key, value in fields.items()
        }
        name = names.get(str(fields.get("worker", source)))
        return {"name": name, **found} if name else found

    # ------------------------------------------------------------ beside the queue

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def sweep_superseded(self) -> None:
        """Checkpoints that were replaced may go; what was uploaded and awaits its job may not, nor may what
        another checkpoint that is being stored has in common with them, nor one that is being loaded yet."""
        async with self._sweeping:
            self.promises.lapse(self.clock() - self.config.unneeded_blob_s)
            if not self.settled:
                return  # what a kill would bring back may need them
            keep = self.scheduler.blobs_in_flight() | self.reported.keys()
            going = self.scheduler.ledger.take_superseded(keep)
            if not going:
                return
            freed = await asyncio.to_thread(self.blobs.delete, going, self.promises.stands)
        self.note(Name.BLOBS_DELETED, "debug", blobs=len(going), freed_bytes=freed)

    async def drop_files(self, job: str) -> None:
        """Delete the files of a job that has ended, and its figures."""
        self.commit_s.pop(job, None)
        await asyncio.to_thread(shutil.rmtree, self.runs.forget(job), ignore_errors=True)

    async def _drop_blobs(self, blobs: tuple[str, ...]) -> None:
        """Updates that are counted or refused may go, unless a job names the same bytes."""
        unneeded = set(blobs) - self.scheduler.ledger.referenced_blobs() - self.aggregators.made()
        if unneeded:
            await asyncio.to_thread(self.blobs.delete, unneeded)

    def restored(self, records: int) -> None:
        """Log what a replay brought back."""
        jobs = [s.phase for s in self.scheduler.jobs.values() if s.phase not in ENDED]
        log.info(Name.JOURNAL_REPLAYED.value, records=records, unfinished_jobs=len(jobs))


def _resolve(posted: _Posted, failure: Exception | None) -> None:
    if posted.done is not None and not posted.done.done():
        if failure is None:
            posted.done.set_result(None)
        else:
            posted.done.set_exception(failure)
