"""Folders of federated jobs on this machine, as the daemon makes them; what is in them is opaque to it."""

from __future__ import annotations

import os
import secrets
import shutil
from hashlib import blake2b, sha256
from pathlib import Path

from atoll.errors import StorageError
from hostos.files.private_files import private_folder, write_private
from hostos.files.refusals import ROOM, disk

FOLDER = "federated"
SECRET_FILE = "secret"  # noqa: S105 - a file's name
SECRET_BYTES = 32
MAX_JOBS = 64  # whose kept state stays; the least recently used go
MAX_BYTES = 20 << 30  # of all of them together; the same


def job_folder(state_dir: Path, job: str) -> Path:
    """Folder of one job's kept state."""
    return state_dir / FOLDER / sha256(job.encode()).hexdigest()[:24]


def make_job_folder(state_dir: Path, job: str, max_bytes: int = MAX_BYTES) -> Path:
    """Make a job's folder, and room for it: what older jobs left goes beyond ``MAX_JOBS`` and ``max_bytes``.
    Raises StorageError."""
    folder = job_folder(state_dir, job)
    with disk(f"write {folder}", ROOM):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(folder)
        forget_old(folder, size_of(folder), max_bytes)
    return folder


def forget_old(folder: Path, n_bytes: int, max_bytes: int) -> None:
    """Delete what jobs other than that of ``folder`` left, the oldest first, until ``n_bytes`` fit."""
    others = sorted(
        (p for p in folder.parent.iterdir() if p.is_dir() and p != folder),
        key=lambda p: p.stat().st_mtime,
        reverse=True,
    )
    total = n_bytes
    for at, other in enumerate(others):
        total += size_of(other)
        if at + 1 >= MAX_JOBS or total > max_bytes:
            shutil.rmtree(other, ignore_errors=True)


def size_of(folder: Path) -> int:
    """Bytes of all files below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def noise_key(state_dir: Path) -> bytes:
    """This machine's own, made once: what noise that hides data is drawn by. Raises StorageError."""
    path = state_dir / FOLDER / SECRET_FILE
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        found = secrets.token_bytes(SECRET_BYTES)
        private_folder(path.parent)
        write_private(path, found)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None
    if len(found) != SECRET_BYTES:
        # With another secret the same order would get other noise: two answers would show what it hides.
        raise StorageError(
            f"{path} is damaged: {len(found)} bytes instead of {SECRET_BYTES}; restore it from a backup, or "
            "remove it once no federated job that adds noise runs here"
        )
    return blake2b(found, digest_size=SECRET_BYTES).digest()
