"""A start reads the newest snapshot and what follows it; whatever is damaged has a number and a remedy."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.errors import StorageError
from coordinator.messages.facts import (
    CheckpointStored,
    Evaluated,
    JobEnded,
    JobSubmitted,
    Record,
    StepCommitted,
    to_record,
)
from coordinator.services.recovery import Folded, check, recover
from coordinator.storage.journal import Journal, StoredJournal
from protos.telemetry import Event
from tests.sim.scripted import spec

KEEP = 2
TOKEN = {"id": "t-1", "name": "first", "hash": "ab" * 32, "expires_s": 0.0, "max_uses": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal 100%?.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with closing(Journal(path)) as found:
        found.claim(0.0)
        yield found


def submit(journal: Journal, job: str = "j-1") -> None:
    journal.append(
        [
            Record(Event.TOKEN_CREATED, 1.0, TOKEN),
            Record(Event.WORKER_ENROLLED, 2.0, {"worker": f"w-{job}", "name": "w", "token": "t-1"}),
            to_record(JobSubmitted(job, "once", spec(), 0, {}, 0.5), 0.0),
        ]
    )


def steps(journal: Journal, *numbers: int, job: str = "j-1") -> None:
    journal.append([to_record(StepCommitted(job, 1, n, 1 / (n + 3), 0.0), 0.0) for n in numbers])


def fold(journal: Journal) -> Folded:
    """Have a snapshot of all that is there; returns the state in it."""
    state = recover(journal, KEEP)
    journal.fold(state.number, state.encoded(), 0.0)
    return state


def damage(path: Path, change: str, *values: object) -> None:
    with sqlite3.connect(path) as connection:
        assert connection.execute(change, values).rowcount > 0
    connection.close()


def test_the_state_from_a_snapshot_is_that_from_every_record(journal: Journal) -> None:
    submit(journal)
    steps(journal, 0, 1)
    journal.append([to_record(CheckpointStored("j-1", 2, {"w0": "cd" * 32}), 0.0)])
    submit(journal, "j-2")
    journal.append([to_record(JobEnded("j-2", "failed", "NaN"), 0.0)])
    before = recover(journal, KEEP)
    assert fold(journal).records == before.records == 11
    after = recover(journal, KEEP)
    assert (after.ledger, after.register) == (before.ledger, before.register)
    assert (after.number, after.records) == (before.number, 0)
    more = [to_record(Evaluated("j-1", 2, 0.5), 0.0), Record(Event.TOKEN_REVOKED, 0.0, {"id": "t-1"})]
    journal.append(more)
    steps(journal, 2)
    last = recover(journal, KEEP)
    assert last.records == 3
    assert (last.ledger.jobs["j-1"].steps, last.ledger.jobs["j-1"].eval_loss) == (3, 0.5)
    assert last.register.tokens["t-1"].revoked
    assert (last.register.tokens["t-1"].uses, last.ledger.term) == (1, 1)


def test_two_snapshots_are_kept_and_the_records_since_the_older(journal: Journal) -> None:
    submit(journal)
    for step in range(5):
        steps(journal, step)
        fold(journal)
    assert [s.number for s in journal.snapshots()] == [9, 8]
    assert [r.number for r in journal.replay()] == [9]
    steps(journal, 5)
    assert recover(journal, KEEP).ledger.jobs["j-1"].steps == 6
    assert journal.last_number() == 10


def test_a_copy_does_not_change_with_what_follows(journal: Journal) -> None:
    submit(journal)
    state = recover(journal, KEEP)
    text = state.copy()
    before = text.encoded()
    steps(journal, 0)
    journal.append(
        [to_record(Evaluated("j-1", 1, 0.5), 0.0), Record(Event.TOKEN_REVOKED, 0.0, {"id": "t-1"})]
    )
    for record in journal.replay(state.number):
        state.apply(record)
    assert text.encoded() == before != state.encoded()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("UPDATE events SET payload = substr(payload, 1, 20) WHERE number = 6", "its checksum does not fit"),
        ("UPDATE events SET payload = replace(payload, '0.25', '0.26') WHERE number = 6", "its checksum"),
        ("UPDATE events SET kind = 'Evaluated' WHERE number = 6", "its checksum does not fit"),
        ("UPDATE events SET payload = 'null', crc = NULL WHERE number = 6", "damaged StepCommitted event"),
        ("UPDATE events SET payload = '{\"job\":', crc = NULL WHERE number = 6", "Expecting value"),
        ('UPDATE events SET payload = \'{"job":"j-1"}\', crc = NULL WHERE number = 6', "StepCommitted event"),
        ("UPDATE events SET payload = replace(payload, 'j-1', 'j-9'), crc = NULL WHERE number = 6", "'j-9'"),
    ],
)
def test_a_damaged_record_is_named_with_its_number_and_what_to_do(
    journal: Journal, path: Path, change: str, why: str
) -> None:
    submit(journal)
    steps(journal, 0, 1, 2)
    damage(path, change)
    with pytest.raises(StorageError, match=rf"record 6 of the journal.*{why}.*`atoll journal cut 6`"):
        recover(journal, KEEP)
    with closing(StoredJournal(path)) as stored:
        report = check(stored)
    assert "record 6" in report.fold
    assert [number for number, _, _ in report.damaged] in ([6], [])  # which job there is only the fold knows
    assert journal.cut(6) == 2
    assert recover(journal, KEEP).ledger.jobs["j-1"].steps == 1


def test_what_follows_a_cut_of_every_record_after_a_snapshot_is_known_at_the_start_after(
    journal: Journal, path: Path
) -> None:
    submit(journal)
    steps(journal, 0)
    fold(journal)
    steps(journal, 1, 2, 3, 4, 5)
    fold(journal)
    assert [s.number for s in journal.snapshots()] == [10, 5]
    assert journal.cut(6) == 5
    assert journal.last_number() == 0
    journal.close()
    known = {"t-1"}
    for term in (2, 3):
        with closing(Journal(path)) as again:
            assert again.claim(0.0) == term
            again.append([Record(Event.TOKEN_CREATED, 1.0, TOKEN | {"id": f"t-{term}"})])
            known.add(f"t-{term}")
            state = recover(again, KEEP)
            assert (state.ledger.term, set(state.register.tokens)) == (term, known)
    with closing(StoredJournal(path)) as stored:
        assert [row[0] for row in stored.rows()] == [6, 7, 8, 9]


def test_a_damaged_record_that_a_snapshot_covers_keeps_nobody_out(journal: Journal, path: Path) -> None:
    submit(journal)
    steps(journal, 0, 1, 2)
    state = fold(journal)
    damage(path, "UPDATE events SET payload = 'x' WHERE number = 6")
    assert recover(journal, KEEP).ledger == state.ledger
    with closing(StoredJournal(path)) as stored:
        report = check(stored)
    assert (report.fold, report.damaged_records, report.jobs, report.term) == ("", 1, 1, 1)
    assert report.damaged == ((6, "StepCommitted", "its checksum does not fit"),)
    assert report.snapshots == ((7, True),)


def test_of_a_damaged_snapshot_the_one_before_it_counts(journal: Journal, path: Path) -> None:
    submit(journal)
    steps(journal, 0)
    fold(journal)
    steps(journal, 1)
    state = fold(journal)
    steps(journal, 2)
    damage(path, "UPDATE snapshots SET payload = replace(payload, 'first', 'worst') WHERE number = 6")
    found = recover(journal, KEEP)
    assert (found.records, found.ledger.jobs["j-1"].steps) == (2, 3)
    assert found.register == state.register
    damage(path, "UPDATE snapshots SET payload = ''")
    with pytest.raises(StorageError, match=r"all snapshots of the journal are damaged.*begin with number 6"):
        recover(journal, KEEP)


def test_without_any_snapshot_a_journal_of_before_is_read_whole(journal: Journal, path: Path) -> None:
    submit(journal)
    damage(path, "UPDATE events SET crc = NULL")
    assert recover(journal, KEEP).records == 4


def test_a_report_changes_nothing_and_reads_a_journal_in_use(journal: Journal, path: Path) -> None:
    submit(journal)
    steps(journal, 0)
    with closing(StoredJournal(path)) as stored:
        report = check(stored)
        with pytest.raises(sa.exc.OperationalError, match="readonly"):
            stored._connection.exec_driver_sql("DELETE FROM events")
    assert (report.records, report.first, report.last) == (5, 1, 5)
    assert [kind for kind, _ in report.kinds][:2] == ["CoordinatorStarted", "JobSubmitted"]
    steps(journal, 1)
    assert recover(journal, KEEP).ledger.jobs["j-1"].steps == 2
