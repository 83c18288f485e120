"""Kinds of disturbances, and who is disturbed how and when: drawn by a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

COORDINATOR = "coordinator"


class Kind(StrEnum):
    """What is done to a process, or to the way between two hosts."""

    KILL = "kill"  # -9 of a worker, started again after some seconds
    CRASH = "crash"  # kill -9 of the process that computes for a worker
    FREEZE = "freeze"  # a worker with all its processes, or the coordinator, stands still (SIGSTOP)
    HANG = "hang"  # the process that computes for a worker stands still, its daemon lives
    RESTART = "restart"  # kill -9 of the coordinator, started again
    DISK = "disk"  # a worker can write no file, as on a full disk
    CUT = "cut"  # nothing passes between two hosts
    SLOW = "slow"  # little passes between two hosts


LASTS_S: Mapping[Kind, tuple[float, float]] = {
    Kind.KILL: (1.0, 3.0),
    Kind.CRASH: (0.0, 0.0),
    Kind.FREEZE: (4.0, 8.0),
    Kind.HANG: (8.0, 12.0),
    Kind.RESTART: (0.0, 1.0),
    Kind.DISK: (2.0, 5.0),
    Kind.CUT: (1.0, 6.0),
    Kind.SLOW: (3.0, 8.0),
}
"""Seconds from the deed to its end; a killed process is away for so long."""
COORDINATOR_FREEZE_S = (0.5, 4.0)
BETWEEN_HOSTS = frozenset({Kind.CUT, Kind.SLOW})
STARTED_BY_NOBODY = (Kind.CRASH, Kind.FREEZE, Kind.HANG)
"""What costs no process that somebody would have to start again."""
OF_PROCESSES = tuple(kind for kind in Kind if kind not in BETWEEN_HOSTS)
SPREAD = 0.5  # of the mean interval, either way


@dataclass(frozen=True, slots=True)
class Wish:
    """A disturbance to come: ``after_s`` seconds after the one before."""

    kind: Kind
    target: str  # a worker's name, or ``COORDINATOR``
    after_s: float
    lasts_s: float
    other: str = ""  # the far end, where it lies between two hosts


@dataclass(frozen=True, slots=True)
class Deed:
    """A disturbance that was done, at ``at_s`` seconds of this machine's clock, over at ``over_s``."""

    kind: Kind
    target: str
    at_s: float
    over_s: float
    other: str = ""
    worker: str = ""  # the target's id
    held: bool = False  # a stage of a job that was training

    def __str__(self) -> str:
        to = f" and {self.other}" if self.other else ""
        return f"{self.kind} {self.target}{to}"


class Draw:
    """Wishes by a seed: the same seed and the same members give the same ones."""

    def __init__(self, seed: int, every_s: float, kinds: Sequence[Kind], members: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._every_s, self._members = every_s, tuple(members)
        self._workers = tuple(name for name in members if name != COORDINATOR)
        restarts = COORDINATOR in members
        self._kinds = tuple(kind for kind in kinds if restarts or kind is not Kind.RESTART)

    def next(self) -> Wish:
        """Draw the next wish."""
        draw = self._random
        after_s = self._every_s * draw.uniform(1 - SPREAD, 1 + SPREAD)
        kind, other = draw.choice(self._kinds), ""
        target = draw.choice(self._members if kind is Kind.FREEZE else self._workers)
        if kind is Kind.RESTART:
            target = COORDINATOR
        elif kind in BETWEEN_HOSTS:
            other = draw.choice([name for name in self._workers if name != target])
        frozen = kind is Kind.FREEZE and target == COORDINATOR
        lasts_s = COORDINATOR_FREEZE_S if frozen else LASTS_S[kind]
        return Wish(kind, target, after_s, draw.uniform(*lasts_s), other)
