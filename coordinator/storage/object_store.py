"""Object stores: a bucket behind the folder of blobs, by a port that S3 and a test's memory both have.

Objects are named by their content, so one that is there is never written again (create-only), and lies where
its blob lies in the folder: ``ab/cdef...`` below the URL's prefix. The library retries what may be over in a
moment (503, a broken connection) with exponential back-off; what is left is a StorageError with its remedy.
Credentials and endpoint are the environment's, in the names that every S3 client reads (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from atoll.errors import StorageError, UsageError

SCHEME = "s3://"
PART_BYTES = 8 << 20  # of an upload, and of a range read; at most 10,000 parts: 78 GiB
PARTS_AT_ONCE = 4
RETRIES = 8
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
RETRY_FOR_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of the store; ``written_s``: Unix time."""

    size: int
    written_s: float


class Objects(Protocol):
    """Objects named by 64 hexadecimal digits. Calls raise StorageError where the store does not do it."""

    def listed(self) -> dict[str, Listed]:
        """Return every object by name."""

    def put(self, name: str, file: Path, size: int) -> None:
        """Write an object that is not there; one that is stays as it is."""

    def size(self, name: str) -> int | None:
        """Return an object's bytes, None where there is none."""

    def read(self, name: str, offset: int, length: int) -> bytes | None:
        """Return a range of an object, at least a byte long and within it; None where there is none."""

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; those that are not there are ignored."""


class S3Objects:
    """``Objects`` below s3://BUCKET/PREFIX."""

    def __init__(self, url: str, retry_for_s: float = RETRY_FOR_S) -> None:
        """UsageError for an URL that names no bucket, or where `atoll[s3]` is not installed."""
        where = urlsplit(url)
        if where.scheme != "s3" or not where.netloc or where.query or where.fragment or "@" in url:
            raise UsageError("--blobs names no bucket; give s3://BUCKET or s3://BUCKET/PREFIX")
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ImportError:
            raise UsageError(f"{url} needs an S3 client: pip install 'atoll[s3]'") from None
        self.url = url
        self._library, self._errors = obstore, exceptions
        self._store = self._asked(
            lambda: S3Store(
                where.netloc,
                prefix=where.path.strip("/") or None,
                client_options={"allow_http": True},
                retry_config={
                    "max_retries": RETRIES,
                    "retry_timeout": timedelta(seconds=retry_for_s),
                    "backoff": {
                        "init_backoff": timedelta(seconds=FIRST_BACKOFF_S),
                        "max_backoff": timedelta(seconds=LONGEST_BACKOFF_S),
                    },
                },
            )
        )

    def listed(self) -> dict[str, Listed]:
        """Return every object by name; what else lies below the prefix is not ours."""

        def pages() -> dict[str, Listed]:
            return {
                at["path"].replace("/", ""): Listed(at["size"], at["last_modified"].timestamp())
                for page in self._library.list(self._store, chunk_size=1000)
                for at in page
                if _is_ours(at["path"])
            }

        return self._asked(pages)

    def put(self, name: str, file: Path, size: int) -> None:
        """Write an object that is not there; a large one in parts, whose name appears with the last."""

        if size > PART_BYTES and self.size(name) is not None:
            return

        def write() -> None:
            if size > PART_BYTES:
                self._library.put(
                    self._store, _key(name), file, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
                )
                return
            with contextlib.suppress(self._errors.AlreadyExistsError):
                data = file.read_bytes()
                self._library.put(self._store, _key(name), data, mode="create", use_multipart=False)

        self._asked(write)

    def size(self, name: str) -> int | None:
        """Return an object's bytes, None where there is none."""

        def head() -> int | None:
            try:
                return int(self._library.head(self._store, _key(name))["size"])
            except FileNotFoundError:
                return None

        return self._asked(head)

    def read(self, name: str, offset: int, length: int) -> bytes | None:
        """Return a range of an object."""

        def part() -> bytes | None:
            try:
                return bytes(self._library.get_range(self._store, _key(name), start=offset, length=length))
            except FileNotFoundError:
                return None

        return self._asked(part)

    def delete(self, names: Collection[str]) -> None:
        """Delete objects, many with one request."""
        if names:
            self._asked(lambda: self._library.delete(self._store, [_key(name) for name in names]))

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (self._errors.BaseError, FileNotFoundError, ValueError) as error:
            raise StorageError(
                f"{self.url} does not do as asked; see that the bucket exists, that AWS_ENDPOINT_URL and "
                "AWS_REGION are its own, and that AWS_ACCESS_KEY_ID may list, read, write and delete there; "
                f"jobs go on by themselves once it does: {_short(error)}"
            ) from error


def _key(name: str) -> str:
    return f"{name[:2]}/{name[2:]}"


def _is_ours(path: str) -> bool:
    name = path.replace("/", "")
    return len(name) == 64 and path == _key(name) and set(name) <= set("0123456789abcdef")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
