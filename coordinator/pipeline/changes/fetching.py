"""How far a stage's part of the newest checkpoint is from a worker: on a disk or in the store. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.membership.op_probing import NOMINAL

if TYPE_CHECKING:
    from atoll.plan import Plan
    from coordinator.membership.roster import Roster
    from coordinator.messages.jobs import JobState

MOST_HOLDERS = 2  # that a stage is fetched from, before the store is asked


@dataclass(frozen=True, slots=True)
class Fetch:
    """Seconds until a part is on a worker's disk. ``here``: it is; else it comes from the first of the
    ``holders``, from the store where there is none."""

    seconds: float
    here: bool = False
    holders: tuple[str, ...] = ()


def copy_name(job: str, plan: Plan, rank: int, step: int) -> str:
    """Name a rank's part of the state after ``step`` committed steps: it is the same whoever holds the stage;
    peers with local steps each have a state of its own."""
    place = plan.places[rank]
    cut = plan.replicas[place.replica].stages[place.stage]
    ops = "+".join(f"{p.start}-{p.stop}.{p.eval_start}-{p.eval_stop}" for p in cut.pieces)
    own = f".{rank}" if plan.local else ""
    return f"{job}.{step}.{ops}{own}"


def stored_name(state: JobState, rank: int) -> str:
    """Name a rank's part of the newest checkpoint."""
    return copy_name(state.job, state.adopted, rank, state.checkpoint.step)


def store_bps(roster: Roster, worker: str) -> float:
    """Return the rate at which a worker fetches from the store: measured, else as home lines have it."""
    known = roster.workers.get(worker)
    if known is None:  # not back since our restart
        return NOMINAL.bandwidth_bps
    return min(known.store_bps or NOMINAL.bandwidth_bps, known.guest.download_bps)


@dataclass(slots=True)
class Fetching:
    """Of one job; to be made anew for each question, as what it has looked up changes."""

    state: JobState
    roster: Roster
    _holders: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def holders(self, rank: int) -> tuple[str, ...]:
        """Return who keeps a copy of a rank's part and is here."""
        if rank not in self._holders:
            name = stored_name(self.state, rank)
            self._holders[rank] = tuple(
                worker
                for worker, known in self.roster.workers.items()
                if name in known.copies and known.session is not None and not known.member.gone
            )
        return self._holders[rank]

    def part_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's part, 0 where neither its worker nor who keeps a copy has said so."""
        name = stored_name(self.state, rank)
        said = (self.roster.workers[worker].copies[name].n_bytes for worker in self.holders(rank))
        return self.state.storing.part_bytes.get(rank, 0) or max(said, default=0)

    def by(self, rank: int, worker: str) -> Fetch:
        """Return how a worker comes by a rank's part in the least time."""
        roster = self.roster
        if worker in self.holders(rank):
            return Fetch(0.0, here=True)
        best_bps, rates = store_bps(roster, worker), dict[str, float]()
        for holder in self.holders(rank):
            link = roster.links.table.get(holder, worker)
            if link is not None and link.bandwidth_bps > best_bps and roster.connectable(worker, holder):
                rates[holder] = link.bandwidth_bps
        holders = tuple(sorted(rates, key=rates.__getitem__, reverse=True)[:MOST_HOLDERS])
        seconds = 8 * self.part_bytes(rank) / max(best_bps, *rates.values(), 1.0)
        return Fetch(seconds, holders=holders)
