"""Bugs of the kind that lose or spoil work, planted one at a time: the suite must find each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.federated import machine as federated
from coordinator.federated.state import FederationState, FromClient
from coordinator.messages import batch as batches
from coordinator.messages.events import StateStored, StepReady, UpdateReady
from coordinator.messages.facts import Checkpoint, CheckpointStored
from coordinator.messages.jobs import STEPPING, Cause, FromRank, JobState, Phase, Record, anew
from coordinator.pipeline import history, machine
from coordinator.pipeline.changes.recovery import Recovery
from coordinator.pipeline.changes.standbys import Standbys
from coordinator.pipeline.health.stuck import Stuck
from tests.sim.compute import Bench
from tests.sim.coordinator import Coordinator, Folder
from tests.sim.faults import Crash, Fault, Hang, KilledForMemory, Poison, Repeats, TakeOver
from tests.sim.send_log import Kept, SendLog
from worker.session import machine as session

Plant = Callable[[pytest.MonkeyPatch], None]


def retry_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """A client's answer that it repeats for the round before counts in this one, too."""
    honest = federated.TRANSITIONS[Phase.TRAINING, UpdateReady]

    def bug(state: FederationState, event: FromClient[UpdateReady], now_s: float) -> Any:
        update = event.message
        if update.round == state.round - 1 and event.worker not in state.updates:
            event = replace(event, message=replace(update, round=state.round))
        return honest(state, event, now_s)

    patch.setitem(federated.TRANSITIONS, (Phase.TRAINING, UpdateReady), bug)


def commit_before_all_ranks(patch: pytest.MonkeyPatch) -> None:
    """The last rank to report is not waited for."""
    for phase in STEPPING:
        honest = machine.TRANSITIONS[phase, StepReady]

        def bug(state: JobState, event: FromRank[StepReady], now_s: float, honest: Any = honest) -> Any:
            after, todo = honest(state, event, now_s)
            if after.step == state.step and len(after.run.ready) == state.n_ranks - 1:
                missing = next(rank for rank in range(state.n_ranks) if rank not in after.run.ready)
                return honest(after, replace(event, rank=missing), now_s)
            return after, todo

        patch.setitem(machine.TRANSITIONS, (phase, StepReady), bug)


def manifest_written_first(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint is recorded when its first part is stored."""
    for phase in (*STEPPING, Phase.STORING):
        honest = machine.TRANSITIONS[phase, StateStored]

        def bug(state: JobState, event: FromRank[StateStored], now_s: float, honest: Any = honest) -> Any:
            after, todo = honest(state, event, now_s)
            done = event.message.step + 1
            if after.storing.parts.get(done, {}).keys() == {event.rank} and state.n_ranks > 1:
                tensors = {**state.checkpoint.tensors, **event.message.tensors}
                early = replace(after, checkpoint=Checkpoint(done, tensors))
                return early, [Record(CheckpointStored(state.job, done, tensors)), *todo]
            return after, todo

        patch.setitem(machine.TRANSITIONS, (phase, StateStored), bug)


def stale_version_accepted(patch: pytest.MonkeyPatch) -> None:
    """A message counts whatever plan it speaks of."""
    patch.setattr(machine, "staleness", lambda state, event: None)


def stale_term_accepted(patch: pytest.MonkeyPatch) -> None:
    """A worker obeys whatever coordinator welcomes it."""
    patch.setattr(session, "_of_smaller_term", lambda state, welcome: False)


def stale_term_recorded(patch: pytest.MonkeyPatch) -> None:
    """A coordinator goes on writing after another has claimed its journal."""
    patch.setattr(Folder, "check", lambda folder, term: None)


def fact_after_consequence(patch: pytest.MonkeyPatch) -> None:
    """Workers hear of what is written afterwards."""

    def bug(self: Coordinator) -> None:
        batch, self._events = self._events, []
        caused = [self.scheduler.handle(event, self.clock.now_s) for event in batch]
        self._perform(caused, durable=True)
        self.after(self.folder.write_s, lambda: self._write(batches.facts(caused)))

    patch.setattr(Coordinator, "_handle", bug)


def nobody_reads_progress(patch: pytest.MonkeyPatch) -> None:
    """Heartbeats are signs of life, and nobody looks at what they say."""
    patch.setattr(Stuck, "tick", lambda self, jobs: None)


def log_trimmed_too_early(patch: pytest.MonkeyPatch) -> None:
    """A step that is committed is taken for one that nobody repeats."""
    honest = SendLog.trim
    patch.setattr(SendLog, "trim", lambda self, replay_from, step: honest(self, step, step))


def message_skipped_in_replay(patch: pytest.MonkeyPatch) -> None:
    """A newcomer that repeats three steps or more takes the message of the one before for the last's."""
    honest = Bench._answered

    def bug(self: Bench, answer: Kept) -> None:
        held = self.repeats
        skipped = held is not None and answer.step == held.work.first_step - 1 and answer.step > held.first
        before = (answer.job, answer.version, answer.step - 1, answer.forwards)
        honest(self, replace(answer, value=self.kept[before]) if skipped and before in self.kept else answer)

    patch.setattr(Bench, "_answered", bug)


def scale_forgotten_in_replay(patch: pytest.MonkeyPatch) -> None:
    """A newcomer applies what it repeats as if nothing had been clipped."""
    honest = history.replay

    def bug(*arguments: Any) -> Any:
        found = honest(*arguments)
        return found and replace(found, scales=(1.0,) * len(found.scales))

    patch.setattr(history, "replay", bug)


def scale_forgotten_by_a_standby(patch: pytest.MonkeyPatch) -> None:
    """Who stands by applies what it repeats as if nothing had been clipped."""
    honest = Standbys._said_to
    bug = staticmethod(lambda commit: replace(honest(commit), gradient_scale=1.0))
    patch.setattr(Standbys, "_said_to", bug)


def memory_kills_cost_steps(patch: pytest.MonkeyPatch) -> None:
    """A stage that was killed for memory is not given to its worker once more."""
    patch.setattr(Recovery, "once_more", lambda self: anew(self.state, "it does not fit"))


def another_plan_before_all_is_stored(patch: pytest.MonkeyPatch) -> None:
    """Once who was killed has repeated its steps, the job is planned anew at once."""
    honest = machine._settle

    def bug(state: JobState) -> Any:
        return machine._interrupt(state, "does not fit", Cause.UNFIT) if state.run.unfit else honest(state)

    patch.setattr(machine, "_settle", bug)


def one_word_ends_a_job(patch: pytest.MonkeyPatch) -> None:
    """What one try found not finite is the model's."""
    patch.setattr(machine, "diverged", lambda doubt: True)


SHOWN_BY: dict[Plant, type[Fault]] = {
    stale_version_accepted: Repeats,
    stale_term_accepted: TakeOver,
    stale_term_recorded: TakeOver,
    nobody_reads_progress: Hang,
    log_trimmed_too_early: Crash,
    message_skipped_in_replay: Crash,
    scale_forgotten_in_replay: Crash,
    scale_forgotten_by_a_standby: Crash,
    one_word_ends_a_job: Poison,
    memory_kills_cost_steps: KilledForMemory,
    another_plan_before_all_is_stored: KilledForMemory,
}
"""Without such a fault a world cannot show the bug, and need not be run."""

SHOWN_IN: dict[Plant, int] = {
    stale_version_accepted: 60,
    stale_term_accepted: 604,
    scale_forgotten_by_a_standby: 35,
    one_word_ends_a_job: 62,
}
"""The first world that showed a bug, where many show nothing of it: it is tried before the others."""

PLANTED: tuple[Plant, ...] = (
    retry_counted_twice,
    commit_before_all_ranks,
    manifest_written_first,
    stale_version_accepted,
    stale_term_accepted,
    stale_term_recorded,
    fact_after_consequence,
    nobody_reads_progress,
    log_trimmed_too_early,
    message_skipped_in_replay,
    scale_forgotten_in_replay,
    scale_forgotten_by_a_standby,
    one_word_ends_a_job,
    memory_kills_cost_steps,
    another_plan_before_all_is_stored,
)
