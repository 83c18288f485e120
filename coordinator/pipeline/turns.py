"""What runs next: jobs that wait for their turn are picked, measured and planned on the idle fleet. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from atoll.federated import ConsentWord
from coordinator.membership import member as members
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import CheckpointTorn
from coordinator.messages.jobs import (
    ENDED,
    FEDERATING,
    PREPARING,
    RUNNING,
    UNFIT,
    WAITING,
    Broken,
    Cause,
    Event,
    JobState,
    Phase,
    Picked,
    Planned,
    Profiled,
    Torn,
    Waits,
    anew,
)
from coordinator.pipeline.changes.shares import WAITS, Shares, expected
from coordinator.pipeline.health.doubt import left_out
from coordinator.pipeline.tuning import memory
from coordinator.pipeline.tuning.link_adaptation import capped
from coordinator.pipeline.tuning.profiling import Hold, Profiling
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.membership.measuring import Measuring
    from coordinator.pipeline.beside import Beside
    from coordinator.sharing.claims import Allotment


@dataclass(slots=True)
class Turns:
    """Of all jobs that are cut into stages; ``step``: step a job's machine."""

    effects: Effects
    jobs: Mapping[str, JobState]
    measuring: Measuring
    profiling: Profiling
    beside: Beside
    shares: Shares
    concurrent_jobs: int
    step: Callable[[str, Event], None]

    def advance(self) -> None:
        """Have jobs begin that are granted workers, measure what they need, plan them."""
        self.beside.make_way()
        found = self.shares.look()
        busy = sum(s.phase in RUNNING | PREPARING for s in self.jobs.values())
        for state in sorted(self.jobs.values(), key=lambda s: s.created_s):
            workers = found.starts.get(state.job)
            if workers is not None and (busy < self.concurrent_jobs or state.phase is Phase.PROFILING):
                self.profiling.granted[state.job] = frozenset(workers)
                if state.phase is not Phase.PROFILING:
                    self.step(state.job, Picked("measuring devices and links"))
                    busy += 1
            elif state.phase in WAITING or state.job in found.waits:
                self._wait(state, found)
        self._prepare()

    def _wait(self, state: JobState, found: Allotment) -> None:
        """Say why a job waits, and what for."""
        running = [s.job for s in self.jobs.values() if s.phase in RUNNING]
        reason = expected(found, state.job, running)
        if state.job in found.starts:
            reason = f"{WAITS} its turn: {self.concurrent_jobs} jobs run, which is the most"
        if not running and not self.effects.roster.idle_count:
            reason = "no worker is in the pool; start some with `atoll-worker join`"
        if not reason or reason in state.reason:
            return
        kept = state.reason.partition(f"; {WAITS} ")[0] if state.phase is Phase.PAUSED else ""
        self.step(state.job, Waits(f"{kept}; {reason}" if kept else reason))

    @property
    def _training(self) -> bool:
        """Whether a job runs whose links must not be disturbed."""
        return any(s.phase in (RUNNING | FEDERATING) - {Phase.CONSENTING} for s in self.effects.jobs.values())

    def _prepare(self) -> None:
        training = self._training
        for state in list(self.jobs.values()):
            if state.phase is Phase.PROFILING and self.profiling.profiled(state.job, state.spec, training):
                self.step(state.job, Profiled())
                self._plan(state)
            elif state.phase is Phase.PLANNING and self.profiling.refined(state.job, training):
                self._plan(state)
        self.profiling.answer_inquiries(training)
        if not training:
            self.measuring.measure_links(fresh=False)

    def _plan(self, state: JobState, rest: Iterable[Iterable[str]] = ()) -> None:
        spec = capped(state.spec, self.effects.ledger.jobs[state.job].cap)
        memory.recall(self.effects.roster, state)
        self.profiling.plan(state.job, state.version + 1, spec, rest or left_out(state))

    def made(self, event: ev.PlanMade) -> None:
        """Begin with a plan, unless the fleet is another by now."""
        if not self.profiling.awaited(event.job, event.attempt):
            return
        plan, roster = event.plan, self.effects.roster
        missing = [place.worker for place in plan.places if not roster.is_idle(place.worker)]
        if missing or self.effects.storage:
            why = self.effects.storage or f"{missing[0]} went away while the plan was made"
            self.step(event.job, Waits(why))
            return
        if not self._training and self.profiling.refine(event.job, plan):
            return
        self.effects.log(
            Name.PLAN_MADE,
            job=event.job,
            version=plan.version,
            stages=len(plan.places),
            predicted_s=plan.prediction.step_s if plan.prediction else None,
        )
        self.step(event.job, Planned(plan))

    def failed(self, event: ev.PlanFailed) -> None:
        """Plan without fewer workers left out, or wait for another fleet."""
        if not self.profiling.awaited(event.job, event.attempt):
            return
        self.effects.log(Name.PLAN_FAILED, "warning", job=event.job, reason=event.reason)
        if event.hopeless:
            self.step(event.job, Broken(event.reason))
            return
        rest = self.profiling.rest(event.job)
        if rest:  # the fleet cannot spare those that it should do without
            self._plan(self.jobs[event.job], rest)
            return
        if self.shares.too_small(event.job):
            self.step(event.job, Waits(f"{UNFIT}: {event.reason}"))
            return
        self.profiling.wait_for_change(event.job)
        self.step(event.job, Waits(f"{UNFIT}: {event.reason}"))

    def heard(self, state: JobState, worker: str, message: ev.JobMessage) -> None:
        """Take in the word of who owns the job's data; nothing else is of no stage."""
        if isinstance(message, ev.ConsentSaid) and worker == state.spec.data_of:
            self._owner_said(state, message)
        else:
            why = f"of {worker}: {state.job} has stages"
            self.effects.drop(type(message).__name__, why, state.job)

    def _owner_said(self, state: JobState, message: ev.ConsentSaid) -> None:
        """Wait for the word of who owns the data, or end without it. Its worker has taken up no stage, and is
        not released from one: it would hear that the job is over."""
        job, owner = state.job, state.spec.data_of
        if message.word is not ConsentWord.GIVEN and self.effects.roster.workers[owner].member.job == job:
            self.effects.move(owner, members.Released(f"{job} waits for its owner's word"))
        words = f"{self.effects.label(owner)}: {message.reason}"
        if message.word is ConsentWord.GIVEN or state.phase in ENDED:
            self.profiling.holds.pop(job, None)
            self.effects.advance = True
        elif message.word is ConsentWord.REFUSED:
            self.step(job, Broken(words))
        else:
            self.profiling.holds[job] = Hold(inf, unless_gone=owner)
            stops = state.phase in RUNNING
            self.step(job, anew(state, words, Cause.CHOSEN) if stops else Waits(words))

    def over(self, state: JobState) -> None:
        """Tell the worker that has the data, which may have been asked and given no stage."""
        if owner := state.spec.data_of:
            self.effects.send(owner, do.Release(state.job, state.version, f"the job is {state.phase.value}"))

    def torn(self, event: ev.TornFound) -> None:
        """Take the checkpoint before: the newest cannot be loaded."""
        state = self.jobs[event.job]
        if state.phase not in WAITING | PREPARING or state.checkpoint.step != event.step:
            self.effects.drop("TornFound", f"{event.job} is {state.phase.value}", event.job)
            return
        self.effects.record(CheckpointTorn(event.job, event.step, event.reason))
        self.step(event.job, Torn(self.effects.ledger.jobs[event.job].last_checkpoint, event.reason))
