"""Membership of one worker: joined -> pool -> assigned -> suspect -> dead, draining -> left.

A pure machine: ``step`` takes a member, an event and the time, and returns the new member with
its reason. An event that a peer sent and that no transition knows is refused, in words; one that
we made ourselves raises. Source of the roles: FusionAI (papers/decentralized.md 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from atoll.transitions import Transitions
from coordinator.config import Liveness

_HISTORY = 8
NO_RANK = -1


class Phase(StrEnum):
    """Phase of a worker's membership."""

    JOINED = "joined"  # its session is open, its facts are not yet accepted
    POOL = "pool"
    ASSIGNED = "assigned"
    SUSPECT = "suspect"  # silent or disconnected for a moment; keeps its stage
    DRAINING = "draining"  # wants to leave, holds a stage until released
    DEAD = "dead"
    LEFT = "left"


GONE = frozenset({Phase.DEAD, Phase.LEFT})


@dataclass(frozen=True, slots=True)
class Joined:
    """A session was opened by the process ``incarnation``."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The worker's facts are possible; it may be planned with."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life: a message on its session, or bytes that it uploads."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The session's stream ended without a word."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class AssignedTo:
    """``job`` has a use for it: the rank in a plan of the job's, or NO_RANK where it has none; ``what``:
    that, in words for people."""

    job: str
    rank: int
    what: str = ""


@dataclass(frozen=True, slots=True)
class Released:
    """The worker's job does not use it any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeavingSaid:
    """The worker asked to leave."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kicked:
    """The owner, or a failed check, put it out."""

    reason: str


Event = Joined | Admitted | Heard | ConnectionLost | Tick | AssignedTo | Released | LeavingSaid | Kicked
FROM_PEER = (Joined, Heard, LeavingSaid)


@dataclass(frozen=True, slots=True)
class Member:
    """Membership of a worker; ``history`` holds its last changes, oldest first."""

    worker: str
    phase: Phase
    reason: str
    incarnation: int
    seen_s: float
    since_s: float
    lost_s: float | None = None  # when its connection broke
    job: str = ""
    rank: int = NO_RANK
    before: Phase = Phase.JOINED  # what it was before it became suspect
    history: tuple[tuple[float, Phase, str], ...] = ()

    @property
    def gone(self) -> bool:
        return self.phase in GONE


_LIVE = frozenset(Phase) - GONE
TRANSITIONS: Transitions[Member, [float, Liveness], Member] = Transitions(Phase, Event)


def joined(worker: str, incarnation: int, now_s: float) -> Member:
    """A worker seen for the first time, or again after it was gone."""
    return Member(worker, Phase.JOINED, "session opened", incarnation, now_s, now_s)


def step(member: Member, event: Event, now_s: float, timing: Liveness) -> tuple[Member, str | None]:
    """The member after ``event``; the second value says why a peer's event was refused.

    Raises LookupError, with the member's last changes, for an event of our own that its phase
    does not know.
    """
    transition = TRANSITIONS.get((member.phase, type(event)))
    if transition is not None:
        return transition(member, event, now_s, timing), None
    history = "; ".join(f"{at:.3f} {phase.value}: {why}" for at, phase, why in member.history)
    words = f"{type(event).__name__} while {member.phase.value} ({history or member.reason})"
    if isinstance(event, FROM_PEER):
        return member, words
    raise LookupError(f"{member.worker}: {words}")


def watched_at_s(member: Member, timing: Liveness) -> float:
    """Return when a Tick may change a live member; no event but a change of its phase, job or connection
    makes that earlier."""
    patience = _patience(member, timing)
    silence_s = timing.dead_after_s if member.phase is Phase.SUSPECT else timing.suspect_after_s
    silent_at_s = member.seen_s + silence_s * patience
    if member.lost_s is None:
        return silent_at_s
    return min(silent_at_s, member.lost_s + timing.return_within_s)


def silence_forgiven(member: Member, gap_s: float) -> Member:
    """The member as if ``gap_s`` had not passed: our own stall is not its silence."""
    lost_s = None if member.lost_s is None else member.lost_s + gap_s
    return replace(member, seen_s=member.seen_s + gap_s, lost_s=lost_s)


def _to(member: Member, phase: Phase, reason: str, now_s: float) -> Member:
    history = (*member.history, (now_s, phase, reason))[-_HISTORY:]
    return replace(member, phase=phase, reason=reason, since_s=now_s, history=history)


@TRANSITIONS.on(*Phase)
def _rejoin(member: Member, event: Joined, now_s: float, timing: Liveness) -> Member:
    """The same process is back and keeps its place; another one replaces its ghost."""
    if event.incarnation != member.incarnation or member.gone:
        fresh = joined(member.worker, event.incarnation, now_s)
        same = event.incarnation == member.incarnation
        reason = "back after it was gone" if same else "process restarted"
        return _to(replace(fresh, history=member.history), Phase.JOINED, reason, now_s)
    back = replace(member, seen_s=now_s, lost_s=None)
    if member.phase is Phase.SUSPECT:
        return _to(back, member.before, "session reopened", now_s)
    return back


@TRANSITIONS.on(Phase.JOINED)
def _admit(member: Member, event: Admitted, now_s: float, timing: Liveness) -> Member:
    return _to(member, Phase.POOL, "in the backup pool", now_s)


@TRANSITIONS.on(*_LIVE)
def _hear(member: Member, event: Heard, now_s: float, timing: Liveness) -> Member:
    heard = replace(member, seen_s=now_s)
    if member.phase is Phase.SUSPECT and member.lost_s is None:
        return _to(heard, member.before, "heard again", now_s)
    return heard


@TRANSITIONS.on(*_LIVE - {Phase.DRAINING})
def _lose_connection(member: Member, event: ConnectionLost, now_s: float, timing: Liveness) -> Member:
    lost = replace(member, lost_s=now_s)
    if member.phase is Phase.SUSPECT:
        return lost
    return _to(replace(lost, before=member.phase), Phase.SUSPECT, "connection lost", now_s)


@TRANSITIONS.on(Phase.DRAINING)
def _leave_by_disconnecting(member: Member, event: ConnectionLost, now_s: float, timing: Liveness) -> Member:
    return _to(member, Phase.LEFT, f"left: {member.reason}", now_s)


@TRANSITIONS.on(*_LIVE)
def _watch(member: Member, event: Tick, now_s: float, timing: Liveness) -> Member:
    """Suspect before dead: a re-plan costs more than one late heartbeat."""
    if member.lost_s is not None and now_s - member.lost_s > timing.return_within_s:
        away_s = now_s - member.lost_s
        return _to(member, Phase.DEAD, f"connection lost and not back within {away_s:.1f} s", now_s)
    patience = _patience(member, timing)
    silent_s = now_s - member.seen_s
    if silent_s > timing.dead_after_s * patience:
        return _to(member, Phase.DEAD, f"silent for {silent_s:.1f} s", now_s)
    if silent_s > timing.suspect_after_s * patience and member.phase is not Phase.SUSPECT:
        return _to(replace(member, before=member.phase), Phase.SUSPECT, f"silent for {silent_s:.1f} s", now_s)
    return member


def _patience(member: Member, timing: Liveness) -> float:
    # Nobody waits for a worker without a stage, and measuring its link may well delay its words.
    return 1.0 if member.job else timing.idle_patience


@TRANSITIONS.on(Phase.POOL, Phase.ASSIGNED)
def _assign(member: Member, event: AssignedTo, now_s: float, timing: Liveness) -> Member:
    # An assigned one gets the next version of its job's plan; one from the pool may have been silent as the
    # idle are, and is to be heard from now on.
    seen_s = now_s if member.phase is Phase.POOL else member.seen_s
    placed = replace(member, job=event.job, rank=event.rank, seen_s=seen_s)
    what = f"rank {event.rank} of {event.job}" if event.rank != NO_RANK else f"takes part in {event.job}"
    return _to(placed, Phase.ASSIGNED, event.what or what, now_s)


@TRANSITIONS.on(Phase.SUSPECT)
def _renumber(member: Member, event: AssignedTo, now_s: float, timing: Liveness) -> Member:
    # Its job's plan goes on without some of its ranks.
    return replace(member, job=event.job, rank=event.rank)


@TRANSITIONS.on(*Phase)
def _release(member: Member, event: Released, now_s: float, timing: Liveness) -> Member:
    free = replace(member, job="", rank=NO_RANK)
    if member.phase is Phase.SUSPECT:
        before = Phase.POOL if member.before is Phase.ASSIGNED else member.before
        return replace(free, before=before)
    if member.phase is Phase.DRAINING:
        return _to(free, Phase.LEFT, f"left: {member.reason}", now_s)
    if member.phase is Phase.ASSIGNED:
        return _to(free, Phase.POOL, event.reason, now_s)
    return free


@TRANSITIONS.on(*_LIVE - {Phase.DRAINING})
def _drain(member: Member, event: LeavingSaid, now_s: float, timing: Liveness) -> Member:
    reason = event.reason or "asked to leave"
    if member.job:
        return _to(member, Phase.DRAINING, reason, now_s)
    return _to(member, Phase.LEFT, f"left: {reason}", now_s)


@TRANSITIONS.on(*_LIVE)
def _kick(member: Member, event: Kicked, now_s: float, timing: Liveness) -> Member:
    return _to(member, Phase.LEFT, f"kicked: {event.reason}", now_s)


@TRANSITIONS.on(*GONE)
def _nothing(member: Member, event: Tick | ConnectionLost | Kicked, now_s: float, timing: Liveness) -> Member:
    return member
