"""Suspicion of workers: named with its reason, and acted upon when it persists or is confirmed.

What is suspicious, ``anomalies`` and ``doubt`` decide; `atoll status` shows it. A slow worker is better than
none, so one whose figures are odd is replaced only where another is idle that could hold its stage, and where
that gains time. What follows for whom, ``evidence`` says. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.gradient_exchange import kept_of
from coordinator.messages import events as ev
from coordinator.messages.jobs import ENDED, STEPPING, Doubt, JobState
from coordinator.pipeline.health import anomalies
from coordinator.pipeline.health.anomalies import Alarm, Watched
from coordinator.pipeline.health.doubt import cleared
from coordinator.pipeline.health.evidence import GUILT, Culprit, Evidence, Guilt
from coordinator.pipeline.history import current
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects


@dataclass(slots=True)
class Suspicion:
    """All jobs of stages; ``guilt``: what follows for whom."""

    effects: Effects
    guilt: Guilt
    _watched: dict[str, Watched] = field(default_factory=dict)
    _named: dict[str, Mapping[str, str]] = field(default_factory=dict)  # job -> worker -> why
    _disputed: dict[str, Mapping[str, str]] = field(default_factory=dict)  # the same, of steps repeated

    # ------------------------------------------------------------ what jobs do

    def committed(self, state: JobState) -> None:
        """Score what the ranks reported of a committed step."""
        if state.phase not in STEPPING:
            return
        assigned = state.run.lineage[0][0] if state.run.lineage else state.version
        watched = self._watched.get(state.job)
        if watched is None or watched.assigned != assigned:
            watched = self._watched[state.job] = Watched(assigned)
        if watched.committed(state):
            self._name(state)

    def stepped(self, before: JobState, state: JobState) -> None:
        """Follow a job from one state to the next."""
        if state.phase not in STEPPING and self._watched.pop(state.job, None) is not None:
            self._name(state)
        if before.doubt == state.doubt:
            return
        self._name(state)
        if before.doubt is not None and state.doubt is None and state.phase not in ENDED:
            self._settle(before.doubt, state)

    def dispute(self, state: JobState, why: Mapping[str, str]) -> None:
        """Show who is suspected as workers do not agree on a step; nobody any more where ``why`` is empty."""
        if self._disputed.pop(state.job, {}) == why == {}:
            return
        if why:
            self._disputed[state.job] = why
        self._name(state)

    def untrue(self, state: JobState, rank: int, worker: str, message: ev.StageMessage) -> bool:
        """Whether what a rank says cannot be true; learn from the figures of a step where it can."""
        wrong = self._wrong(state, rank, worker, message)
        if wrong is not None:
            self.guilt.found(Evidence.UNTRUE, Culprit(worker, wrong))
        return wrong is not None

    def _wrong(self, state: JobState, rank: int, worker: str, message: ev.StageMessage) -> str | None:
        match message:
            case ev.StepReady() if _awaited(state, rank, message):
                elapsed_s = self.effects.now_s - state.run.begun_s if state.run.begun_s is not None else None
                return self.effects.roster.judge(worker, message, elapsed_s)
            case ev.StateStored(forged=forged) if forged and current(state, message.version):
                return f"{worker} stored what is not a checkpoint: {forged}"
            case ev.StateStored(tensors=tensors):
                odd = sorted(name for name in tensors if not _known(state, rank, name))
                return f"{worker} stored {odd[0]!r}, which {state.job} does not have" if odd else None
        return None

    def tick(self, jobs: Mapping[str, JobState]) -> None:
        """Replace whoever's figures have been odd for long enough."""
        for job, watched in list(self._watched.items()):
            state, alarm = jobs.get(job), anomalies.culprit(watched.alarms)
            if state is None or alarm is None or state.phase not in STEPPING:
                continue
            worker = anomalies.blamed(alarm, watched.alarms)
            if self._spare(state, worker) and watched.worth(alarm, state):
                other = next(iter(alarm.key.ends - {worker}), "")
                words = f"{self.effects.label(worker)}: {self._words(alarm)}"
                self.guilt.found(Evidence.ODD_AND_SPARE, Culprit(worker, words, other))

    # ------------------------------------------------------------ what follows

    def _settle(self, doubt: Doubt, state: JobState) -> None:
        """A step that was not finite is, done again: whoever had no part in that goes."""
        guilty = cleared(doubt, state.plan) if state.plan is not None else ()
        names = " or ".join(map(self.effects.label, guilty))
        without = "it" if len(guilty) == 1 else "them"
        for worker in guilty:
            words = f"{names}: {doubt.said}, finite without {without}"
            self.guilt.found(Evidence.FINITE_WITHOUT, Culprit(worker, words))
        if not guilty:
            reason = f"{doubt.said}, and was finite when the same workers did it again"
            self._log(state.job, doubt.suspects[0], reason)

    def _spare(self, state: JobState, worker: str) -> bool:
        """Whether a worker is idle, or stands by, that has the memory for this one's stage."""
        rank, roster = state.rank_of(worker), self.effects.roster
        needed = state.predicted[rank].memory_bytes if state.predicted and rank is not None else 0
        spare = [*roster.idle(), *(standby.worker for standby in state.standbys.values())]
        return any(roster.workers[worker].memory_limit_bytes >= needed for worker in spare)

    # ------------------------------------------------------------ names

    def _name(self, state: JobState) -> None:
        """Show who is suspected now, and log what is new."""
        before, now = self._named.get(state.job, {}), self._suspected(state)
        self._named.pop(state.job, None)
        if now:
            self._named[state.job] = now
        for worker in sorted({*before, *now}):
            if before.get(worker, "") != now.get(worker, "") and worker in self.effects.roster.workers:
                self.effects.roster.workers[worker].suspected = now.get(worker, "")
                if worker in now:
                    self._log(state.job, worker, now[worker])

    def _suspected(self, state: JobState) -> dict[str, str]:
        if state.phase in ENDED:
            return {}
        watched = self._watched.get(state.job)
        alarms = watched.alarms if watched is not None else ()
        found = [(Evidence.OPPOSED, *item) for item in self._disputed.get(state.job, {}).items()]
        found += [(Evidence.ODD, anomalies.blamed(a, alarms), self._words(a)) for a in alarms]
        named: dict[str, str] = {}
        for evidence, worker, words in found:
            if GUILT[evidence].named:
                named[worker] = "; ".join(filter(None, (named.get(worker, ""), words)))
        if state.doubt is not None and GUILT[Evidence.NOT_FINITE].named:
            named[state.doubt.suspects[0]] = f"suspected: {state.doubt.said}; the step is done again"
        return named

    def _words(self, alarm: Alarm) -> str:
        return alarm.words(self.effects.label)

    def _log(self, job: str, worker: str, reason: str) -> None:
        self.effects.log(Name.WORKER_SUSPECTED, job=job, worker=worker, reason=reason)


def _awaited(state: JobState, rank: int, report: ev.StepReady) -> bool:
    """Whether a report is of the step in flight: one that is repeated took its time in an earlier one."""
    return report.step == state.due and rank not in state.run.ready and current(state, report.version)


def _known(state: JobState, rank: int, name: str) -> bool:
    """Whether a rank may store a tensor of this name: of the model, or of what its replica keeps of one."""
    known, kept = state.spec.tensors, kept_of(name)
    if name in known or state.plan is None or not state.plan.keeps or kept is None:
        return name in known
    return kept[0] in known and kept[1] == state.plan.places[rank].replica
