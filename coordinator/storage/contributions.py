"""What each worker has given on each day: added up as steps are committed, in the journal's database.

By day (UTC) and worker only, for 400 days. Every ten seconds the sums since are added in one transaction, and
when the coordinator ends: a kill loses ten seconds of these figures, and nothing of what was trained.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import StorageError
from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundClosed, StepCommitted
from coordinator.pipeline.periods import steps_reported
from protos.devices import machine_of

if TYPE_CHECKING:
    from coordinator.messages.facts import Fact
    from coordinator.messages.jobs import JobState
    from coordinator.storage.journal import Journal

WRITTEN_EVERY_S = 10.0
KEPT_DAYS = 400
MAX_ROWS = 200_000  # of one answer; the newest days
MAX_STEP_BYTES = 1 << 50  # that a worker's report of one step may claim

MAX_TIME_S = 4e9  # of a Unix time that anybody gives

log = structlog.get_logger()


@dataclass(slots=True)
class Given:
    """Sums of one worker and day."""

    steps: int = 0  # or rounds, of a federated job
    samples: int = 0
    compute_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    discarded_steps: int = 0  # computed, and not committed

    def add(self, other: Given) -> None:
        """Add another one's sums."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def values(self) -> dict[str, Any]:
        """Return the sums by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


class Contributions:
    """Sums that are not in the database yet, and those that are."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pending: dict[tuple[str, str], Given] = defaultdict(Given)
        self._due_s = 0.0
        self._dropped_before = ""

    def take(
        self,
        facts: Iterable[Fact],
        said: Iterable[do.Instruction],
        jobs: Mapping[str, JobState],
        now_s: float,
    ) -> None:
        """Count what a batch of facts and instructions has committed and discarded."""
        day = day_of(now_s)
        for fact in facts:
            if isinstance(fact, StepCommitted) and (state := jobs.get(fact.job)) is not None:
                given = of_step(state)
            elif isinstance(fact, RoundClosed):
                given = of_round(fact)
            else:
                continue
            for worker, sums in given:
                self._pending[day, worker].add(sums)
        for instruction in said:
            if isinstance(instruction, do.SendTo) and isinstance(instruction.message, do.StepDiscard):
                self._pending[day, instruction.worker].discarded_steps += 1

    def write(self, now_s: float, *, at_once: bool = False) -> None:
        """Add the sums to the database when they are due. A disk that refuses is tried again later."""
        if not self._pending or not (at_once or now_s >= self._due_s):
            return
        self._due_s = now_s + WRITTEN_EVERY_S
        oldest = day_of(now_s - KEPT_DAYS * 86400.0)
        rows = [
            {"day": day, "worker": worker, **sums.values()} for (day, worker), sums in self._pending.items()
        ]
        try:
            self._journal.add_given(rows, oldest if oldest != self._dropped_before else "")
        except StorageError as error:
            log.warning("contributions.not_written", error=str(error), rows=len(rows))
            return
        self._dropped_before = oldest
        self._pending.clear()

    def since(self, at_s: float, machine: str = "") -> list[dict[str, Any]]:
        """Return rows of days from the one of ``at_s`` on, the newest first, those not yet written too.
        ``machine``: only those of its devices."""
        first = day_of(at_s)
        found: dict[tuple[str, str], Given] = {}
        for row in self._journal.given_since(first, MAX_ROWS, machine):
            key = row.pop("day"), row.pop("worker")
            found[key] = Given(**row)
        for key, sums in self._pending.items():
            if key[0] >= first and (not machine or machine_of(key[1]) == machine):
                found.setdefault(key, Given()).add(sums)
        ordered = sorted(found.items(), key=lambda item: (item[0][0], item[1].compute_s), reverse=True)
        return [{"day": day, "worker": worker, **sums.values()} for (day, worker), sums in ordered[:MAX_ROWS]]


def day_of(at_s: float) -> str:
    """Return the UTC day of a Unix time, as 2026-11-30."""
    return dt.datetime.fromtimestamp(min(max(0.0, at_s), MAX_TIME_S), dt.UTC).date().isoformat()


def of_step(state: JobState) -> Iterator[tuple[str, Given]]:
    """Yield what the workers of a job have given in the step, or the period, of its newest reports.

    Reports are the workers' own: no more seconds count than the step took.
    """
    plan = state.plan
    if plan is None:
        return
    steps, places = steps_reported(state), plan.places
    step_s = state.run.step_times_s[-1] if state.run.step_times_s else float("inf")
    for rank, report in state.run.reports.items():
        first, stop = plan.replicas[places[rank].replica].micros
        sent = [(link.peer, min(MAX_STEP_BYTES, max(0, link.n_bytes))) for link in report.links]
        yield (
            places[rank].worker,
            Given(
                steps=steps,
                samples=steps * (stop - first) * state.spec.data.batch,
                compute_s=min(max(0.0, report.computed_s), steps * step_s),
                bytes_out=sum(size for _, size in sent),
            ),
        )
        yield from ((peer, Given(bytes_in=size)) for peer, size in sent)


def of_round(fact: RoundClosed) -> Iterator[tuple[str, Given]]:
    """Yield what the clients of a federated round have given; whoever was dropped computed for nothing."""
    for worker, showed in fact.participants.items():
        yield (
            worker,
            Given(
                steps=1,
                samples=int(showed.get("n_samples", 0)),
                compute_s=min(max(0.0, float(showed.get("train_s", 0.0))), fact.took_s),
                bytes_in=int(showed.get("bytes_down", 0)),
                bytes_out=int(showed.get("bytes_up", 0)),
            ),
        )
    yield from ((worker, Given(discarded_steps=1)) for worker in fact.dropped)
