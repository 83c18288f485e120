"""Events to disk, in order; the coordinator's state is a fold over them.

One table in SQLite by default (the file is the deployment) or any database that SQLAlchemy
knows by URL. A record is on the disk before anybody acts on it: ``append`` returns after the
commit, with SQLite on write-ahead log and full synchronisation.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from atoll.errors import AtollError, StorageError, UsageError
from coordinator.messages.facts import Record
from protos.private_files import private_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_RECORD_BYTES = 64 << 20

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
_INSERT = _EVENTS.insert().inline()  # the database counts the numbers, and nobody asks for them


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
            # One connection for the process's life: a step's commit must not pay for a pool's 0.1 ms.
            self._connection = self._engine.connect()
        except (sa.exc.SQLAlchemyError, ImportError, TypeError, ValueError) as error:
            raise _not_opened(url, error) from error
        self._remedy = "free some disk space" if file else "see that its database answers and has space"

    def append(self, records: Sequence[Record]) -> None:
        """Write records in one transaction; on return they survive a crash.

        StorageError when they could not be written; none of them is then in the journal.
        """
        if not records:
            return
        rows = [{"at_s": r.at_s, "kind": r.kind, "payload": _encoded(r)} for r in records]
        try:
            with self._connection.begin():
                self._connection.execute(_INSERT, rows)
        except sa.exc.SQLAlchemyError as error:
            raise StorageError(
                f"the journal refuses {len(rows)} events: {_cause(error)}; {self._remedy}"
            ) from error

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
    cursor.close()


def _cause(error: Exception) -> str:
    original = getattr(error, "orig", None)
    return str(original or error).splitlines()[0]
