"""Credits: what each worker has given to which owner's jobs on which day, as a fold over committed facts.

A committed step is pending until a checkpoint holds it. Then it is useful, and discarded where the job goes
on from before it, which it may from each checkpoint that is kept, and from the first step. So at each moment

    useful + discarded + pending  =  ranks of all steps that the journal calls committed

and of a job that has finished exactly its steps' ranks are useful. Seconds and bytes are the workers'
reports, bounded where the fact is made. Pure: the ledger holds it, so snapshots and replays agree.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from atoll.messages.from_worker import MAX_WATTS

if TYPE_CHECKING:
    from atoll.plan import Plan

KEPT_DAYS = 400
MAX_TIME_S = 4e9  # of a Unix time that anybody gives
MAX_BYTES = 1 << 50  # that a report of one step may claim


@dataclass(slots=True)
class Work:
    """Sums of work: steps (of federated jobs rounds), samples, milliseconds of computing, bytes, and what of
    its energy was measured, in millijoules."""

    steps: int = 0
    samples: int = 0
    computed_ms: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    energy_mj: int = 0  # 0: not measured

    def shown(self) -> dict[str, int]:
        """Return the sums by name, without what was not measured."""
        return {name: value for name, value in asdict(self).items() if value or name != "energy_mj"}

    def add(self, other: Work) -> None:
        """Add another one's sums."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(slots=True)
class Credit:
    """What one worker gave to one owner's jobs on one day."""

    useful: Work = field(default_factory=Work)
    discarded: Work = field(default_factory=Work)


@dataclass(slots=True)
class Pending:
    """Work of the steps from ``first`` to before ``stop`` of a job that has not ended, by day and worker."""

    first: int
    stop: int
    work: dict[str, Work] = field(default_factory=dict)


@dataclass(slots=True)
class Credits:
    """``settled``: of jobs that have ended, and of what others did in vain, by "DAY WORKER OWNER".
    ``pending``: by job, its committed steps in order, as one between two checkpoints that are kept."""

    settled: dict[str, Credit] = field(default_factory=dict)
    pending: dict[str, list[Pending]] = field(default_factory=dict)
    today: str = ""

    # ------------------------------------------------------------ facts

    def committed(
        self, job: str, plan: Plan, done: range, batch: int, at_s: float, reports: Sequence[tuple[int, ...]]
    ) -> None:
        """Take in the steps that one commit has ``done``, several of a period; ``reports``: milliseconds,
        bytes sent and received, millijoules, each by rank that is present."""
        day, steps = self._day(at_s), max(1, len(done))
        new = Pending(done.start, done.stop)
        for at, rank in enumerate(plan.present):
            place = plan.places[rank]
            first, stop = plan.replicas[place.replica].micros
            work = Work(
                steps,
                steps * (stop - first) * batch,
                *(_at(figures, at) for figures in reports),
            )
            new.work.setdefault(f"{day} {place.worker}", Work()).add(work)
        self.pending.setdefault(job, []).append(new)

    def stored(self, job: str, kept: Collection[int]) -> None:
        """Keep the steps between two of the ``kept`` checkpoints of a job as one: it goes back to none."""
        borders, newest, found = sorted(kept), max(kept), list[Pending]()
        for one in self.pending.get(job, []):
            before = found[-1] if found else None
            if before is None or one.stop > newest or before.stop in borders:
                found.append(one)
                continue
            before.stop = one.stop
            for key, work in one.work.items():
                before.work.setdefault(key, Work()).add(work)
        self.pending[job] = found

    def taken_back(self, job: str, owner: str, step: int) -> None:
        """Discard the steps from ``step`` on, which are done again."""
        kept, gone = _split(self.pending.get(job, []), step)
        self._settle(gone, owner, useful=False)
        self.pending[job] = kept

    def ended(self, job: str, owner: str, step: int) -> None:
        """Settle a job: what its last checkpoint, of ``step``, holds is useful."""
        kept, gone = _split(self.pending.pop(job, []), step)
        self._settle(kept, owner, useful=True)
        self._settle(gone, owner, useful=False)

    def closed(
        self,
        owner: str,
        at_s: float,
        took_s: float,
        participants: Mapping[str, Mapping[str, Any]],
        dropped: Iterable[str],
    ) -> None:
        """Take in a federated round: its state is stored with it. Who was dropped worked for nothing."""
        day = self._day(at_s)
        for worker, showed in participants.items():
            work = Work(
                1,
                _whole(showed.get("n_samples", 0)),
                _whole(1e3 * min(float(showed.get("train_s", 0.0)), took_s)),
                _whole(showed.get("bytes_up", 0)),
                _whole(showed.get("bytes_down", 0)),
                _whole(1e3 * min(float(showed.get("energy_j", 0.0)), MAX_WATTS * took_s)),
            )
            self._credit(f"{day} {worker}", owner).useful.add(work)
        for worker in dropped:
            self._credit(f"{day} {worker}", owner).discarded.add(Work(1))

    # ------------------------------------------------------------ sums

    def copy(self) -> Credits:
        """Return the same sums, which facts to come do not change."""
        settled = {
            key: Credit(replace(credit.useful), replace(credit.discarded))
            for key, credit in self.settled.items()
        }
        pending = {job: [_copied(one) for one in found] for job, found in self.pending.items()}
        return Credits(settled, pending, self.today)

    def _settle(self, found: Iterable[Pending], owner: str, *, useful: bool) -> None:
        for one in found:
            for key, work in one.work.items():
                credit = self._credit(key, owner)
                (credit.useful if useful else credit.discarded).add(work)

    def _credit(self, key: str, owner: str) -> Credit:
        return self.settled.setdefault(f"{key} {owner}", Credit())

    def _day(self, at_s: float) -> str:
        day = day_of(at_s)
        if day > self.today:
            self.today = day
            oldest = day_of(at_s - KEPT_DAYS * 86_400.0)
            self.settled = {key: held for key, held in self.settled.items() if key[:10] >= oldest}
        return day


@dataclass(frozen=True, slots=True)
class Row:
    """Credits of one worker, owner and day; ``pending`` is not in a checkpoint yet."""

    day: str
    worker: str
    owner: str
    useful: Work = field(default_factory=Work)
    discarded: Work = field(default_factory=Work)
    pending: Work = field(default_factory=Work)

    def shown(self) -> dict[str, Any]:
        """Return it as JSON-ready values, without what was not measured."""
        work = {kind: getattr(self, kind).shown() for kind in ("useful", "discarded", "pending")}
        return {"day": self.day, "worker": self.worker, "owner": self.owner} | work


def rows(credits: Credits, jobs: Mapping[str, tuple[str, int]], since: str = "") -> list[Row]:
    """Return what was given from a day on, the newest first; ``jobs``: each one's owner, and the step of its
    newest checkpoint."""
    found: dict[str, Row] = {}

    def row(key: str) -> Row:
        day, worker, owner = key.split(" ", 2)
        return found.setdefault(key, Row(day, worker, owner))

    for key, credit in credits.settled.items():
        row(key).useful.add(credit.useful)
        row(key).discarded.add(credit.discarded)
    for job, pending in credits.pending.items():
        owner, held = jobs[job]
        for one in pending:
            for key, work in one.work.items():
                mine = row(f"{key} {owner}")
                (mine.useful if one.stop <= held else mine.pending).add(work)
    ordered = sorted(found.values(), key=lambda one: (one.day, one.useful.computed_ms), reverse=True)
    return [one for one in ordered if one.day >= since]


def totals(credits: Credits, held: Mapping[str, int]) -> dict[str, Work]:
    """Return the sums of all workers, owners and days; ``held``: by job the step of its newest checkpoint.
    Facts may come meanwhile."""
    found = {kind: Work() for kind in ("useful", "discarded", "pending")}
    for credit in list(credits.settled.values()):
        found["useful"].add(credit.useful)
        found["discarded"].add(credit.discarded)
    for job, pending in list(credits.pending.items()):
        for one in list(pending):
            for work in list(one.work.values()):
                found["useful" if one.stop <= held.get(job, 0) else "pending"].add(work)
    return found


def day_of(at_s: float) -> str:
    """Return the UTC day of a Unix time, as 2026-11-30."""
    return dt.datetime.fromtimestamp(min(max(0.0, at_s), MAX_TIME_S), dt.UTC).date().isoformat()


def _split(found: list[Pending], step: int) -> tuple[list[Pending], list[Pending]]:
    """Return what ends at ``step`` or before, and the rest."""
    return [one for one in found if one.stop <= step], [one for one in found if one.stop > step]


def _copied(one: Pending) -> Pending:
    return Pending(one.first, one.stop, {key: replace(work) for key, work in one.work.items()})


def _at(values: tuple[int, ...], at: int) -> int:
    return values[at] if at < len(values) else 0


def _whole(value: float) -> int:
    return int(min(max(0.0, float(value)), MAX_BYTES))
