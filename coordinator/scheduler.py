"""Members, jobs and plans behind one ``handle(event, now_s)``: events in, instructions out.

Pure: no clock, socket or file. The shell turns messages into events, carries the instructions
out in order, and makes a ``Journal`` durable before anything that follows it. What must survive a
restart is in the ledger, a fold over journalled facts; the rest is learnt again. What a kind of job
does with its workers is its driver's; here is what holds for every worker and every job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.job import JobSpec
from atoll.messages.from_worker import HASH_BYTES
from coordinator.config import CoordinatorConfig
from coordinator.membership import member as members
from coordinator.membership.effects import Effects
from coordinator.membership.measuring import Measuring
from coordinator.membership.roster import Roster, refusal
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages import peer_tensors
from coordinator.messages.facts import Checkpoint, JobForgotten, JobRecord, JobSubmitted, Ledger
from coordinator.messages.jobs import BESIDE, ENDED, JobState
from coordinator.sharing.claims import Quota, Waiting
from protos.devices import machine_of
from protos.telemetry import Event as Name

STALL_S = 0.25  # a tick later than this is our own stall


class Driver(Protocol):
    """One kind of job: the machines of its jobs, and which worker does what for them.

    It acts through ``Effects`` alone. Jobs that it is asked about are its own.
    """

    def takes(self, spec: JobSpec) -> bool:
        """Whether a job is of this kind."""

    def not_resumable(self, before: JobSpec, spec: JobSpec) -> str | None:
        """Why ``spec`` cannot go on with what ``before`` left, None when it can."""

    def restore(self, record: JobRecord) -> None:
        """Make a job's machine from what the ledger knows."""

    def submitted(self, job: str, ops: Mapping[str, int], needs: ev.Needs) -> None:
        """Record the distinct ops of a new job, signature -> forward FLOPs, and what it asks of a fleet."""

    def inquired(self, event: ev.PlanAsked) -> None:
        """Plan a job for somebody who does not want it run."""

    def forget(self, job: str) -> None:
        """Let go of a job that has ended."""

    def on(self, event: ev.JobEvent) -> None:
        """Handle an event about a job."""

    def heard(self, worker: str, message: ev.JobMessage) -> None:
        """Handle a message of a worker about a job."""

    def admitted(self, worker: str) -> None:
        """Hear of a worker whose process is new, or was given up and is back."""

    def reconnected(self, job: str, worker: str) -> None:
        """Repeat what was under way to a worker of a job."""

    def lost(self, job: str, worker: str, reason: str) -> None:
        """Go on without a worker of a job."""

    def slowed(self, worker: str, factor: float) -> None:
        """Count on a worker that takes ``factor`` > 1 times as long from now on, by its owner's limits."""

    def uses(self, job: str, worker: str) -> bool:
        """Whether the worker does something for the job now."""

    def current(self, job: str, version: int) -> bool:
        """Whether a worker that the job uses is to hold that version of it."""

    def keeps(self, job: str) -> bool:
        """Whether a worker that the job does not use may go on holding it."""

    def blobs_in_flight(self) -> set[str]:
        """Return the blobs that work under way rests on and no fact names yet."""

    def before_event(self) -> None:
        """Do what could wait until the answer to the last event was on its way."""

    def tick(self) -> None:
        """Let time pass."""

    def storage_failed(self, reason: str) -> None:
        """Stop every job: nothing can be made durable."""

    def storage_recovered(self) -> None:
        """Go on with what had to stop."""

    def advance(self) -> None:
        """Begin jobs whose turn it is, and go on with those that wait for something."""


Kind = Callable[[CoordinatorConfig, Effects, Measuring], Driver]


@dataclass(slots=True)
class Scheduler:
    """One coordinator's decisions; ``ledger`` may come from a replayed journal. Kinds of jobs advance in the
    order of ``kinds``."""

    config: CoordinatorConfig
    ledger: Ledger
    now_s: float
    kinds: Sequence[Kind]
    roster: Roster = field(init=False)
    effects: Effects = field(init=False)
    measuring: Measuring = field(init=False)
    drivers: tuple[Driver, ...] = field(init=False)
    _driver_of: dict[str, Driver] = field(default_factory=dict)
    _tick_s: float | None = None

    def __post_init__(self) -> None:
        self.roster = Roster(self.config.liveness, self.config.probing, self.config.relaying)
        self.effects = Effects(self.ledger, self.roster, self._lost, self.now_s)
        self.measuring = Measuring(self.config.probing, self.effects)
        self.drivers = tuple(kind(self.config, self.effects, self.measuring) for kind in self.kinds)
        for record in self.ledger.jobs.values():
            self._restore(record)

    def handle(self, event: ev.Event, now_s: float) -> list[do.Instruction]:
        """Return what is to be done after ``event``, in order."""
        effects = self.effects
        effects.out, effects.now_s = [], now_s
        for driver in self.drivers:
            driver.before_event()
        _HANDLERS.get(type(event), Scheduler._about_a_job)(self, event)
        if effects.advance and not effects.storage:
            effects.advance = False
            for driver in self.drivers:
                driver.advance()
        return effects.out

    # ------------------------------------------------------------ views

    @property
    def jobs(self) -> Mapping[str, JobState]:
        """Every job as users see it."""
        return self.effects.jobs

    def waiting(self, job: str) -> Waiting | None:
        """Return what a job waits for that is to have workers, None where it does not."""
        return self.effects.waits.get(job)

    def allow(self, quotas: Mapping[str, Quota]) -> None:
        """Bound what owners' jobs may have from now on."""
        self.effects.quotas, self.effects.advance = dict(quotas), True

    def driver_of(self, job: str) -> Driver | None:
        """Return what drives a job, None of one that is not known."""
        return self._driver_of.get(job)

    def spec_of(self, job: str, worker: str | None = None) -> JobSpec | None:
        """Return the spec of a job; with ``worker``, only where the job uses it."""
        driver = self.driver_of(job)
        if driver is None or (worker is not None and not driver.uses(job, worker)):
            return None
        return self.jobs[job].spec

    def refusal(self, spec: JobSpec, start: Checkpoint | None = None) -> str | None:
        """Why this job cannot be accepted, None when it can; ``start`` as of ``Submitted``."""
        waiting = sum(state.phase not in ENDED for state in self.jobs.values())
        if waiting >= self.config.max_jobs:
            return f"{waiting} jobs wait or run already; cancel some or raise max_jobs"
        return self._not_resumable(spec, start) if spec.resume_of else None

    def _not_resumable(self, spec: JobSpec, start: Checkpoint | None) -> str | None:
        """Why ``spec`` cannot go on from the job it names; shapes are the graphs' business."""
        old = self.ledger.jobs.get(spec.resume_of)
        if old is None:
            return f"no job {spec.resume_of} to resume; `atoll status` lists them"
        before, driver = old.submitted.spec, self._driver_for(spec)
        if not driver.takes(before):
            return f"{spec.resume_of} is a job of another kind; only what it left to its own kind is of use"
        wrong = driver.not_resumable(before, spec)
        if wrong is not None:
            return wrong
        done = (start or old.last_checkpoint).step
        if done >= spec.training.steps:
            return (
                f"{spec.resume_of} is at step {done} already, {spec.training.steps} steps asked for; "
                "raise --steps"
            )
        if before.tensors.keys() != spec.tensors.keys():
            odd = sorted(before.tensors.keys() ^ spec.tensors.keys())
            return f"{spec.resume_of} holds another model: {len(odd)} tensors differ, first {odd[0]}"
        return None

    def blobs_in_flight(self) -> set[str]:
        """Return the blobs that a journalled fact or work under way rests on."""
        found = self.ledger.referenced_blobs()
        return found.union(*(driver.blobs_in_flight() for driver in self.drivers)) - {""}

    # ------------------------------------------------------------ sessions

    def _opened(self, event: ev.SessionOpened) -> None:
        effects = self.effects
        known = self.roster.workers.get(event.worker)
        place = known.introduction.place if known is not None else event.introduction.place
        before = self.roster.open(event.worker, event.session, event.introduction, effects.now_s)
        worker = self.roster.workers[event.worker]
        self._not_beside(event)
        if before is not None:
            effects.moved(event.worker, before, worker.member)
        wrong = refusal(event.introduction)
        if wrong is not None:
            effects.quarantine(event.worker, wrong)
        if worker.member.phase is members.Phase.JOINED:
            effects.move(event.worker, members.Admitted())
            for driver in self.drivers:
                driver.admitted(event.worker)
            self.measuring.greet(event.worker)
        else:
            driver_of_its_job = self.driver_of(worker.member.job)
            if event.introduction.guest.paused:
                self._limited(event.worker, event.introduction.guest)
            elif driver_of_its_job is not None:
                driver_of_its_job.reconnected(worker.member.job, event.worker)
            if event.introduction.place != place:
                self.measuring.moved(event.worker)
        effects.advance = True

    def _not_beside(self, event: ev.SessionOpened) -> None:
        """Release who still repeats steps beside a plan that it was taken from while it was away: it would
        refuse its place in a newer one."""
        held = event.introduction.held
        driver = self.driver_of(held.job) if held is not None else None
        if held is None or held.version < BESIDE or (driver and driver.current(held.job, held.version)):
            return
        self.effects.send(event.worker, do.Release(held.job, held.version, "the steps were repeated"))

    def _closed(self, event: ev.SessionClosed) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is None or worker.session != event.session:
            return
        self.roster.disconnected(event.worker)
        self.effects.move(event.worker, members.ConnectionLost())

    def _tick(self, event: ev.Tick) -> None:
        effects = self.effects
        interval_s = self.config.liveness.heartbeat_s / 2
        if self._tick_s is not None and effects.now_s - self._tick_s > interval_s + STALL_S:
            gap_s = effects.now_s - self._tick_s - interval_s
            self.roster.forgive(gap_s)
            effects.log(Name.SERVER_STALLED, "warning", stalled_s=round(gap_s, 3))
        self._tick_s = effects.now_s
        for name in self.roster.silent(effects.now_s):
            if not self.roster.workers[name].member.gone:  # by what became of another one just now
                effects.move(name, members.Tick())
        for name in self.roster.readmit(effects.now_s):
            effects.log(Name.WORKER_READMITTED, worker=name)
            effects.advance = True
        self.measuring.expire()
        self.measuring.renew_tickets(self.config.relaying.ticket_s / 2)
        for driver in self.drivers:
            driver.tick()

    # ------------------------------------------------------------ messages of workers

    def _arrived(self, event: ev.Arrived) -> None:
        name, message = event.worker, event.message
        worker = self.roster.workers.get(name)
        if worker is None or worker.session != event.session:
            self.effects.drop(type(message).__name__, "of a session that was replaced")
            return
        self.effects.move(name, members.Heard())
        match message:
            case ev.Heartbeat():
                self._heartbeat(name, message)
            case ev.Leaving(reason):
                self.effects.move(name, members.LeavingSaid(reason))
                self._lost(
                    worker.member.job, name, f"{self.effects.label(name)} left: {reason or 'asked to'}"
                )
            case ev.Malformed(reason):
                self.effects.quarantine(name, reason)
                self.effects.emit(do.CloseSession(name, event.session, reason))
            case ev.CodecSpeeds(speeds):
                wrong = self.roster.codecs_timed(name, speeds)
                if wrong is not None:
                    self.effects.quarantine(name, wrong)
            case ev.OpsProbed():
                self.measuring.ops_probed(name, message)
            case ev.LinkProbed():
                self.measuring.link_probed(name, message)
            case ev.PeerJoined():
                self._joined(name, message)
            case ev.HeldWeights(hashes):
                self._holds(name, hashes)
            case _:
                driver = self.driver_of(message.job)
                if driver is not None:
                    driver.heard(name, message)
                else:
                    why = f"of {name} about {message.job}, which is not known"
                    self.effects.drop(type(message).__name__, why)

    def _joined(self, name: str, message: ev.PeerJoined) -> None:
        if message.peer not in self.roster.workers:
            self.effects.drop("PeerJoined", f"of {name} about {message.peer}, which is not known")
            return
        self.roster.joined.reported(name, message)
        if message.way:
            self.effects.log(
                Name.PEER_JOINED, worker=name, peer=message.peer, way=message.way, relay=message.relay
            )

    def _holds(self, name: str, hashes: bytes) -> None:
        wrong = self.roster.weights.said(name, hashes)
        blobs = len(hashes) // HASH_BYTES
        if wrong:
            self.effects.log(Name.WEIGHTS_HELD, "warning", worker=name, blobs=blobs, left_out=wrong)
        else:
            self.effects.log(Name.WEIGHTS_HELD, worker=name, blobs=blobs)

    def _uploading(self, event: ev.Uploading) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is not None and not worker.member.gone:
            worker.uploads += 1
            self.effects.move(event.worker, members.Heard())

    def _heartbeat(self, name: str, beat: ev.Heartbeat) -> None:
        worker = self.roster.workers[name]
        worker.memory_bytes, worker.beat = beat.memory_bytes, beat
        self.roster.heard(name, beat.worker_time_s, self.effects.now_s)
        if beat.guest != worker.guest:
            self._limited(name, beat.guest)
        held, driver = (beat.job, beat.version), self.driver_of(beat.job)
        stays = beat.job == worker.member.job or (driver is not None and driver.keeps(beat.job))
        # Twice: not just a release on its way. While nothing can be stored one may be deferred.
        if beat.job and not stays and held == worker.heard_job and not self.effects.storage:
            reason = "this job does not use you any more"
            self.effects.send(name, do.Release(beat.job, beat.version, reason))
        dropped, worker.heard_job = worker.heard_job, held
        mine = self.driver_of(worker.member.job)
        if dropped[0] == worker.member.job != beat.job and mine is not None and mine.current(*dropped):
            self._lost(worker.member.job, name, f"{self.effects.label(name)} let go of what it was given")

    def _limited(self, name: str, guest: ev.Guest) -> None:
        """A worker's owner lets it take something else: plans and deadlines count on that from now on."""
        factor, member = self.roster.limit(name, guest), self.roster.workers[name].member
        self.effects.log(
            Name.WORKER_LIMITED,
            worker=name,
            paused=guest.paused,
            compute_share=guest.compute_share,
            upload_mbit=guest.upload_bps / 1e6,
            download_mbit=guest.download_bps / 1e6,
            memory_limit_bytes=guest.memory_limit_bytes,
        )
        self.effects.advance = True
        if guest.paused:
            self._lost(member.job, name, f"{self.effects.label(name)} is paused: {guest.paused}")
        elif factor > 1.0:
            for driver in self.drivers:
                driver.slowed(name, factor)

    # ------------------------------------------------------------ jobs

    def _submitted(self, event: ev.Submitted) -> None:
        spec, effects = event.spec, self.effects
        start = event.start or Checkpoint(0, {})
        if event.start is None and spec.resume_of in self.ledger.jobs:
            before = self.ledger.jobs[spec.resume_of]
            start = peer_tensors.begun_with(before.submitted.spec, spec, before.last_checkpoint)
        effects.record(
            JobSubmitted(event.job, event.submission, spec, start.step, start.tensors, effects.now_s)
        )
        self._restore(self.ledger.jobs[event.job]).submitted(event.job, event.ops, event.needs)
        effects.log(Name.JOB_SUBMITTED, job=event.job, name=spec.name, steps=spec.training.steps)
        effects.emit(do.Notify(event.job))
        effects.advance = True

    def _forget(self, event: ev.ForgetAsked) -> None:
        job, effects = event.job, self.effects
        if job not in self.jobs or self.jobs[job].phase not in ENDED:
            effects.drop("ForgetAsked", f"{job} has not ended", job)
            return
        effects.record(JobForgotten(job))
        self._driver_of.pop(job).forget(job)
        self.roster.planned.pop(job, None)
        del effects.jobs[job]
        effects.log(Name.JOB_FORGOTTEN, job=job)
        effects.emit(do.Notify(job))
        effects.emit(do.SweepBlobs())

    def _restore(self, record: JobRecord) -> Driver:
        driver = self._driver_for(record.submitted.spec)
        self._driver_of[record.submitted.job] = driver
        driver.restore(record)
        return driver

    def _driver_for(self, spec: JobSpec) -> Driver:
        return next(driver for driver in self.drivers if driver.takes(spec))

    def _about_a_job(self, event: ev.JobEvent) -> None:
        driver = self.driver_of(event.job)
        if driver is not None:
            driver.on(event)

    def _plan_asked(self, event: ev.PlanAsked) -> None:
        self._driver_for(event.spec).inquired(event)

    # ------------------------------------------------------------ members

    def _lost(self, job: str, worker: str, reason: str) -> None:
        """A worker is gone, or must not be used any more: its job goes on without it."""
        driver = self.driver_of(job)
        if driver is not None:
            driver.lost(job, worker, reason)

    def _lent(self, event: ev.AppLent) -> None:
        """A node of an app's run is as busy as the worker of a job; no plan uses it meanwhile."""
        worker = self.roster.workers[event.worker]
        if worker.idle:
            self.effects.move(event.worker, members.AssignedTo(event.run, 0))
        else:
            self.effects.report_member(worker.member)

    def _returned(self, event: ev.AppReturned) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is not None and worker.member.job == event.run:
            self.effects.move(event.worker, members.Released(event.reason))

    def _kick(self, event: ev.KickAsked) -> None:
        reason, machine = event.reason or "asked by the owner", machine_of(event.worker)
        # One certificate is all its devices'; a machine that leaves takes them along.
        whole = event.for_good or event.worker == machine
        kicked = [w for w in self.roster.workers if w == event.worker or (whole and machine_of(w) == machine)]
        for peer in self.roster.workers if event.for_good else ():
            if peer not in kicked:  # peers hold a certificate for as long as it lasts
                for worker in kicked or [event.worker]:
                    self.effects.send(peer, do.Revoked(worker, reason))
        for worker in kicked:
            self.effects.send(worker, do.Dismiss(reason, event.for_good))
            self.effects.log(
                Name.WORKER_KICKED, "warning", worker=worker, reason=reason, for_good=event.for_good
            )
            self.effects.move(worker, members.Kicked(reason))

    # ------------------------------------------------------------ storage

    def _storage_failed(self, event: ev.StorageFailed) -> None:
        if self.effects.storage:
            return
        self.effects.storage = event.reason
        self.effects.log(Name.STORAGE_FAILED, "error", reason=event.reason)
        for driver in self.drivers:
            driver.storage_failed(event.reason)

    def _storage_recovered(self, event: ev.StorageRecovered) -> None:
        self.effects.storage = ""
        self.effects.log(Name.STORAGE_RECOVERED)
        self.effects.advance = True
        for driver in self.drivers:
            driver.storage_recovered()


_HANDLERS: Mapping[type, Callable[[Scheduler, Any], None]] = {
    ev.SessionOpened: Scheduler._opened,
    ev.SessionClosed: Scheduler._closed,
    ev.Arrived: Scheduler._arrived,
    ev.Uploading: Scheduler._uploading,
    ev.Tick: Scheduler._tick,
    ev.Submitted: Scheduler._submitted,
    ev.ForgetAsked: Scheduler._forget,
    ev.PlanAsked: Scheduler._plan_asked,
    ev.AppLent: Scheduler._lent,
    ev.AppReturned: Scheduler._returned,
    ev.KickAsked: Scheduler._kick,
    ev.StorageFailed: Scheduler._storage_failed,
    ev.StorageRecovered: Scheduler._storage_recovered,
}
"""Every other event is about one job, and its driver's."""
