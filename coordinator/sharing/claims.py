"""Claims of jobs on a fleet's workers, and what an allotment answers; data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from atoll.job import Priority

SPEEDUP = (
    0.8  # exponent: k workers are taken to be k^0.8 times as fast, until a plan says better (ONES, 2021)
)
AS_MANY = 1 << 30


def faster(workers: int) -> float:
    """Return how many times as fast as one so many workers are taken to be."""
    return float(workers**SPEEDUP)


@dataclass(frozen=True, slots=True)
class Machine:
    """A worker that jobs may use; workers of one ``place`` share its link to the others."""

    name: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that wants workers, or has some.

    ``work_s``: seconds that its rest takes on one worker, ``inf`` where that is not known. ``least`` workers
    hold it, more than ``most`` are of no use. ``held``: workers that it has, none of a job that waits;
    ``had``: those of a job that had to stop. ``pause_s``: that it stands still to be moved. ``due_s``: when
    its owner needs it, or was promised it. ``stays``: its owner wants its plan left alone. ``fixed``: it is
    being prepared or loaded, and cannot be moved now. ``together``: each step fills its places' links, so it
    waits for as few places as could hold it.
    """

    job: str
    owner: str = ""
    priority: Priority = Priority.NORMAL
    submitted_s: float = 0.0
    work_s: float = inf
    least: int = 1
    most: int = AS_MANY
    held: tuple[str, ...] = ()
    had: frozenset[str] = frozenset()
    pause_s: float = 0.0
    due_s: float = inf
    stays: bool = False
    fixed: bool = False
    together: bool = False
    must: str = ""  # worker that it cannot do without

    def left_s(self, workers: int) -> float:
        """Return the seconds until it ends on so many workers."""
        return self.work_s / faster(workers) if workers else inf

    @property
    def runs(self) -> bool:
        return bool(self.held)

    @property
    def size(self) -> int:
        """Workers that it has, or the fewest that it could begin with."""
        return len(self.held) or self.least

    @property
    def service_s(self) -> float:
        """Remaining service: remaining time x workers (SRSF)."""
        return self.left_s(self.size) * self.size


@dataclass(frozen=True, slots=True)
class Quota:
    """Most that an owner's jobs may have at once, 0: as much as there is; ``weight``: of its share."""

    workers: int = 0
    jobs: int = 0
    weight: float = 1.0


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Gives:
    """A running job keeps ``keep`` workers at its next commit, 0: none for now, in favour of another."""

    keep: int
    to: str
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a job waits, and when it is expected to begin: ``inf`` where nobody knows; ``after``: the job that
    ends then."""

    reason: str
    starts_s: float = inf
    after: str = ""


@dataclass(frozen=True, slots=True)
class Allotment:
    """Changes to make now: workers of jobs that begin, workers that running jobs gain, givers, waits."""

    starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    grows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gives: Mapping[str, Gives] = field(default_factory=dict)
    waits: Mapping[str, Waiting] = field(default_factory=dict)
