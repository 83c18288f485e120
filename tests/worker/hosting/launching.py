"""Programs of the standard library alone, launched with bubblewrap and without."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.patience import HUNG_S
from worker.hosting.contained.environment import compute_environment
from worker.hosting.contained.launch import Ending, Launched
from worker.hosting.contained.sandbox import Sandbox, View, probe

BARE = Sandbox("", why_not="this test goes without")
WAYS = ("contained", "bare")


def sandbox_for(way: str) -> Sandbox:
    """What ``probe`` finds, or nothing; skips where there is no sandbox here."""
    if way == "bare":
        return BARE
    if not (found := probe()):
        pytest.skip(f"no sandbox here: {found.why_not}")
    return found


@contextmanager
def launched(
    code: str, way: str, view: View | None = None, given: Sequence[int] = (), arguments: Sequence[str] = ()
) -> Iterator[Launched]:
    """A Python that runs ``code``; it is gone afterwards."""
    command = [sys.executable, "-I", "-c", code, *arguments]
    made = Launched(command, given, view or View(), compute_environment(), sandbox=sandbox_for(way))
    try:
        yield made
    finally:
        made.kill()


def ended(made: Launched) -> Ending:
    """How it ended by itself."""
    ending = made.wait(HUNG_S)
    assert ending is not None, "it still runs"
    return ending


@contextmanager
def life() -> Iterator[tuple[int, int]]:
    """A pipe: its read end, which ends when the last process that inherited the write end is gone."""
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        os.close(read)


def read_line(descriptor: int) -> bytes:
    """A line that a process wrote; what came so far when it ended before."""
    found = b""
    while not found.endswith(b"\n") and (more := os.read(descriptor, 1)):
        found += more
    return found
