"""Events to disk, in order; the coordinator's state is a fold over them.

One table in SQLite by default (the file is the deployment) or any database that SQLAlchemy
knows by URL. A record is on the disk before anybody acts on it: ``append`` returns after the
commit, with SQLite on write-ahead log and full synchronisation.
"""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from atoll.errors import AtollError, StorageError, UsageError
from coordinator.messages.facts import Record
from protos.private_files import private_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_RECORD_BYTES = 64 << 20
_CHECKPOINT_PAGES = 64
"""After so many pages SQLite writes its log over: a disk takes that in 0.1 ms less than a log that grows."""

_EXAMPLES = "for example postgresql://USER@HOST/NAME or sqlite:////var/lib/atoll/journal.sqlite"

_METADATA = sa.MetaData()
_EVENTS = sa.Table(
    "events",
    _METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at_s", sa.Float, nullable=False),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("payload", sa.Text, nullable=False),
)
_WRITTEN = ("at_s", "kind", "payload")  # the database counts the numbers


class Journal:
    """Append-only event log at a file or a database's URL; one writer.

    UsageError for a URL that cannot be used as given, StorageError when the database refuses.
    """

    def __init__(self, where: Path | str) -> None:
        url = _url(where)
        try:
            self._engine = sa.create_engine(url)
            file = self._engine.dialect.name == "sqlite"
            if file:
                _close_to_others(url)
                sa.event.listen(self._engine, "connect", _log_ahead)
            _METADATA.create_all(self._engine)
            # One connection for the process's life: a step's commit must not pay for connecting.
            self._connection = self._engine.connect()
            # Nor for building the statement: compiled for each append it takes 0.2 ms of a busy machine.
            insert = _EVENTS.insert().inline().compile(dialect=self._engine.dialect, column_keys=_WRITTEN)
        except (sa.exc.SQLAlchemyError, ImportError, TypeError, ValueError) as error:
            raise _not_opened(url, error) from error
        self._insert, self._order = str(insert), insert.positiontup  # None: values go by their names
        self._remedy = "free some disk space" if file else "see that its database answers and has space"
        self._driver_error = self._engine.dialect.loaded_dbapi.Error

    def append(self, records: Sequence[Record]) -> None:
        """Write records in one transaction; on return they survive a crash.

        StorageError when they could not be written; none of them is then in the journal.
        """
        if not records:
            return
        rows = [self._row(record) for record in records]
        try:
            # By the driver itself: the library's transaction takes 0.07 ms more of a step's commit.
            driver = self._connection.connection
            with closing(driver.cursor()) as cursor:
                cursor.executemany(self._insert, rows)
            driver.commit()
        except (sa.exc.SQLAlchemyError, self._driver_error) as error:
            self._take_back()
            raise StorageError(
                f"the journal refuses {len(rows)} events: {_cause(error)}; {self._remedy}"
            ) from error

    def _take_back(self) -> None:
        """End the transaction that failed; where the connection is lost, the next append makes another."""
        try:
            self._connection.connection.rollback()
        except (sa.exc.SQLAlchemyError, self._driver_error):
            self._connection.invalidate()

    def _row(self, record: Record) -> Any:
        named = dict(zip(_WRITTEN, (record.at_s, record.kind, _encoded(record)), strict=True))
        return named if self._order is None else tuple(named[column] for column in self._order)

    def replay(self) -> Iterator[Record]:
        """Every record, oldest first."""
        with self._engine.connect() as connection:
            rows = connection.execution_options(yield_per=1000).execute(
                _EVENTS.select().order_by(_EVENTS.c.number)
            )
            for row in rows:
                yield Record(row.kind, row.at_s, json.loads(row.payload))

    def close(self) -> None:
        """Close the database."""
        self._connection.close()
        self._engine.dispose()


def _url(where: Path | str) -> sa.URL:
    if not isinstance(where, str) or "://" not in where:
        return sa.URL.create("sqlite", database=str(where))
    try:
        url = sa.make_url(where)
    except (sa.exc.ArgumentError, ValueError):  # not told which part: it may hold a password
        raise UsageError(f"--database is no database URL; write {_EXAMPLES}") from None
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


def _close_to_others(url: sa.URL) -> None:
    """SQLite makes its log and its shared memory with the rights of the database's file."""
    name = url.database or ""
    if name in ("", ":memory:") or name.startswith("file:"):
        return
    for path in (Path(name), Path(f"{name}-wal"), Path(f"{name}-shm")):
        if path == Path(name) or path.exists():
            with suppress(OSError):  # the database says better what is wrong
                private_file(path)


def _encoded(record: Record) -> str:
    text = json.dumps(record.payload, separators=(",", ":"))
    if len(text) > MAX_RECORD_BYTES:
        raise StorageError(f"a {record.kind} event of {len(text)} bytes exceeds {MAX_RECORD_BYTES}")
    return text


def _log_ahead(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    cursor.close()


def _cause(error: Exception) -> str:
    original = getattr(error, "orig", None)
    return str(original or error).splitlines()[0]
