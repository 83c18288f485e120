"""Snapshots that the ranks of a plan keep for each other, each on its own disk and on another rank's. Pure.

They are for plans of which a stage is lost with its worker, as nobody idle could take it over (decision 058).
A commit says which step is kept. Each rank writes its part to its disk, and the rank that is a number of
places further on, in another household where there is one, fetches it behind everything else that the links
carry. A snapshot counts when every part lies on both disks. When a rank is lost, those that are left put the
newest one into the store: it is a checkpoint then, and the job goes back to it instead of to an older one.

How often: Young's interval sqrt(2 C / losses a second), where C is what one costs training, within bounds.
There are none where links have so little time to spare that checkpoints alone cost less.
Source: TRANSOM's checkpoint engine (papers/decentralized.md 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from atoll.job import CHECKPOINT_EVERY_S
from coordinator.messages import instructions as do
from coordinator.messages.facts import Checkpoint
from coordinator.messages.jobs import (
    RUNNING,
    STEPPING,
    WAITING,
    Event,
    JobState,
    Recovered,
    Ring,
    RingChanged,
    Snapshot,
    Waits,
)
from coordinator.pipeline.changes.copies import copies_of
from coordinator.pipeline.changes.recovery import choose
from coordinator.planning.costs.losses import STORING_SHARE
from coordinator.planning.costs.snapshots import EVERY_S, Part, every_s, taken_s, worth_it
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Roster
    from coordinator.messages.events import CopyHeld, CopyStored
    from coordinator.messages.facts import JobRecord

FIRST_S = 10.0  # of training, until the first one
STALE_S = 600.0  # under way for so long: a message was lost
LOOK_EVERY_S = 2.0  # whether one is needed depends on who is idle
RETURN_S = 20.0  # for who is just away with the only copy of a part


def keepers_of(state: JobState, roster: Roster) -> tuple[tuple[str, str], ...]:
    """Return by rank its worker and who keeps its part for it, nothing where that cannot be. All are the same
    number of places further on, so each keeps one part; in another household for as many as possible."""
    plan = state.plan
    if plan is None or plan.local or len(plan.replicas) > 1:
        return ()
    workers = [place.worker for place in plan.places]
    here = [roster.workers.get(worker) for worker in workers]
    if any(known is None or not known.introduction.copy_bytes for known in here):
        return ()
    intros = {w: known.introduction for w, known in zip(workers, here, strict=True) if known is not None}
    home = {worker: told.site or told.seen or worker for worker, told in intros.items()}
    best: tuple[tuple[str, str], ...] = ()
    apart = -1
    for shift in range(1, len(workers)):
        pairs = tuple((w, workers[(at + shift) % len(workers)]) for at, w in enumerate(workers))
        others = sum(home[one] != home[other] for one, other in pairs)
        if others > apart and all(roster.connectable(other, one) for one, other in pairs):
            best, apart = pairs, others
    return best


def needed(state: JobState, record: JobRecord, roster: Roster) -> bool:
    """Whether the loss of some rank would send the job back."""
    ranks = range(state.n_ranks)
    return any(choose(state, record, roster, {rank}).plan is None for rank in ranks)


@dataclass(slots=True)
class _Gathering:
    """A snapshot on its way into the store; ``asked``: by rank whom, ``failed``: who could not."""

    snapshot: Snapshot
    until_s: float
    asked: dict[int, tuple[str, int | None]] = field(default_factory=dict)  # worker, its session
    failed: set[tuple[int, str]] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Watched:
    """A job that trains, with the version that it was assigned under."""

    assigned: int
    since_s: float
    looked_s: float = -inf


@dataclass(slots=True)
class Rings:
    """Of all running jobs; ``step``: step a job's machine."""

    effects: Effects
    step: Callable[[str, Event], None]
    _gathering: dict[str, _Gathering] = field(default_factory=dict)
    _watched: dict[str, _Watched] = field(default_factory=dict)

    # ------------------------------------------------------------ while a job trains

    def tick(self, jobs: Mapping[str, JobState]) -> None:
        """Let time pass."""
        for job in list(self._gathering):
            if job in jobs:
                self._gather_on(jobs[job])
            else:
                del self._gathering[job]
        for state in list(jobs.values()):
            if state.phase in STEPPING:
                self._look(state)

    def _look(self, state: JobState) -> None:
        now_s, ring = self.effects.now_s, state.ring
        if ring.taking is not None:
            self._end(state, ring.taking)
            return
        watched = self._watched.get(state.job)
        if watched is None or watched.assigned != state.run.assigned:
            watched = self._watched[state.job] = _Watched(state.run.assigned, now_s)
        if ring.due or now_s < max(self._due_s(state, watched), watched.looked_s + LOOK_EVERY_S):
            return
        watched.looked_s = now_s
        roster, record = self.effects.roster, self.effects.ledger.jobs[state.job]
        keepers = keepers_of(state, roster)
        if not keepers or not needed(state, record, roster):
            return
        measured_s = 0.0 if ring.failed else ring.took_s
        took_s = measured_s or predicted_s(state, keepers, roster)
        why = not_worth(state, took_s, roster.losses.per_s(now_s))
        if why and not ring.failed:
            self.effects.log(Name.SNAPSHOT_NOT_KEPT, "info", job=state.job, reason=why)
        self.step(state.job, RingChanged(replace(ring, due=() if why else keepers, failed=why)))

    def _due_s(self, state: JobState, watched: _Watched) -> float:
        ring = state.ring
        if ring.failed:
            # One that links had no time for is tried again as rarely as a checkpoint that took so long.
            return ring.asked_s + max(CHECKPOINT_EVERY_S, STORING_SHARE * ring.took_s)
        if ring.held is None:
            return watched.since_s + FIRST_S
        return ring.asked_s + interval_s(state, self.effects.roster, self.effects.now_s)

    def _end(self, state: JobState, taking: Snapshot) -> None:
        """See whether a snapshot under way is whole, or never will be."""
        now_s, ring, roster = self.effects.now_s, state.ring, self.effects.roster
        took_s = now_s - taking.asked_s
        if taking.whole:
            kept = [roster.workers[w].copies.get(copy.name) for w, copy in copies_of(taking, state.job)]
            if all(kept):
                n_bytes = max(held.n_bytes for held in kept if held is not None)
                whole = replace(ring, taking=None, held=taking, took_s=took_s, part_bytes=n_bytes)
                self.step(state.job, RingChanged(whole))
                fields = {"step": taking.step, "took_s": round(took_s, 3), "bytes": n_bytes}
                self.effects.log(Name.SNAPSHOT_KEPT, "debug", state.job, **fields)
                return
        if took_s > STALE_S:
            self._give_up(state, f"a snapshot was not whole after {took_s:.0f} s")
        elif took_s > EVERY_S and (why := not_worth(state, took_s, roster.losses.per_s(now_s))):
            self._give_up(state, why, took_s)

    def _give_up(self, state: JobState, why: str, took_s: float = 0.0) -> None:
        self.effects.log(Name.SNAPSHOT_NOT_KEPT, "warning", job=state.job, reason=why)
        ring = replace(state.ring, taking=None, failed=why, took_s=took_s or state.ring.took_s)
        self.step(state.job, RingChanged(ring))

    def kept(self, state: JobState, worker: str, held: CopyHeld) -> None:
        """Take in that a worker has a copy, or why it has not."""
        taking = state.ring.taking
        if taking is None or not taking.whole:
            return
        ours = any(w == worker and copy.name == held.name for w, copy in copies_of(taking, state.job))
        if ours and held.error:
            self._give_up(state, f"{self.effects.label(worker)} does not keep a part: {held.error}")
        elif ours:
            self._end(state, taking)

    # ------------------------------------------------------------ after a loss

    def gathers(self, job: str) -> bool:
        """Whether a job's newest snapshot is on its way into the store."""
        return job in self._gathering

    def over(self, state: JobState) -> None:
        """A plan is over: what is left of the newest snapshot becomes a checkpoint, where that is newer."""
        self._watched.pop(state.job, None)
        held = state.ring.held
        if state.phase in WAITING and held is not None and held.step > state.checkpoint.step:
            self._gathering[state.job] = _Gathering(held, self.effects.now_s + RETURN_S)
            self._gather_on(state)

    def stores(self, worker: str) -> list[do.StageCopy]:
        """Return the copies that a worker is putting into the store."""
        return [
            copy
            for job, gathering in self._gathering.items()
            for keeper, copy in copies_of(gathering.snapshot, job)
            if keeper == worker and gathering.asked.get(copy.rank, ("",))[0] == worker
        ]

    def sources(self) -> list[Checkpoint]:
        """Return the snapshots whose blobs are on their way."""
        found = (gathering.snapshot for gathering in self._gathering.values())
        return [Checkpoint(s.step, tensors) for s in found for tensors in s.parts.values()]

    def _gather_on(self, state: JobState) -> None:
        """Ask for each part that nobody is putting into the store; give up where nobody can."""
        gathering = self._gathering[state.job]
        if state.phase in RUNNING or state.ring.held is not gathering.snapshot:
            del self._gathering[state.job]  # cancelled, or the steps were rejected
            return
        roster, missing = self.effects.roster, set[int]()
        for rank, (worker, session) in list(gathering.asked.items()):
            if rank not in gathering.stored and roster.workers[worker].session != session:
                del gathering.asked[rank]
        for worker, copy in copies_of(gathering.snapshot, state.job):
            rank = copy.rank
            if rank in gathering.asked:
                continue
            known = roster.workers.get(worker)
            missing.add(rank)
            if known is not None and known.session is not None and (rank, worker) not in gathering.failed:
                missing.discard(rank)
                gathering.asked[rank] = worker, known.session
                blobs = tuple(sorted(set(copy.tensors.values())))
                self.effects.send(worker, do.StoreCopy(state.job, copy.name, blobs))
        missing -= gathering.asked.keys()
        keepers = gathering.snapshot.keepers
        hopeless = any(all((rank, w) in gathering.failed for w in keepers[rank]) for rank in missing)
        if missing and (hopeless or self.effects.now_s >= gathering.until_s):
            self._not_gathered(state, min(missing))

    def _not_gathered(self, state: JobState, rank: int) -> None:
        gathering = self._gathering.pop(state.job)
        step = gathering.snapshot.step
        names = " and ".join(map(self.effects.label, gathering.snapshot.keepers[rank]))
        why = f"the snapshot of step {step} is lost with {names}; continues from step {state.checkpoint.step}"
        self.step(state.job, RingChanged(Ring(failed=why)))
        self.step(state.job, Waits(why))
        self.effects.advance = True

    def stored(self, state: JobState, worker: str, message: CopyStored) -> None:
        """Take in that a part is in the store, or why it is not."""
        gathering = self._gathering.get(state.job)
        if gathering is None:
            return
        for keeper, copy in copies_of(gathering.snapshot, state.job):
            if (
                keeper == worker
                and copy.name == message.name
                and gathering.asked.get(copy.rank, ("",))[0] == worker
            ):
                if message.error:
                    self.effects.log(
                        Name.SNAPSHOT_NOT_KEPT, "warning", job=state.job, worker=worker, reason=message.error
                    )
                    gathering.failed.add((copy.rank, worker))
                    del gathering.asked[copy.rank]
                else:
                    gathering.stored.add(copy.rank)
        if len(gathering.stored) < len(gathering.snapshot.keepers):
            self._gather_on(state)
            return
        del self._gathering[state.job]
        tensors = dict(state.checkpoint.tensors)
        for _, part in sorted(gathering.snapshot.parts.items()):
            tensors.update(part)
        checkpoint = Checkpoint(gathering.snapshot.step, tensors, self.effects.now_s)
        self.step(state.job, Recovered(checkpoint))
        self.effects.advance = True


def predicted_s(state: JobState, keepers: Sequence[tuple[str, str]], roster: Roster) -> float:
    """Return the seconds until a snapshot is whole, by the links' measured rates; 0.0 where they or the bytes
    of the parts are not known."""
    prediction = state.prediction
    if prediction is None or len(state.predicted) != len(keepers):
        return 0.0
    parts = list[Part]()
    for stage, (worker, keeper) in zip(state.predicted, keepers, strict=True):
        link = roster.links.table.get(worker, keeper)
        if link is not None:
            terms = dict(stage.memory_terms)
            n_bytes = terms.get("weights", 0) + terms.get("optimizer", 0)
            busy_s = sum(other.busy_s for other in prediction.links if other.source == worker)
            parts.append(Part(n_bytes, link.bandwidth_bps, link.latency_s, busy_s))
    return taken_s(parts, state.usual_step_s, state.adopted.n_micro) if parts else 0.0


def not_worth(state: JobState, took_s: float, losses_per_s: float) -> str:
    """Say why snapshots that take so long would cost more than they save beside checkpoints, "" where they
    save more; ``losses_per_s``: of one worker."""
    every, stored_s = state.spec.training.checkpoint_every, 0.0
    if state.checkpoint.step:
        stored_s = max(0.0, state.checkpoint.at_s - state.storing.asked_s)
    between_s = every * state.usual_step_s or max(CHECKPOINT_EVERY_S, STORING_SHARE * stored_s)
    age_s = between_s / 2 + stored_s
    if worth_it(took_s, state.ring.part_bytes, state.n_ranks * losses_per_s, age_s):
        return ""
    return (
        f"no snapshots: in what links have to spare beside training one takes {took_s:.0f} s, and a "
        f"checkpoint every {between_s:.0f} s costs less"
    )


def interval_s(state: JobState, roster: Roster, now_s: float) -> float:
    """Return the seconds between two snapshots of a job."""
    ring = state.ring
    return every_s(ring.took_s, ring.part_bytes, state.n_ranks * roster.losses.per_s(now_s))
