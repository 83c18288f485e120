"""Guilt: what follows for a worker from each kind of evidence, and who was found guilty before. Pure.

A quarantine for a while is twice as long each time. Between two workers nothing tells a lost link from a lie:
both are remembered, and whoever is part of the next such pair again goes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from atoll.backoff import doubled_s

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects

BACKOFF_S, LONGEST_BACKOFF_S = 60.0, 3600.0
FORGIVEN_AFTER_S = 3600.0


class Evidence(StrEnum):
    """What speaks against a worker."""

    STILL = "still"  # its job stands still, and who waits for whom leads to it (``stuck``)
    ODD = "odd"  # its figures stand out from its peers' (``anomalies``)
    ODD_AND_SPARE = "odd and spare"  # for three windows, and another is idle that could hold its stage
    NOT_FINITE = "not finite"  # it took part in every try of a step that is not finite (``doubt``)
    FINITE_WITHOUT = "finite without"  # ... which is, done again without it
    FAILS = "fails"  # its stage failed twice without a step in between, by itself
    DIFFERS = "differs"  # its results are not those of the other peers or replicas (``disputes``)
    OPPOSED = "opposed"  # another repeated its step otherwise: word against word (``spot_checks``)
    OUTVOTED = "outvoted"  # ... and a third agrees with the other
    UNTRUE = "untrue"  # what it reports cannot be true


class Quarantine(StrEnum):
    """For how long a worker is kept out of every plan."""

    NONE = "none"
    WHILE = "while"
    FOR_GOOD = "for good"  # until its process starts anew


class Follows(NamedTuple):
    """Whether a worker is shown as suspected, left out of its job's next plan where the fleet can spare it,
    and for how long it is quarantined."""

    named: bool = False
    left_out: bool = False
    quarantine: Quarantine = Quarantine.NONE


GUILT: Mapping[Evidence, Follows] = {
    Evidence.STILL: Follows(quarantine=Quarantine.WHILE),
    Evidence.ODD: Follows(named=True),  # a slow worker is better than none
    Evidence.ODD_AND_SPARE: Follows(named=True, quarantine=Quarantine.WHILE),
    Evidence.NOT_FINITE: Follows(named=True, left_out=True),
    Evidence.FINITE_WITHOUT: Follows(quarantine=Quarantine.WHILE),
    Evidence.FAILS: Follows(left_out=True),
    Evidence.DIFFERS: Follows(left_out=True),
    Evidence.OPPOSED: Follows(named=True),
    Evidence.OUTVOTED: Follows(quarantine=Quarantine.FOR_GOOD),
    Evidence.UNTRUE: Follows(quarantine=Quarantine.FOR_GOOD),
}


@dataclass(frozen=True, slots=True)
class Culprit:
    """The worker that goes, and why; ``other``: the one that may be to blame as well."""

    worker: str
    reason: str
    other: str = ""


@dataclass(slots=True)
class _Record:
    """Times that a worker was quarantined for a while, or was one of two; ``last_s``: the newest."""

    quarantines: int = 0
    trouble: int = 0
    last_s: float = 0.0


@dataclass(slots=True)
class Guilt:
    """Records of all workers."""

    effects: Effects
    _records: dict[str, _Record] = field(default_factory=dict)

    @property
    def trouble(self) -> dict[str, int]:
        """By worker, how often it was one of two."""
        return {worker: record.trouble for worker, record in self._records.items()}

    def found(self, evidence: Evidence, blamed: Culprit) -> None:
        """Have follow what the table says."""
        match GUILT[evidence].quarantine:
            case Quarantine.WHILE:
                seconds = self._again_s(blamed)
                self.effects.quarantine(blamed.worker, f"{blamed.reason}; for {seconds:.0f} s", seconds)
            case Quarantine.FOR_GOOD:
                self.effects.quarantine(blamed.worker, blamed.reason, inf)

    def _again_s(self, blamed: Culprit) -> float:
        """Remember who was involved; returns the seconds of the quarantine."""
        now_s = self.effects.now_s
        for worker, record in list(self._records.items()):
            if now_s - record.last_s > FORGIVEN_AFTER_S:
                del self._records[worker]
        for worker in filter(None, (blamed.worker, blamed.other)):
            record = self._records.setdefault(worker, _Record())
            record.trouble += bool(blamed.other)
            record.last_s = now_s
        record = self._records[blamed.worker]
        record.quarantines += 1
        return doubled_s(BACKOFF_S, record.quarantines, LONGEST_BACKOFF_S)
