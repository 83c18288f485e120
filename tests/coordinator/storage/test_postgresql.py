"""One coordinator commands on a PostgreSQL database: its session's lock keeps others out, its term fences it.

Skipped where Debian's PostgreSQL or the driver (``pip install 'atoll[postgresql]'``) is missing.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.errors import UsageError
from coordinator.messages.facts import Record
from coordinator.storage.journal import Fenced, Journal, StoredJournal

pytest.importorskip("psycopg", reason="the driver of PostgreSQL is missing: pip install 'atoll[postgresql]'")
BINARIES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
if BINARIES is None or not (BINARIES / "initdb").exists():
    pytest.skip("Debian's PostgreSQL is missing: apt install postgresql", allow_module_level=True)

USER = "postgres"


def _run(*command: str) -> None:
    # PostgreSQL does not run as root.
    user = USER if os.geteuid() == 0 else None
    subprocess.run(command, check=True, user=user, stdout=subprocess.DEVNULL, cwd="/")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a database of its own, gone with the module."""
    assert BINARIES is not None
    with tempfile.TemporaryDirectory(prefix="atoll-pg-") as name, socket.socket() as free:
        if os.geteuid() == 0:
            shutil.chown(name, USER)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        data, log = f"{name}/data", f"{name}/log"
        owner = USER if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        _run(str(BINARIES / "initdb"), "-D", data, "-A", "trust", "-U", owner, "--no-sync")
        options = f"-p {port} -k {name} -c listen_addresses=127.0.0.1"
        _run(str(BINARIES / "pg_ctl"), "-D", data, "-o", options, "-l", log, "-w", "start")
        try:
            yield f"postgresql://{owner}@127.0.0.1:{port}/postgres"
        finally:
            _run(str(BINARIES / "pg_ctl"), "-D", data, "-m", "immediate", "-w", "stop")


@pytest.fixture
def url(server: str) -> str:
    """The same database with nothing in it."""
    engine = sa.create_engine(server.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()
    return server


def end_sessions(url: str) -> None:
    """Break every session with the database but this one, as when its machine restarts."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        )
    engine.dispose()


def test_what_was_appended_is_replayed_and_each_claim_is_a_new_term(url: str) -> None:
    written = [Record("kept", float(n), {"n": n, "loss": 1 / 3}) for n in range(5)]
    for term in (1, 2):
        journal = Journal(url)
        assert journal.claim(0.0) == term
        journal.check()
        journal.append(written)
        journal.close()
    again = Journal(url)
    kinds = [record for record in again.replay() if record.kind == "kept"]
    assert kinds == written * 2
    again.close()


def test_a_snapshot_takes_the_place_of_older_records(url: str) -> None:
    journal = Journal(url)
    journal.claim(0.0)
    for n in range(3):
        journal.append([Record("kept", float(n), {"n": n})])
        journal.fold(journal.last_number(), f"state {n}", 0.0)
    journal.close()
    stored = StoredJournal(url)
    assert [(s.number, s.payload) for s in stored.snapshots()] == [(4, "state 2"), (3, "state 1")]
    assert [record.payload for record in stored.replay()] == [{"n": 2}]
    stored.close()


def test_a_second_coordinator_is_refused_while_the_first_ones_session_lives(url: str) -> None:
    first, second = Journal(url), Journal(url)
    first.claim(0.0)
    with pytest.raises(UsageError, match=r"another coordinator commands on postgresql.*advisory lock"):
        second.claim(0.0)
    second.close()
    first.append([Record("kept", 0.0, {})])
    first.close()
    third = Journal(url)
    assert third.claim(0.0) == 2
    third.close()


def test_a_coordinator_whose_session_broke_is_fenced_off_and_writes_nothing_more(url: str) -> None:
    first = Journal(url)
    first.claim(0.0)
    end_sessions(url)
    with pytest.raises(Fenced, match="the session with its database is over"):
        first.check()
    assert first.fenced
    second = Journal(url)
    assert second.claim(0.0) == 2
    # Its appending connection is made again by itself: the term is what keeps it out.
    first._connection.invalidate()
    with pytest.raises(Fenced, match="another one claimed it after term 1"):
        first.append([Record("lost", 0.0, {}), Record("lost", 0.0, {})])
    second.append([Record("kept", 0.0, {})])
    assert [record.kind for record in second.replay()] == ["CoordinatorStarted"] * 2 + ["kept"]
    for journal in (first, second):
        journal.close()
