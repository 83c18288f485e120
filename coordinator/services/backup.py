"""A copy of a coordinator's state folder that can be started from, taken while the coordinator runs.

The journal is copied in one transaction of SQLite; then every blob that it names is. Blobs never change, but
a newer checkpoint lets go of those of an older one: so they are held by hard links first, and where one has
gone meanwhile, the journal is copied anew.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from atoll.errors import StorageError, UsageError
from coordinator.services.recovery import Folded, recover
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.journal import StoredJournal
from hostos.files.folder_version import VERSION_FILE
from hostos.files.private_files import private_folder, sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from coordinator.config import CoordinatorConfig

JOURNAL = "journal.sqlite"
FILES = (VERSION_FILE, "owner-token", "join-token", "owners.json", "relay-key")
FOLDERS = ("ca", "audit", "runs")
HOLDING = ".backup-"  # how the name of a folder of hard links begins
ROUNDS = 5  # of copying the journal, while checkpoints replace each other
CHECKPOINTS = 2  # of one job, where snapshots of the journal do not say


@dataclass(frozen=True, slots=True)
class Saved:
    """What a backup holds."""

    folder: Path
    term: int
    records: int  # number of the newest
    jobs: int
    blobs: int
    blob_bytes: int
    missing: int  # blobs that the journal names and that the store has not, or not as they were
    bucket: str  # where the blobs are instead, "" where they are in the folder


def back_up(config: CoordinatorConfig, target: Path) -> Saved:
    """Copy the state folder to ``target``, which must not be there yet, or be empty.

    UsageError for a folder that holds no state, a journal in another database, or a target that is taken;
    StorageError when the disk refuses or the journal is damaged.
    """
    journal = config.state_dir / JOURNAL
    if config.database_url:
        raise UsageError(
            "the journal is in a database of its own: dump that (pg_dump), then copy the state folder"
        )
    if not journal.is_file():
        raise UsageError(f"{config.state_dir} holds no {JOURNAL}: give the --state-dir of `atoll serve`")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} already exists: give a folder that is new or empty")
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        private_folder(unfinished)
        saved = _copied(config, journal, unfinished, target)
        _sync(unfinished)
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
        sync_folder(target.parent)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"cannot back up to {target}: {error}; see that the disk has space") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return saved


def _copied(config: CoordinatorConfig, journal: Path, into: Path, target: Path) -> Saved:
    bucket = config.blobs_url if config.blobs_url.startswith("s3://") else ""
    with _holding(config.state_dir) as holding:
        for _ in range(ROUNDS):
            folded = _copy_journal(journal, into / JOURNAL)
            named = set() if bucket else folded.ledger.referenced_blobs() - {""}
            store = BlobStore(config.blob_dir, reading=True)
            if not (missing := _held(store, named, holding)):
                break
        # What is gone for good makes its checkpoint torn, here as there: the others are worth a backup.
        whole, n_bytes = _copy_blobs(store, named - missing, holding, BlobStore(into / "blobs", reading=True))
    for name in FOLDERS:
        if (config.state_dir / name).is_dir():
            shutil.copytree(config.state_dir / name, into / name)
    for name in FILES:
        if (config.state_dir / name).is_file():
            shutil.copy2(config.state_dir / name, into / name)
    ledger = folded.ledger
    lacking = len(named) - whole
    return Saved(target, ledger.term, folded.number, len(ledger.jobs), whole, n_bytes, lacking, bucket)


@contextmanager
def _holding(state_dir: Path) -> Iterator[Path]:
    """A folder for hard links; locked while it is used, where the file system has locks."""
    with tempfile.TemporaryDirectory(prefix=HOLDING, dir=state_dir, ignore_cleanup_errors=True) as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield Path(folder)
        finally:
            os.close(descriptor)


def drop_holdings(state_dir: Path) -> None:
    """Delete what backups that were killed hold: their links keep the space of blobs that are gone."""
    for folder in state_dir.glob(f"{HOLDING}*"):
        with suppress(OSError):  # in use, or without locks to say that it is not
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _copy_journal(source: Path, target: Path) -> Folded:
    """Copy all of the journal as it is at one moment, and fold the copy. Raises StorageError where it is
    damaged."""
    target.unlink(missing_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    reading = sqlite3.connect(f"file:{quote(str(source))}?mode=ro", uri=True)
    with closing(reading), closing(sqlite3.connect(target)) as writing:
        reading.backup(writing)
        writing.execute("PRAGMA journal_mode=DELETE")  # one file, whatever it is copied by
    with closing(StoredJournal(target)) as journal:
        return recover(journal, CHECKPOINTS)


def _held(store: BlobStore, names: Iterable[str], folder: Path) -> set[str]:
    """Hold blobs by hard links in ``folder``, so that nobody deletes their bytes; returns those that are
    gone.

    Where the file system has no links, they are copied from where they are.
    """
    gone = set()
    for name in names:
        try:
            os.link(store.path(name), folder / name)
        except FileExistsError:
            continue
        except OSError:
            if not store.has(name):
                gone.add(name)
    return gone


def _copy_blobs(store: BlobStore, names: Iterable[str], folder: Path, into: BlobStore) -> tuple[int, int]:
    """Copy blobs and read the copies again; returns how many are whole, and their bytes."""
    whole = total = 0
    for name in sorted(names):
        held, target = folder / name, into.path(name)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(held if held.exists() else store.path(name), target)
        target.chmod(0o600)
        if not into.rotten(name):
            whole, total = whole + 1, total + target.stat().st_size
    return whole, total


def _sync(folder: Path) -> None:
    """Have every file of the copy on the disk before it has its name."""
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                descriptor = os.open(Path(where) / name, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        sync_folder(Path(where))
