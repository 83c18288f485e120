"""What a journal folds to: jobs and who may enter, from its newest snapshot and the records after it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError, StorageError
from coordinator.messages.encoding import from_json, to_json
from coordinator.messages.facts import CoordinatorStarted, Ledger, Record, from_record
from coordinator.services.access.register import Register
from coordinator.storage.journal import damaged, read

if TYPE_CHECKING:
    from coordinator.storage.journal import Snapshot, StoredJournal

SNAPSHOT_EVERY = 10_000  # records: read and folded in a fraction of a second
MOST_NAMED = 20  # damaged records of one report
WRONG = (AtollError, KeyError, TypeError, ValueError, AttributeError)  # what content that is not ours raises


@dataclass(slots=True)
class Folded:
    """State of a coordinator after the record ``number``; ``records`` of them were read for it."""

    ledger: Ledger
    register: Register = field(default_factory=Register)
    number: int = 0
    records: int = 0

    def apply(self, record: Record) -> None:
        """Take in one record; StorageError names it when it cannot be."""
        try:
            self.register.apply(record)
            fact = from_record(record)
            if fact is not None:
                self.ledger.apply(fact)
        except WRONG as error:
            raise damaged(record.number, record.kind, _words(error)) from error
        self.number = record.number
        self.records += 1

    def copy(self) -> Folded:
        """Return the same state, which records to come do not change."""
        register = Register(dict(self.register.tokens), dict(self.register.workers))
        return Folded(self.ledger.copy(), register, self.number, self.records)

    def encoded(self) -> str:
        """Return the snapshot's text."""
        state = {"ledger": to_json(self.ledger), "register": to_json(self.register)}
        return json.dumps(state, separators=(",", ":"))


def recover(journal: StoredJournal, keep: int) -> Folded:
    """Fold a journal: the newest snapshot that is whole, then every record after it.

    ``keep``: checkpoints of one job. StorageError names a record that is damaged, or a journal whose older
    records are gone and whose snapshots are all damaged.
    """
    snapshots = journal.snapshots()
    whole = next((s for s in snapshots if s.payload is not None), None)
    if whole is None and snapshots:
        oldest = next((row[0] for row in journal.rows()), 1)
        if oldest > 1:
            raise StorageError(
                f"all snapshots of the journal are damaged, and its records begin with number {oldest}: "
                "restore it from a backup"
            )
    folded = Folded(Ledger(keep)) if whole is None else opened(whole, keep)
    for record in journal.replay(folded.number):
        folded.apply(record)
    return folded


def opened(snapshot: Snapshot, keep: int) -> Folded:
    """Return the state that a whole snapshot holds."""
    try:
        state: dict[str, Any] = json.loads(snapshot.payload or "")
        ledger, register = from_json(Ledger, state["ledger"]), from_json(Register, state["register"])
    except WRONG as error:
        raise StorageError(
            f"the journal's snapshot of record {snapshot.number} cannot be read: {_words(error)}; update "
            "Atoll, or restore the journal from a backup"
        ) from error
    ledger.keep = keep
    return Folded(ledger, register, snapshot.number)


@dataclass(frozen=True, slots=True)
class Report:
    """What a journal holds, and what of it is damaged. ``fold``: why a coordinator could not start, or ""."""

    records: int
    first: int  # number of the oldest record that is kept; 0 without any
    last: int
    term: int  # of the coordinator that started last
    jobs: int
    snapshots: tuple[tuple[int, bool], ...]  # number of its last record and whether it is whole, newest first
    damaged: tuple[tuple[int, str, str], ...]  # number, kind, why
    damaged_records: int
    kinds: tuple[tuple[str, int], ...]
    fold: str


def check(journal: StoredJournal, keep: int = 2) -> Report:
    """Read every record and snapshot, and fold them as a start would."""
    kinds: Counter[str] = Counter()
    numbers: list[int] = []
    wrong: list[tuple[int, str, str]] = []
    term = 0
    for row in journal.rows():
        number, kind = int(row[0]), str(row[2])
        numbers = [numbers[0] if numbers else number, number]
        kinds[kind] += 1
        try:
            fact = from_record(read(row))
        except AtollError as error:
            wrong.append((number, kind, _words(error.__cause__ or error)))
            continue
        if isinstance(fact, CoordinatorStarted):
            term = fact.term
    fold, jobs = "", 0
    try:
        folded = recover(journal, keep)
        jobs, term = len(folded.ledger.jobs), folded.ledger.term
    except StorageError as error:
        fold = str(error)
    return Report(
        records=kinds.total(),
        first=numbers[0] if numbers else 0,
        last=numbers[-1] if numbers else 0,
        term=term,
        jobs=jobs,
        snapshots=tuple((s.number, s.payload is not None) for s in journal.snapshots()),
        damaged=tuple(wrong[:MOST_NAMED]),
        damaged_records=len(wrong),
        kinds=tuple(sorted(kinds.items())),
        fold=fold,
    )


def _words(error: BaseException) -> str:
    return f"it names {error}, which no record made" if isinstance(error, KeyError) else str(error)
