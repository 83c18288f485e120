"""Jobs that wait for a moment before they are planned anew. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.membership.roster import Roster


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a job is not planned yet."""

    until_s: float
    for_workers: frozenset[str] = frozenset()  # all back in the pool: no need to wait longer
    unless_gone: str = ""  # its death settles what we wait for


@dataclass(slots=True)
class Holds:
    """At most one a job."""

    held: dict[str, Hold] = field(default_factory=dict)

    def __contains__(self, job: str) -> bool:
        return job in self.held

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def put(self, job: str, hold: Hold) -> None:
        """From now on this is what the job waits for."""
        self.held[job] = hold

    def end(self, roster: Roster, now_s: float) -> bool:
        """Drop holds whose time or cause is over; whether there was one."""
        idle = set(roster.idle())
        over = []
        for job, hold in self.held.items():
            blamed = roster.workers.get(hold.unless_gone)
            back = bool(hold.for_workers) and hold.for_workers <= idle
            gone = bool(hold.unless_gone) and (blamed is None or blamed.member.gone)
            if now_s >= hold.until_s or back or gone:
                over.append(job)
        for job in over:
            del self.held[job]
        return bool(over)
