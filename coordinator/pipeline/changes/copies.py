"""Copies of stages on idle workers' disks: who keeps which, and who is served from them. Pure.

An idle worker that could take over a stage keeps the newest checkpoint's part of it, as far as its owner
lends disk for that: what it then loads is there already. Workers that train keep the snapshots of each other
(``ring``). Nothing of this is journalled. A worker says what it
keeps whenever it comes back, and a stage's tensors are named by their hashes: a copy that is out of date or
rotten costs the time to fetch it, nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from coordinator.messages import instructions as do
from coordinator.messages.jobs import RUNNING, JobState, Snapshot
from coordinator.pipeline.assigning import tensors_of
from coordinator.pipeline.changes.successors import Fetching, Successor, Successors, copy_name, stored_name
from coordinator.pipeline.history import begun
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Fingerprint
    from coordinator.messages.events import CopyHeld

TELLING_BYTES = 64 << 10  # fewer say more of a round trip than of a rate
FLEET_EVERY_S = 2.0  # where only the fleet has changed: large ones always do

Orders = dict[str, list[do.StageCopy]]


@dataclass(slots=True)
class Copies:
    """Orders to keep copies, by worker: each with the session that it was given in."""

    effects: Effects
    _ordered: dict[str, tuple[int | None, tuple[do.StageCopy, ...]]] = field(default_factory=dict)
    _keepers: dict[tuple[str, int], str] = field(default_factory=dict)  # of a job's rank
    _jobs: tuple[object, ...] = ()
    _fleet: Fingerprint = frozenset()
    _looked_s: float = -inf

    def of(self, worker: str) -> tuple[do.StageCopy, ...]:
        """Return the copies that were ordered from a worker."""
        return self._ordered.get(worker, (None, ()))[1]

    def heard(self, worker: str, held: CopyHeld) -> None:
        """Take in that a worker keeps a copy, or why it does not."""
        known = self.effects.roster.workers[worker]
        copy = next((copy for copy in self.of(worker) if copy.name == held.name), None)
        if copy is None:
            self.effects.drop("CopyHeld", f"of {worker}: {held.name}, which it was not asked for", held.job)
            return
        fields: dict[str, Any] = {"job": held.job, "worker": worker, "name": held.name}
        if held.error:
            known.copies.pop(held.name, None)
            self.effects.log(Name.COPY_NOT_KEPT, **fields, reason=held.error)
            return
        known.copies[held.name] = held
        if not copy.holder and held.fetched_bytes >= TELLING_BYTES and held.took_s > 0:
            known.store_bps = 8 * held.fetched_bytes / held.took_s
        took_s = round(held.took_s, 3)
        fields |= {"bytes": held.n_bytes, "fetched_bytes": held.fetched_bytes, "took_s": took_s}
        self.effects.log(Name.COPY_KEPT, "debug" if copy.holder else "info", **fields)

    def tick(self, jobs: Mapping[str, JobState]) -> None:
        """Order what idle workers are to keep, where a checkpoint, a plan or the fleet has changed."""
        roster, now_s = self.effects.roster, self.effects.now_s
        states = [
            state
            for state in sorted(jobs.values(), key=lambda state: (state.created_s, state.job))
            if state.phase in RUNNING and begun(state)
        ]
        snapshots = self._snapshots(jobs.values())
        seen = (
            *((s.job, s.run.assigned, s.checkpoint.step) for s in states),
            *(name for name, _ in snapshots),
        )
        fleet = roster.fingerprint()
        if seen == self._jobs and (fleet == self._fleet or now_s < self._looked_s + FLEET_EVERY_S):
            return
        self._jobs, self._fleet, self._looked_s = seen, fleet, now_s
        wanted = self._wanted(states)
        kept = Orders()
        for _, orders in snapshots:
            for worker, copy in orders:
                kept.setdefault(worker, []).append(copy)
        for worker in roster.in_order({*wanted, *kept, *self._ordered}):
            known = roster.workers[worker]
            if known.member.gone:
                self._ordered.pop(worker, None)
            elif known.idle:
                self._order(worker, (*kept.get(worker, ()), *wanted.get(worker, ())))
            elif worker in kept:
                self._order(worker, tuple(kept[worker]))

    def _order(self, worker: str, copies: tuple[do.StageCopy, ...]) -> None:
        """Have a worker keep these and no others, unless it has heard so."""
        known = self.effects.roster.workers[worker]
        session, before = self._ordered.get(worker, (None, ()))
        names = [copy.name for copy in copies]
        if names == [copy.name for copy in before] and (session == known.session or not names):
            return
        self._ordered[worker] = known.session, copies
        known.copies = {name: held for name, held in known.copies.items() if name in names}
        from_ = {copy.holder for copy in copies if copy.holder not in ("", worker)}
        self.effects.send(
            worker, do.KeepCopies(copies, {holder: self._way(holder, worker) for holder in from_})
        )

    @staticmethod
    def _snapshots(states: Iterable[JobState]) -> list[tuple[object, list[tuple[str, do.StageCopy]]]]:
        """Return what workers keep for each other of snapshots, each with what tells it from others."""
        found: list[tuple[object, list[tuple[str, do.StageCopy]]]] = []
        for state in states:
            for snapshot in (state.ring.held, state.ring.taking):
                if snapshot is not None and snapshot.whole:
                    orders = list(copies_of(snapshot, state.job))
                    found.append(((state.job, snapshot.step, snapshot.keepers), orders))
        return found

    def _wanted(self, states: Iterable[JobState]) -> Orders:
        """Return by worker which copies it is to keep: each stage's is on one worker, few on any."""
        found, lent = Orders(), Counter[str]()
        before, self._keepers = self._keepers, {}
        for state in states:
            fetching = Fetching(state, self.effects.roster)
            successors = Successors(state, self.effects.roster, frozenset())
            for rank in range(state.n_ranks):
                n_bytes, kept_by = fetching.part_bytes(rank), before.get((state.job, rank))
                fit = [
                    one for one in successors.of(rank) if self._lends(one.worker) > lent[one.worker] + n_bytes
                ]
                if not fit:
                    continue
                worker = _best(fit, found, kept_by).worker
                self._keepers[state.job, rank] = worker
                lent[worker] += n_bytes
                tensors = tensors_of(state.adopted, rank, state.checkpoint)
                copy = do.StageCopy(state.job, stored_name(state, rank), state.adopted, rank, tensors)
                found.setdefault(worker, []).append(copy)
        return found

    def _lends(self, worker: str) -> int:
        return self.effects.roster.workers[worker].introduction.copy_bytes

    def holders(self, state: JobState, rank: int, worker: str) -> tuple[do.ExpectPeer, ...]:
        """Return from whom a worker fetches its stage's tensors before it asks the store; they expect it."""
        holders = Fetching(state, self.effects.roster).by(rank, worker).holders
        return tuple(self._way(holder, worker) for holder in holders)

    def _way(self, holder: str, worker: str) -> do.ExpectPeer:
        """Return a worker's way to who holds a copy, who expects it."""
        way, back = self.effects.roster.ways(worker, holder)
        self.effects.send(holder, back)
        return way


def copies_of(snapshot: Snapshot, job: str) -> Iterable[tuple[str, do.StageCopy]]:
    """Yield every copy that a snapshot is made of, with who is to keep it."""
    for rank, keepers in enumerate(snapshot.keepers):
        name = copy_name(job, snapshot.plan, rank, snapshot.step)
        for worker in keepers:
            yield worker, do.StageCopy(job, name, snapshot.plan, rank, snapshot.parts[rank], keepers[0])


def _best(fit: Iterable[Successor], found: Orders, kept_by: str | None) -> Successor:
    """Return who is to keep a copy: of the same class, with few others, who keeps it already."""

    def order(one: Successor) -> tuple[object, ...]:
        return one.other_bits, len(found.get(one.worker, ())), one.worker != kept_by, one.order

    return min(fit, key=order)
