"""Effects: all that handling one event may cause, for the scheduler and every kind of job alike.

Instructions leave in the order in which they were given; a fact is applied to the ledger and
journalled at once, a membership event to the roster. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from coordinator.membership import member as members
from coordinator.membership.member import Member
from coordinator.membership.roster import Roster
from coordinator.messages import instructions as do
from coordinator.messages.facts import Fact, Ledger
from coordinator.messages.jobs import JobState
from coordinator.sharing.claims import Quota, Waiting
from protos.telemetry import Event as Name


@dataclass(slots=True)
class Effects:
    """``lost(job, worker, reason)`` is called when a job loses a worker; ``jobs`` are all jobs as users see
    them, whatever their kind; ``advance``: something changed that may let a job begin or go on."""

    ledger: Ledger
    roster: Roster
    lost: Callable[[str, str, str], None]
    now_s: float
    out: list[do.Instruction] = field(default_factory=list)
    jobs: dict[str, JobState] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    advance: bool = True
    storage: str = ""  # why nothing can be stored now
    quotas: dict[str, Quota] = field(default_factory=dict)  # of owners
    waits: Mapping[str, Waiting] = field(default_factory=dict)  # of jobs that are to have workers

    # ------------------------------------------------------------ output

    def emit(self, instruction: do.Instruction) -> None:
        """Have the shell do something."""
        self.out.append(instruction)

    def send(self, worker: str, message: do.Message) -> None:
        """Send a message to a worker; nothing where it is not connected."""
        known = self.roster.workers.get(worker)
        if known is not None and known.session is not None:
            self.emit(do.SendTo(worker, message))

    def record(self, fact: Fact) -> None:
        """Apply a fact, and make it durable before whatever follows."""
        self.ledger.apply(fact)
        self.emit(do.Journal(fact))
        line = do.line_of(fact)
        if line is not None:
            self.emit(line)

    def log(self, event: Name, level: str = "info", job: str = "", **fields: Any) -> None:
        """Write one line for people."""
        self.emit(do.Log(event.value, level, job, fields))

    def drop(self, kind: str, why: str, job: str = "") -> None:
        """Count a message that came late, twice or from nobody who was asked."""
        self.dropped[kind] = self.dropped.get(kind, 0) + 1
        self.log(Name.MESSAGE_DROPPED, "debug", job=job, kind=kind, why=why)

    def show(self, state: JobState) -> None:
        """Tell those who watch a job that it changed."""
        self.jobs[state.job] = state
        self.emit(do.Notify(state.job))

    # ------------------------------------------------------------ workers

    def label(self, worker: str) -> str:
        """Return a worker's name and id for people."""
        return self.roster.label(worker)

    def move(self, worker: str, event: members.Event) -> None:
        """Apply a membership event; a job that loses its worker by it hears so."""
        before, after, refused = self.roster.move(worker, event, self.now_s)
        if refused is not None:
            self.drop(type(event).__name__, refused)
        self.moved(worker, before, after)

    def moved(self, worker: str, before: Member, after: Member) -> None:
        """Carry out what follows from a change of a worker's membership."""
        restarted = before.incarnation != after.incarnation
        if before.phase is after.phase and not restarted:
            return
        self.advance = True
        level = "warning" if after.phase in (members.Phase.SUSPECT, members.Phase.DEAD) else "info"
        self.log(Name.WORKER_STATE, level, worker=worker, state=after.phase, reason=after.reason)
        self.report_member(after, restarted=restarted)
        if restarted or after.gone:
            self.roster.links.forget(worker)
            self.roster.joined.ways.forget(worker)
            self.roster.ops.forget(worker)
            if before.job:
                self.lost(before.job, worker, f"{self.label(worker)} is lost: {after.reason}")
        known = self.roster.workers[worker]
        if after.gone and known.session is not None:
            self.emit(do.CloseSession(worker, known.session, after.reason))
            self.roster.disconnected(worker)

    def report_member(self, member: Member, *, restarted: bool = False) -> None:
        """Report where a worker stands to those who lend it to apps."""
        self.emit(do.MemberMoved(member.worker, member.phase, member.job, restarted, member.reason))

    def quarantine(self, worker: str, reason: str, seconds: float = inf) -> None:
        """Keep a worker out of every plan for so long, or until its process starts anew; its job goes on
        without it."""
        known = self.roster.workers[worker]
        self.roster.quarantine(worker, reason, self.now_s + seconds)
        self.log(Name.WORKER_QUARANTINED, "warning", worker=worker, reason=reason)
        self.advance = True
        if known.member.job:
            self.lost(known.member.job, worker, f"{self.label(worker)} was quarantined: {reason}")
