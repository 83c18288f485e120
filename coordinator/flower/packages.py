"""Packages that an app brings, for its ServerApp on its owner's machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import UsageError
from coordinator.flower.launcher import Wish
from hostos.packages import pinned
from hostos.packages.fetching import NotFetched
from hostos.packages.shelf import Shelf

MOST_BYTES = 4 << 30  # of all apps' packages on this machine


@contextmanager
def installed(wish: Wish, root: Path) -> Iterator[str]:
    """Have what the app brings and this installation lacks installed below ``root``; the folder that a
    ServerApp's process appends to its path, "" where nothing is lacking.

    Raises UsageError where the command does not allow it, NotFetched, BadFrame, StorageError.
    """
    wanted = pinned.lacking(wish.bundle.spec.packages)
    if not wanted:
        yield ""
        return
    if not wish.packages:
        named = ", ".join(map(str, wanted))
        lines = shlex.join(f"{package.name}=={package.version}" for package in wanted)
        raise UsageError(
            f"the app brings packages ({named}) that are not installed here; allow it with --packages DIR (a "
            f"folder of wheels, or an index), or `pip install {lines}`"
        )
    try:
        environment = Shelf(root, wish.packages, MOST_BYTES).open(wanted)
    except NotFetched as error:
        raise UsageError(f"{error}; pip printed: {error.output}".rstrip()) from None
    with environment:
        yield str(environment.site)
