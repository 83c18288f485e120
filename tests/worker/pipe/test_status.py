"""The status page: what one process writes the other reads, whatever else stands there."""

from __future__ import annotations

import math

import pytest

from worker.pipe.arena import HEAD_BYTES, Arena
from worker.pipe.status import NAME_BYTES, STALE_S, ComputeStatus, DaemonStatus, Mark, Running, Waiting


@pytest.fixture
def page() -> memoryview:
    return memoryview(bytearray(HEAD_BYTES))


def test_a_fresh_page_shows_nothing(page: memoryview) -> None:
    assert ComputeStatus(page).running() == Running(0, None)
    assert (ComputeStatus(page).progress, ComputeStatus(page).memory_bytes) == (0, 0)
    assert DaemonStatus(page).cpu_s == 0.0


def test_the_other_process_reads_what_began_and_what_is_counted() -> None:
    arena = Arena.make(0)
    ours, theirs = ComputeStatus(arena.head), ComputeStatus(Arena(arena.descriptor, arena.size).head)
    ours.begin(ours.encoded(Mark("op 'aten.mm.default' (produit é)", 61.5)))
    ours.count(1 << 40, 3 << 30, 5, 2.5e7)
    assert theirs.running() == Running(1, Mark("op 'aten.mm.default' (produit é)", 61.5))
    assert (theirs.progress, theirs.memory_bytes) == (1 << 40, 3 << 30)
    ours.end()
    assert theirs.running() == Running(2, None)
    assert (theirs.progress, theirs.memory_bytes) == (1 << 40, 3 << 30)
    assert (theirs.peak_bytes, theirs.gpu_j) == (5, 2.5e7)
    arena.close_descriptor()


def test_a_short_name_after_a_long_one_is_only_itself(page: memoryview) -> None:
    status = ComputeStatus(page)
    status.begin(status.encoded(Mark("long " * 20, 1.0)))
    status.begin(status.encoded(Mark("short", 2.0)))
    assert status.running() == Running(2, Mark("short", 2.0))


def test_a_name_is_cut_and_none_spoils_a_terminal(page: memoryview) -> None:
    status = ComputeStatus(page)
    status.begin(status.encoded(Mark("é" * NAME_BYTES, 1.0)))
    found = status.running().mark
    assert found is not None
    assert set(found.name) == {"é"}
    assert len(found.name.encode()) <= NAME_BYTES
    status.begin(status.encoded(Mark("go\u202e\x1b[2J\n", 1.0)))
    found = status.running().mark
    assert found is not None
    assert found.name.isprintable()


@pytest.mark.parametrize("junk", [b"\xff", b"\x00\xff", b"\x7f"])
def test_a_page_full_of_junk_is_read_without_an_error(page: memoryview, junk: bytes) -> None:
    page[:] = (junk * HEAD_BYTES)[:HEAD_BYTES]
    running = ComputeStatus(page).running()
    assert running.mark is None or len(running.mark.name) <= NAME_BYTES
    assert running.mark is None or isinstance(running.mark.allowed_s, float)
    assert ComputeStatus(page).progress >= 0
    assert ComputeStatus(page).memory_bytes >= 0


def test_a_bound_that_is_no_number_passes_as_it_is(page: memoryview) -> None:
    """The daemon's watch, not the page, judges it."""
    status = ComputeStatus(page)
    status.begin(status.encoded(Mark("op", math.nan)))
    found = status.running().mark
    assert found is not None
    assert math.isnan(found.allowed_s)


def test_the_daemons_seconds_stand_beside_the_computes(page: memoryview) -> None:
    status, daemon = ComputeStatus(page), DaemonStatus(page)
    status.begin(status.encoded(Mark("op", 1.0)))
    daemon.write(12.25)
    assert daemon.cpu_s == 12.25
    assert status.running().mark == Mark("op", 1.0)


def test_a_wait_counts_as_long_as_it_is_written_again(page: memoryview) -> None:
    status = ComputeStatus(page)
    assert status.waiting(100.0) is None
    status.wait(Waiting("w-1", "forward", 7, 90.0), 100.0)
    assert status.waiting(100.5) == Waiting("w-1", "forward", 7, 90.0)
    assert status.waiting(100.0 + 2 * STALE_S) is None
    status.wait(None, 101.0)
    assert status.waiting(101.0) is None


@pytest.mark.parametrize("junk", [b"\xff", b"\x00\xff", b"\x7f"])
def test_a_wait_of_junk_is_read_without_an_error(page: memoryview, junk: bytes) -> None:
    page[:] = (junk * HEAD_BYTES)[:HEAD_BYTES]
    assert ComputeStatus(page).waiting(100.0) is None
