"""The database behind ``worker.data.consent``: made whole, private, migrated from the JSON file before it.

    STATE/consent/requests.sqlite   one row a job (mode 0600), SQLite, synchronised at every change

A file that is there and cannot be read is an error at every use, so nothing leaves; it is never begun anew.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from atoll.errors import StorageError
from hostos.files.file_locks import lock
from hostos.files.folder_version import raise_version
from hostos.files.locked_json import sound_object
from hostos.files.private_files import private_file, private_folder, sync_folder
from worker.config import FOLDER_VERSION, make_state_dir

FOLDER, FILE, OLDER_FILE = "consent", "requests.sqlite", "requests.json"
SCHEMA_VERSION = 1
WAIT_S = 30.0  # for another process's change
MAX_OLDER_BYTES = 256 << 20  # of the JSON file of versions up to 0.6.0, which had no bound in bytes
NOTHING_LEAVES = "nothing of a federated job leaves this machine meanwhile"

_SCHEMA = """
CREATE TABLE requests (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of asking: a clock may be set back
    job TEXT NOT NULL UNIQUE,
    data TEXT NOT NULL, owner TEXT NOT NULL, graph TEXT NOT NULL, digest TEXT NOT NULL,
    min_clients INTEGER NOT NULL, rounds INTEGER NOT NULL, unclippable TEXT NOT NULL,
    numbers INTEGER NOT NULL, few INTEGER NOT NULL, excess TEXT NOT NULL,
    place TEXT NOT NULL,
    facts TEXT NOT NULL, asked_s REAL NOT NULL,
    decided TEXT, reason TEXT NOT NULL DEFAULT '', decided_s REAL NOT NULL DEFAULT 0,
    word TEXT NOT NULL DEFAULT 'awaited', why TEXT NOT NULL DEFAULT '', over TEXT NOT NULL DEFAULT '',
    updates INTEGER NOT NULL DEFAULT 0, last_update TEXT NOT NULL DEFAULT '',
    evaluations INTEGER NOT NULL DEFAULT 0, sent_bytes INTEGER NOT NULL DEFAULT 0,
    shown TEXT NOT NULL DEFAULT ''
);
CREATE INDEX refused ON requests (decided) WHERE decided = 'refused';
"""

Fill = Callable[[sqlite3.Connection, Any], None]


class ConsentFile:
    """The database of one state folder; commands and the daemon's threads take turns."""

    def __init__(self, state_dir: Path, fill: Fill) -> None:
        """``fill``: puts the contents of the older JSON file into a new database; any of ``KeyError``,
        ``TypeError``, ``ValueError`` from it means that the file is damaged."""
        self._state_dir, self._fill, self._looked_through = state_dir, fill, False
        self.path = state_dir / FOLDER / FILE

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """A connection to read by; None where no job ever asked. StorageError."""
        if not self._there():
            yield None
            return
        with self._changing() as database:
            yield database

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, written to the disk at its end unless the block raises. StorageError."""
        make_state_dir(self._state_dir)
        if not self.path.exists():
            self._make()
        with self._changing() as database:
            yield database

    def _there(self) -> bool:
        """True when a database is there, or the older file, which then becomes one."""
        if self.path.exists():
            return True
        if not self.path.with_name(OLDER_FILE).exists():
            return False
        make_state_dir(self._state_dir)
        self._make()
        return True

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        try:
            if self.path.stat().st_size == 0:
                raise sqlite3.DatabaseError("the file is empty")
            private_file(self.path)
            with closing(_connected(self.path)) as database:
                self._check(database)
                database.execute("BEGIN IMMEDIATE")
                try:
                    yield database
                except BaseException:
                    database.execute("ROLLBACK")
                    raise
                database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise self._refused(error) from None

    def _check(self, database: sqlite3.Connection) -> None:
        version = int(database.execute("PRAGMA user_version").fetchone()[0])
        if version != SCHEMA_VERSION:
            raise StorageError(
                f"{self.path} is of version {version} and this Atoll reads {SCHEMA_VERSION}: update Atoll; "
                f"{NOTHING_LEAVES}"
            )
        if not self._looked_through:  # once a process: a lost row would be a forgotten refusal
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(str(found)[:200])
            self._looked_through = True

    # ---------------------------------------------------------------- a new one

    def _make(self) -> None:
        """Put a database in place, with what the older file holds; whole or not at all."""
        folder = self.path.parent
        private_folder(folder)
        try:
            with (folder / "lock").open("w") as opened:
                lock(opened)
                if not self.path.exists():
                    self._make_alone()
        except (sqlite3.Error, OSError) as error:
            raise self._refused(error) from None

    def _make_alone(self) -> None:
        older, scratch = self.path.with_name(OLDER_FILE), self.path.with_name(f".new.{secrets.token_hex(4)}")
        items = _older(older)
        try:
            private_file(scratch)
            with closing(_connected(scratch)) as database:
                database.executescript(_SCHEMA)
                database.execute("BEGIN")
                try:
                    self._fill(database, items)
                except (KeyError, TypeError, ValueError, AttributeError):
                    raise _damaged(older) from None
                database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                database.execute("COMMIT")
            # From here on an older Atoll leaves the folder alone: it would find no refusals and no counts.
            raise_version(self._state_dir, FOLDER_VERSION)
            os.replace(scratch, self.path)
            sync_folder(self.path.parent)
            older.unlink(missing_ok=True)
        except BaseException:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise

    def _refused(self, error: Exception) -> StorageError:
        if isinstance(error, OSError | sqlite3.OperationalError):
            what = error.strerror if isinstance(error, OSError) else str(error)
            return StorageError(
                f"cannot use {self.path}: {what}; {NOTHING_LEAVES}: free space, or give this user access"
            )
        return _damaged(self.path, " ".join(str(error).split())[:200])


def _connected(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
    database.execute("PRAGMA synchronous = FULL")
    return database


def _older(path: Path) -> dict[str, Any]:
    """The JSON object of an older Atoll; empty where there is none. StorageError for a damaged file."""
    try:
        return sound_object(path, MAX_OLDER_BYTES)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _damaged(path, str(error)[:100]) from None


def _damaged(path: Path, why: str = "") -> StorageError:
    return StorageError(
        f"{path} is damaged{f' ({why})' if why else ''}, so what was refused and what was sent is not "
        f"known: {NOTHING_LEAVES}. Restore it from a backup; or move it away, which forgets every consent, "
        "refusal and count"
    )
