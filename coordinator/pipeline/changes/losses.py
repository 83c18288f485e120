"""Losses of running jobs: from a worker that is gone, or a stage that broke, to who takes over. Pure.

A stage that says it lost a peer is not believed at once: the peer is gone, which shows within the time in
which the dead are noticed, or the two have lost each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coordinator.messages.jobs import RUNNING, Cause, Event, FromRank, JobState, PlanChange, anew
from coordinator.pipeline import history
from coordinator.pipeline.changes.recovery import Recovery, choose
from coordinator.pipeline.health.doubt import left_out
from coordinator.pipeline.history import begun
from coordinator.pipeline.tuning import memory
from coordinator.pipeline.tuning.profiling import Hold, Profiling
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.messages.events import StageFailed, StateStored


@dataclass(frozen=True, slots=True)
class _Accused:
    """A stage failed as it lost a peer; what becomes of that shows by ``until_s``."""

    failed: FromRank[StageFailed]
    until_s: float


@dataclass(frozen=True, slots=True)
class _Diverged:
    """Peers that have diverged in the period that begins with ``step``."""

    step: int
    workers: frozenset[str]


@dataclass(slots=True)
class Losses:
    """``step``: step a job's machine; ``make_way``: let those go who are busy beside plans."""

    effects: Effects
    profiling: Profiling
    dead_after_s: float
    step: Callable[[str, Event], None]
    make_way: Callable[[], None] = lambda: None
    _accused: dict[str, _Accused] = field(default_factory=dict)  # by job
    _named: dict[str, dict[str, str]] = field(default_factory=dict)  # by job: peer -> whom it named last
    _diverged: dict[str, _Diverged] = field(default_factory=dict)  # by job

    def go_on(
        self,
        state: JobState,
        ranks: Collection[int],
        words: str,
        cause: Cause = Cause.LOST,
        again: Collection[str] = (),
        *,
        back: bool = True,
    ) -> bool:
        """Have a job go on without workers in these ranks, from its checkpoint where nobody takes over; not
        ``back``: not then. Return whether it goes on; ``words``: why, ``again``: see ``Recovery``."""
        chosen = self.choose(state, ranks, again)
        if chosen.plan is None and not back:
            return False
        self.act(state, chosen, words, cause)
        return True

    def choose(self, state: JobState, ranks: Collection[int], again: Collection[str] = ()) -> PlanChange:
        """Return who takes over these ranks; see ``recovery.choose``."""
        if self.effects.storage:
            return anew(state, self.effects.storage)
        self.make_way()
        return choose(state, self.effects.ledger.jobs[state.job], self.effects.roster, ranks, again)

    def act(self, state: JobState, chosen: PlanChange, words: str, cause: Cause = Cause.LOST) -> None:
        """Carry out a change; ``words``: what it is for."""
        words = f"{words}; {chosen.reason}" if begun(state) else words
        self.step(state.job, replace(chosen, cause=cause, reason=words))

    def doubted(self, state: JobState, reason: str) -> None:
        """Do a step that is not finite again, without those whom its doubt leaves out; from the checkpoint
        where nobody can take over."""
        for some in left_out(state):
            ranks = {rank for rank in map(state.rank_of, some) if rank is not None}
            if (ranks or not some) and self.go_on(state, ranks, reason, back=False):
                return
        self.step(state.job, anew(state, reason))

    def failed(self, state: JobState, failed: FromRank[StageFailed], not_before_s: float = 0.0) -> None:
        """A stage broke, or lost a peer: nobody is judged for that before ``not_before_s``."""
        message = failed.message
        until_s = self.effects.now_s + self.dead_after_s
        if state.phase not in RUNNING or history.staleness(state, failed) is not None:
            self.step(state.job, failed)
        elif message.memory_bytes and not message.lost_peer:
            self._killed(state, failed)
        elif not begun(state):
            if message.lost_peer:
                self.profiling.holds[state.job] = Hold(until_s, unless_gone=message.lost_peer)
            else:
                self.profiling.read_again(state.job)
            self.step(state.job, failed)
        elif message.lost_peer and state.rank_of(message.lost_peer) is not None:
            self._accused.setdefault(state.job, _Accused(failed, max(until_s, not_before_s)))
        else:
            worker = state.workers[failed.rank]
            words = f"{self.effects.label(worker)} failed: {message.reason}"
            if not self.go_on(state, {failed.rank}, words, Cause.BROKEN, (worker,), back=False):
                self.step(state.job, failed)

    def _killed(self, state: JobState, failed: FromRank[StageFailed]) -> None:
        """Go on after a stage was killed for memory: nobody is blamed, and nothing that is trained is lost as
        long as somebody can repeat it."""
        rank, label = failed.rank, self.effects.label(state.workers[failed.rank])
        words = memory.killed(self.effects.roster, state, failed, label)
        self.effects.log(Name.STAGE_KILLED, "warning", job=state.job, step=state.step, reason=words)
        chosen, record = self.choose(state, {rank}), self.effects.ledger.jobs[state.job]
        if chosen.plan is not None:
            self.act(state, chosen, words)
            return
        if begun(state) and not self.effects.storage:
            again = Recovery(state, record, self.effects.roster, frozenset({rank})).once_more()
            chosen = again if again.reason else chosen
        end = "; planned again" if chosen.plan is None else ""
        reason = f"{words}; {chosen.reason}{end}"
        self.step(state.job, replace(chosen, cause=Cause.UNFIT, reason=reason))

    def diverged(self, state: JobState, failed: FromRank[StageFailed]) -> bool:
        """Go back to the checkpoint where half of the peers have diverged in a period, as the last round's
        fault; whether that is so. Until then each goes alone."""
        if state.phase not in RUNNING or not begun(state) or state.plan is None:
            return False
        if history.staleness(state, failed) is not None:
            return False
        worker, known = state.workers[failed.rank], self._diverged.get(state.job)
        before = known.workers if known is not None and known.step == state.step else frozenset[str]()
        found = before | {worker}
        self._diverged[state.job] = _Diverged(state.step, found)
        others = frozenset(state.workers[rank] for rank in state.present) - found
        if len(found) < max(2, len(others)):
            return False  # of two peers, who says so of itself goes
        reported = frozenset(state.workers[rank] for rank in state.run.ready)
        words = f"{self.effects.label(worker)} failed: {failed.message.reason}"
        words += f"; so have {len(found)} of {len(found | others)} peers"
        self.step(state.job, anew(state, words, Cause.BROKEN, suspects=others & reported or others))
        return True

    def unstored(self, state: JobState, event: FromRank[StateStored]) -> str:
        """Return why a worker is to have no rank any more that could not store its part, of the result or
        once more, "" where it keeps it."""
        done = event.message.step + 1
        parts = state.storing.parts.get(done)
        if (
            event.message.kept
            or not event.message.error
            or parts is None
            or event.rank in parts
            or state.plan is None
        ):
            return ""
        if history.staleness(state, event):
            return ""
        worker = state.workers[event.rank]
        if done < state.steps and set(state.storing.unstored) != {worker}:
            return ""  # the store's own fault where others failed
        return f"could not store its state: {event.message.error}"

    def forget(self, job: str) -> None:
        """A job has other workers, or none: what its stages reported of each other is over."""
        self._accused.pop(job, None)

    def over(self, job: str) -> None:
        """The job's plan is over."""
        self.forget(job)
        self._named.pop(job, None)
        self._diverged.pop(job, None)

    def judge(self, jobs: Mapping[str, JobState], returning: Collection[str]) -> None:
        """Let time pass; jobs that are ``returning`` wait for their workers first."""
        for job, accused in list(self._accused.items()):
            if self.effects.now_s >= accused.until_s and job not in returning:
                del self._accused[job]
                if jobs[job].phase in RUNNING:
                    self._not_gone(jobs[job], accused.failed)

    def _not_gone(self, state: JobState, failed: FromRank[StageFailed]) -> None:
        """Two that are here have lost each other: all connect anew, and where that does not help the one that
        was named gives up its place, or where nobody could go on without it the one that named it."""
        peer = state.rank_of(failed.message.lost_peer)
        if peer is None or history.staleness(state, failed) is not None:
            return
        # Peers with local steps hold nobody up: who did not deliver joins again later.
        ranks = {peer} if state.failures else set()
        if state.local:
            ranks = {failed.rank if self._names_many(state, failed) else peer}
        words = f"rank {failed.rank} and rank {peer} lost each other: {failed.message.reason}"
        again = (state.workers[failed.rank],)
        if not (
            self.go_on(state, ranks, words, back=False)
            or self.go_on(state, {failed.rank}, words, again=again, back=False)
        ):
            self.step(state.job, failed)

    def _names_many(self, state: JobState, failed: FromRank[StageFailed]) -> bool:
        """Whether a peer names another than the last time: its line is slow, or it puts out whom it likes."""
        named, who = self._named.setdefault(state.job, {}), state.workers[failed.rank]
        before = named.pop(who, failed.message.lost_peer)
        if before != failed.message.lost_peer:
            return True
        named[who] = before
        return False
