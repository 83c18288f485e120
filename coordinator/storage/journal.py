"""Events to disk, in order; the coordinator's state is a fold over them.

One table in SQLite by default (the file is the deployment) or any database that SQLAlchemy
knows by URL. A record is on the disk before anybody acts on it: ``append`` returns after the
commit, with SQLite on write-ahead log and full synchronisation. Of all coordinators that ever opened it
one commands: the last that claimed it. Each claim is a new term, and every append checks that its own is
still the newest, so whoever was taken for dead and goes on writes nothing.

Now and then the fold of all records so far is kept as a snapshot, so that a start reads the newest snapshot
and what follows it. The two newest are kept, and the records since the older one. Records and snapshots
carry checksums; one that does not fit is named by its number.
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import sqlalchemy as sa

from atoll.errors import AtollError, StorageError, UsageError
from coordinator.messages.facts import CoordinatorStarted, Record, to_record
from hostos.files.folder_lock import FolderLock, Holder
from hostos.files.private_files import private_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_RECORD_BYTES = 64 << 20
SNAPSHOTS = 2  # kept

_EXAMPLES = "for example postgresql://USER@HOST/NAME or sqlite:////var/lib/atoll/journal.sqlite"

_METADATA = sa.MetaData()
_EVENTS = sa.Table(
    "events",
    _METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at_s", sa.Float, nullable=False),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("payload", sa.Text, nullable=False),
    sa.Column("crc", sa.BigInteger),  # of kind and payload; none in records of folders before version 3
)
_SNAPSHOTS = sa.Table(
    "snapshots",
    _METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),  # of the last record in it
    sa.Column("at_s", sa.Float, nullable=False),
    sa.Column("payload", sa.Text, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),  # SHA-256 of the payload
)
_COMMAND = sa.Table(
    "command",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("term", sa.Integer, nullable=False),
)
_COLUMNS = (
    _EVENTS.c.at_s,
    _EVENTS.c.kind,
    _EVENTS.c.payload,
    _EVENTS.c.crc,
)  # the database counts the numbers
_TERM = sa.select(_COMMAND.c.term)
_LAST = sa.select(sa.func.max(_EVENTS.c.number))
# One statement, as each costs 0.06 ms. A claim waits for its transaction: SQLite has one writer at a time,
# elsewhere the term's row is held.
_INSERT = (
    _EVENTS.insert()
    .from_select(
        [column.name for column in _COLUMNS],
        sa.select(*(sa.bindparam(column.name, type_=column.type) for column in _COLUMNS))
        .where(_COMMAND.c.term == sa.bindparam("mine"))
        .with_for_update(read=True),
    )
    .execution_options(preserve_rowcount=True)
)
_ADVISORY = 0x41_54_4F_4C  # with the schema's hash: the lock of one journal in one database


class Fenced(StorageError):
    """Another coordinator commands, or may by now: this one writes nothing any more and has to end."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fold of all records up to ``number``; ``payload`` None when it is damaged."""

    number: int
    at_s: float
    payload: str | None


class StoredJournal:
    """A journal's records and snapshots, only read.

    UsageError for a URL that cannot be used as given, StorageError when the database refuses.
    """

    def __init__(self, where: Path | str) -> None:
        url = _url(where)
        try:
            self._engine = sa.create_engine(self._opened(url))
            self._prepare()
            # One connection for the process's life: a step's commit must not pay for a pool's 0.1 ms.
            self._connection = self._engine.connect()
        except (sa.exc.SQLAlchemyError, ImportError, TypeError, ValueError) as error:
            raise _not_opened(url, error) from error
        file = self._engine.dialect.name == "sqlite"
        self._remedy = "free some disk space" if file else "see that its database answers and has space"

    def _opened(self, url: sa.URL) -> sa.URL:
        """Return the URL that only reads."""
        name = url.database or ""
        if url.get_backend_name() != "sqlite" or not _is_file(name):
            return url
        query = {"mode": "ro", "uri": "true"}
        return sa.URL.create(url.drivername, database=f"file:{quote(name)}", query=query)

    def _prepare(self) -> None:
        """Find out which tables and columns there are: a folder's version may be older than this Atoll."""
        with self._engine.connect() as connection:
            found = sa.inspect(connection)
            self._has_crc = any(column["name"] == "crc" for column in found.get_columns(_EVENTS.name))
            self._has_snapshots = found.has_table(_SNAPSHOTS.name)

    def replay(self, after: int = 0) -> Iterator[Record]:
        """Yield every record above a number, oldest first; StorageError names one that is damaged."""
        return map(read, self.rows(after))

    def rows(self, after: int = 0) -> Iterator[Any]:
        """Yield the same as rows of (number, at_s, kind, payload, crc), whatever their content."""
        crc = _EVENTS.c.crc if self._has_crc else sa.null().label("crc")
        columns = sa.select(_EVENTS.c.number, _EVENTS.c.at_s, _EVENTS.c.kind, _EVENTS.c.payload, crc)
        try:
            with self._engine.connect() as connection:
                yield from connection.execution_options(yield_per=1000).execute(
                    columns.where(_EVENTS.c.number > after).order_by(_EVENTS.c.number)
                )
        except sa.exc.SQLAlchemyError as error:
            raise StorageError(
                f"the journal cannot be read: {_cause(error)}; restore it from a backup"
            ) from error

    def snapshots(self) -> list[Snapshot]:
        """Return what is kept, the newest first."""
        if not self._has_snapshots:
            return []
        query = _SNAPSHOTS.select().order_by(_SNAPSHOTS.c.number.desc())
        with self._engine.connect() as connection:
            return [
                Snapshot(row.number, row.at_s, row.payload if _digest(row.payload) == row.digest else None)
                for row in connection.execute(query)
            ]

    def close(self) -> None:
        """Close the database."""
        self._connection.close()
        self._engine.dispose()


def read(row: Any) -> Record:
    """Return the record of a row; StorageError with its number when it is damaged."""
    number, at_s, kind, payload, crc = row
    try:
        if crc is not None and crc != _crc(kind, payload):
            raise ValueError("its checksum does not fit")
        return Record(kind, at_s, json.loads(payload), number)
    except (TypeError, ValueError) as error:
        raise damaged(number, kind, error) from error


def damaged(number: int, kind: str, why: object) -> StorageError:
    """Return the error of a record that cannot be used."""
    return StorageError(
        f"record {number} of the journal ({kind}) is damaged: {why}; restore the journal from a backup, or "
        f"drop this record and all that follow it with `atoll journal cut {number}`"
    )


class Journal(StoredJournal):
    """Append-only event log at a file or a database's URL; one writer, who claims it first."""

    def __init__(self, where: Path | str) -> None:
        super().__init__(where)
        self._lock: FolderLock | None = None
        self._guard: sa.Connection | None = (
            None  # its session holds PostgreSQL's lock; looked at by ``check``
        )
        self.term = 0
        self.fenced = ""  # why nothing may be written any more
        self.unfolded = 0  # records since the newest snapshot, or since the journal was opened

    def _opened(self, url: sa.URL) -> sa.URL:
        if url.get_backend_name() == "sqlite":
            _close_to_others(url)
        return url

    def _prepare(self) -> None:
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _log_ahead)
        _METADATA.create_all(self._engine)
        super()._prepare()
        with self._engine.begin() as connection:
            if not self._has_crc:
                connection.execute(sa.text("ALTER TABLE events ADD COLUMN crc BIGINT"))
                self._has_crc = True
            if connection.execute(_TERM).first() is None:
                connection.execute(_COMMAND.insert().values(id=1, term=0))

    def claim(self, at_s: float) -> int:
        """Command from now on, under a term above every earlier one, which is returned.

        A journal in a file is locked for the process's life, one in PostgreSQL for its session's.
        UsageError names who holds it; StorageError when the database refuses.
        """
        try:
            self._take_lock()
            with self._connection.begin():
                self._connection.execute(_COMMAND.update().values(term=_COMMAND.c.term + 1))
                term: int = self._connection.execute(_TERM).scalar_one()
                row = _row(to_record(CoordinatorStarted(term), at_s), term)
                started = {column.name: row[column.name] for column in _COLUMNS}
                self._connection.execute(_EVENTS.insert(), started | self._above_snapshots())
        except sa.exc.SQLAlchemyError as error:
            raise StorageError(
                f"cannot take command of the journal: {_cause(error)}; {self._remedy}"
            ) from error
        self.term = term
        return term

    def _above_snapshots(self) -> dict[str, int]:
        """Return the next record's number where the database would count on from less than a snapshot holds:
        once all records after that were cut, SQLite begins with 1."""
        newest = self._connection.execute(sa.select(sa.func.max(_SNAPSHOTS.c.number))).scalar_one() or 0
        last = self._connection.execute(_LAST).scalar_one() or 0
        return {"number": newest + 1} if newest > last else {}

    def _take_lock(self) -> None:
        url = self._engine.url
        name = url.database or ""
        if self._engine.dialect.name == "sqlite" and _is_file(name):
            self._lock = FolderLock(Path(f"{name}-lock"), lambda holder: _refusal(name, holder))
        self._guard = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        if self._engine.dialect.name == "postgresql":
            key = sa.func.hashtext(sa.func.current_schema())
            if not self._guard.execute(sa.select(sa.func.pg_try_advisory_lock(_ADVISORY, key))).scalar_one():
                shown = url.render_as_string(hide_password=True)
                raise UsageError(
                    f"another coordinator commands on {shown}: its session holds the advisory lock; stop it, "
                    "or give this one a database of its own"
                )

    def check(self) -> None:
        """Look whether this coordinator still commands; blocks while the database does, in any thread.

        Fenced when another has claimed the journal, or when the session that held the lock is over: then
        another may.
        """
        if self._guard is None:
            return
        try:
            found = self._guard.execute(_TERM).scalar_one()
        except sa.exc.SQLAlchemyError as error:
            if self._engine.dialect.name == "sqlite":
                return  # the file's lock is the process's; whether its disk fails shows at the next append
            raise self._lost(f"the session with its database is over: {_cause(error)}") from error
        if found != self.term:
            raise self._lost(f"term {found} was claimed, this is term {self.term}")

    def _lost(self, why: str) -> Fenced:
        self.fenced = (
            f"this coordinator does not command its journal any more: {why}; it ends, and may be started "
            "again where no other one runs"
        )
        return Fenced(self.fenced)

    def append(self, records: Sequence[Record]) -> None:
        """Write records in one transaction; on return they survive a crash.

        StorageError when they could not be written; none of them is then in the journal. Fenced, a kind
        of it, when another coordinator commands by now: then none ever will be.
        """
        if not records:
            return
        rows = [_row(record, self.term) for record in records]
        try:
            with self._connection.begin():
                written = self._connection.execute(_INSERT, rows).rowcount
        except sa.exc.SQLAlchemyError as error:
            raise StorageError(
                f"the journal refuses {len(rows)} events: {_cause(error)}; {self._remedy}"
            ) from error
        self.unfolded += len(rows)
        if written != len(rows):
            raise self._lost(f"another one claimed it after term {self.term}")

    def last_number(self) -> int:
        """Return the number of the newest record, 0 where there is none."""
        with self._connection.begin():
            found: int | None = self._connection.execute(_LAST).scalar_one()
        return found or 0

    def fold(self, number: int, payload: str, at_s: float) -> None:
        """Keep the fold of all records up to ``number`` as the newest snapshot, and drop what nothing reads
        any more: older snapshots but one, and the records up to that one.

        StorageError when it could not be written; nothing is dropped then.
        """
        row = {"number": number, "at_s": at_s, "payload": payload, "digest": _digest(payload)}
        numbers = sa.select(_SNAPSHOTS.c.number).order_by(_SNAPSHOTS.c.number.desc()).limit(SNAPSHOTS)
        try:
            with self._connection.begin():
                if self._connection.execute(_TERM.with_for_update(read=True)).scalar_one() != self.term:
                    raise self._lost(f"another one claimed it after term {self.term}")
                self._connection.execute(_SNAPSHOTS.delete().where(_SNAPSHOTS.c.number >= number))
                self._connection.execute(_SNAPSHOTS.insert(), row)
                kept = self._connection.execute(numbers).scalars().all()
                if len(kept) == SNAPSHOTS:
                    self._connection.execute(_SNAPSHOTS.delete().where(_SNAPSHOTS.c.number < kept[-1]))
                    self._connection.execute(_EVENTS.delete().where(_EVENTS.c.number <= kept[-1]))
        except sa.exc.SQLAlchemyError as error:
            raise StorageError(f"the journal refuses a snapshot: {_cause(error)}; {self._remedy}") from error
        self.unfolded = 0

    def cut(self, number: int) -> int:
        """Drop the record of this number, all that follow, and snapshots with any of them; returns how many
        records that were."""
        with self._connection.begin():
            self._connection.execute(_SNAPSHOTS.delete().where(_SNAPSHOTS.c.number >= number))
            return self._connection.execute(_EVENTS.delete().where(_EVENTS.c.number >= number)).rowcount

    def close(self) -> None:
        """Close the database, and let the next coordinator claim it."""
        if self._guard is not None:
            with suppress(sa.exc.SQLAlchemyError):
                self._guard.invalidate()  # back in a pool its session would go on holding the lock
                self._guard.close()
        super().close()
        if self._lock is not None:
            self._lock.release()


def _url(where: Path | str) -> sa.URL:
    if not isinstance(where, str) or "://" not in where:
        return sa.URL.create("sqlite", database=str(where))
    try:
        url = sa.make_url(where)
    except (sa.exc.ArgumentError, ValueError):  # not told which part: it may hold a password
        raise UsageError(f"--database is not a database URL; write {_EXAMPLES}") from None
    # The driver of our extra, whichever this SQLAlchemy would take.
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _not_opened(url: sa.URL, error: Exception) -> AtollError:
    shown = url.render_as_string(hide_password=True)
    match error:
        case sa.exc.NoSuchModuleError():
            return UsageError(f"no installed package knows databases of {shown}; write {_EXAMPLES}")
        case ImportError():
            module = error.name or url.drivername.partition("+")[2]
            how = "`pip install 'atoll[postgresql]'`" if module == "psycopg" else "the package that has it"
            return UsageError(
                f"{shown} needs the Python module {module}, which cannot be imported: install {how}, or "
                "leave --database out, since SQLite in the state folder needs nothing"
            )
        case sa.exc.ArgumentError() | TypeError() | ValueError():
            return UsageError(f"{shown} cannot be used: {_cause(error)}; write {_EXAMPLES}")
    return StorageError(f"cannot open the journal at {shown}: {_cause(error)}")


def _is_file(name: str) -> bool:
    return name not in ("", ":memory:") and not name.startswith("file:")


def _refusal(name: str, holder: Holder) -> str:
    return (
        f"another coordinator (process {holder.process or '?'}) commands on the journal {name}; stop it, or "
        "give this one its own --database"
    )


def _close_to_others(url: sa.URL) -> None:
    """SQLite makes its log and its shared memory with the rights of the database's file."""
    name = url.database or ""
    if not _is_file(name):
        return
    for path in (Path(name), Path(f"{name}-wal"), Path(f"{name}-shm")):
        if path == Path(name) or path.exists():
            with suppress(OSError):  # the database says better what is wrong
                private_file(path)


def _row(record: Record, term: int) -> dict[str, Any]:
    payload, kind = _encoded(record), record.kind
    return {"at_s": record.at_s, "kind": kind, "payload": payload, "crc": _crc(kind, payload), "mine": term}


def _crc(kind: str, payload: str) -> int:
    return zlib.crc32(payload.encode(), zlib.crc32(kind.encode()))


def _digest(payload: str) -> str:
    return sha256(payload.encode()).hexdigest()


def _encoded(record: Record) -> str:
    text = json.dumps(record.payload, separators=(",", ":"))
    if len(text) > MAX_RECORD_BYTES:
        raise StorageError(f"a {record.kind} event of {len(text)} bytes exceeds {MAX_RECORD_BYTES}")
    return text


def _log_ahead(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _cause(error: Exception) -> str:
    original = getattr(error, "orig", None)
    return str(original or error).splitlines()[0]
