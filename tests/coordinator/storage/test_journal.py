"""The journal: what was appended is replayed, in order, after any end."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import StorageError, UsageError
from coordinator.messages.facts import Record
from coordinator.storage.journal import Fenced, Journal


def test_records_are_replayed_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    written = [Record("step.committed", float(n), {"job": "j1", "step": n, "loss": 1 / 3}) for n in range(50)]
    journal.append(written[:20])
    journal.append(written[20:])
    journal.close()
    again = Journal(tmp_path / "journal.sqlite")
    assert list(again.replay()) == written
    again.close()


def test_a_record_survives_a_killed_process(tmp_path: Path) -> None:
    script = (
        "import os, sys, signal; from pathlib import Path;"
        "from coordinator.messages.facts import Record; from coordinator.storage.journal import Journal;"
        "j = Journal(Path(sys.argv[1])); j.append([Record('kept', 1.0, {'n': 7})]);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "j.sqlite")], cwd=root, check=False)
    journal = Journal(tmp_path / "j.sqlite")
    assert [r.payload for r in journal.replay()] == [{"n": 7}]
    journal.close()


def test_each_claim_is_a_new_term_and_is_in_the_journal(tmp_path: Path) -> None:
    for term in (1, 2, 3):
        journal = Journal(tmp_path / "j.sqlite")
        assert journal.claim(float(term)) == term
        journal.append([Record("kept", 0.0, {}), Record("kept", 0.0, {})])
        journal.close()
    again = Journal(tmp_path / "j.sqlite")
    started = [(r.payload["term"], r.at_s) for r in again.replay() if r.kind == "CoordinatorStarted"]
    assert started == [(1, 1.0), (2, 2.0), (3, 3.0)]
    again.close()


def test_a_journal_in_a_file_has_one_coordinator(tmp_path: Path) -> None:
    """Two state folders may name one file with --database."""
    first, second = Journal(tmp_path / "j.sqlite"), Journal(tmp_path / "j.sqlite")
    first.claim(0.0)
    with pytest.raises(UsageError, match=r"process \d+\) commands on the journal .*j.sqlite; stop it"):
        second.claim(0.0)
    first.check()
    first.append([Record("kept", 0.0, {})])
    first.close()
    assert second.claim(0.0) == 2
    second.close()


def claimed_elsewhere(path: Path) -> None:
    """What a coordinator does whose file system's locks do not reach the first one's machine."""
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE command SET term = term + 1")
    connection.close()


def test_whoever_claimed_the_journal_before_writes_nothing_more(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    journal.claim(0.0)
    journal.append([Record("kept", 0.0, {})])
    claimed_elsewhere(tmp_path / "j.sqlite")
    for attempt in (journal.check, lambda: journal.append([Record("lost", 0.0, {})]), journal.check):
        with pytest.raises(Fenced, match=r"does not command its journal any more: .*claimed"):
            attempt()
    assert "it ends" in journal.fenced
    assert [r.kind for r in journal.replay()] == ["CoordinatorStarted", "kept"]
    journal.close()


def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    too_large = Record("big", 0.0, {"x": "y" * (65 << 20)})
    with pytest.raises(StorageError, match="exceeds"):
        journal.append([Record("small", 0.0, {}), too_large])
    assert list(journal.replay()) == []
    journal.close()


def test_a_disk_that_refuses_is_a_storage_error_and_the_journal_goes_on_later(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    journal.append([Record("first", 0.0, {})])
    journal._connection.exec_driver_sql("PRAGMA max_page_count=8")
    journal._connection.commit()
    with pytest.raises(StorageError, match="full"):
        journal.append([Record("small", 0.0, {}), Record("large", 0.0, {"x": "y" * 200_000})])
    journal._connection.exec_driver_sql("PRAGMA max_page_count=100000")
    journal._connection.commit()
    journal.append([Record("second", 0.0, {})])
    assert [r.kind for r in journal.replay()] == ["first", "second"]
    journal.close()


def test_a_connection_that_broke_is_made_again_and_nothing_is_written_twice(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    journal.append([Record("first", 0.0, {})])
    journal._connection.connection.dbapi_connection.close()
    with pytest.raises(StorageError, match="refuses 1 events"):
        journal.append([Record("lost", 0.0, {})])
    journal.append([Record("second", 0.0, {})])
    synchronous = journal._connection.exec_driver_sql("PRAGMA synchronous").scalar_one()
    assert synchronous == 2  # full, as before
    assert [r.kind for r in journal.replay()] == ["first", "second"]
    journal.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot open the journal"):
        Journal(tmp_path / "missing" / "j.sqlite")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense://host/atoll", "no installed package knows databases of nonsense://host/atoll"),
        ("://atoll", "not a database URL"),
        ("postgresql://host:port/atoll", "not a database URL"),
        ("sqlite://host/atoll", "cannot be used: Invalid SQLite URL"),
    ],
)
def test_a_url_that_is_none_is_refused_with_one_that_would_do(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"{says}.*postgresql://USER@HOST/NAME"):
        Journal(url)


@pytest.mark.parametrize(
    ("url", "module", "says"),
    [
        ("postgresql://atoll:s3cret@host/atoll", "psycopg", r"pip install 'atoll\[postgresql\]'"),
        ("mysql+pymysql://atoll:s3cret@host/atoll", "pymysql", "install the package that has it"),
    ],
)
def test_a_database_without_its_driver_says_what_to_install_and_no_secret(
    url: str, module: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"needs the Python module {module}, .*{says}") as caught:
        Journal(url)
    assert "s3cret" not in str(caught.value)
