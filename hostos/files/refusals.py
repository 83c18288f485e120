"""What a disk refuses, in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.errors import StorageError


@contextmanager
def disk(doing: str, remedy: str = "") -> Iterator[None]:
    """Use a disk within: what it refuses is raised as StorageError, "cannot ``doing``: why; ``remedy``"."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {doing}: {error.strerror or error}{remedy and f'; {remedy}'}") from None
