"""Blocks of shared memory: first fit, aligned, never two at one place; the file cannot be cut short."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import BadFrame
from worker.pipe import arena as arenas
from worker.pipe.arena import ALIGNED, GIVEN_BACK_BYTES, HEAD_BYTES, PAGE, Allocator, Arena

SIZE = 64 << 10


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.make(SIZE)
    yield made
    made.close_descriptor()


def other_side(arena: Arena) -> Arena:
    return Arena(os.dup(arena.descriptor), arena.size)


def test_what_one_side_writes_the_other_reads(arena: Arena) -> None:
    other = other_side(arena)
    arena.block(HEAD_BYTES + 64, 5)[:] = list(b"hello")
    assert bytes(other.block(HEAD_BYTES + 64, 5)) == b"hello"
    other.head[3] = 7
    assert arena.head[3] == 7
    other.close_descriptor()


def test_a_size_is_rounded_up_to_pages_and_the_head_comes_on_top() -> None:
    made = Arena.make(PAGE + 1)
    assert made.size == HEAD_BYTES + 2 * PAGE
    made.close_descriptor()
    made.close_descriptor()  # once more does no harm


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 8),
        (HEAD_BYTES - 1, 1),
        (HEAD_BYTES + SIZE - 7, 8),
        (HEAD_BYTES, SIZE + 1),
        (HEAD_BYTES + SIZE + 1, 0),
        (HEAD_BYTES, -1),
        ((1 << 64) - 1, 1),
        (HEAD_BYTES, (1 << 64) - 1),
    ],
)
def test_a_place_outside_the_arena_is_refused(arena: Arena, offset: int, size: int) -> None:
    with pytest.raises(BadFrame, match="of an arena of"):
        arena.block(offset, size)


def test_a_block_knows_its_place_and_foreign_memory_has_none(arena: Arena) -> None:
    assert arena.offset_of(arena.block(HEAD_BYTES + 128, 10)) == HEAD_BYTES + 128
    assert arena.offset_of(np.empty(10, np.uint8)) is None


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files are sealed on Linux alone")
def test_the_other_side_can_neither_cut_the_file_nor_grow_it_nor_lift_the_seals(arena: Arena) -> None:
    code = (
        "import fcntl, os, sys\n"
        "file, size = int(sys.argv[1]), int(sys.argv[2])\n"
        "refused = 0\n"
        "for wanted in (0, size - 4096, size + 4096):\n"
        "    try:\n"
        "        os.ftruncate(file, wanted)\n"
        "    except PermissionError:\n"
        "        refused += 1\n"
        "try:\n"
        "    fcntl.fcntl(file, fcntl.F_ADD_SEALS, 0x8)\n"
        "except PermissionError:\n"
        "    refused += 1\n"
        "sys.exit(refused)\n"
    )
    command = [sys.executable, "-S", "-c", code, str(arena.descriptor), str(arena.size)]
    done = subprocess.run(command, pass_fds=[arena.descriptor], check=False)
    assert done.returncode == 4
    assert os.fstat(arena.descriptor).st_size == arena.size
    seals = fcntl.fcntl(arena.descriptor, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def test_a_system_without_sealed_files_gets_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    made = Arena.make(SIZE)
    made.block(HEAD_BYTES, 3)[:] = 1
    assert bytes(other_side(made).block(HEAD_BYTES, 3)) == b"\1\1\1"
    made.close_descriptor()


def test_blocks_are_aligned_and_the_first_gap_that_fits_is_taken(arena: Arena) -> None:
    allocator = Allocator(arena)
    places = [allocator.allocate(size) for size in (1, 64, 65, 0)]
    assert places == [HEAD_BYTES, HEAD_BYTES + 64, HEAD_BYTES + 128, HEAD_BYTES + 256]
    allocator.freed(HEAD_BYTES)
    allocator.freed(HEAD_BYTES + 128)
    assert allocator.allocate(100) == HEAD_BYTES + 128  # the gap of 64 is too small
    assert allocator.allocate(64) == HEAD_BYTES


def test_a_full_arena_has_no_room_until_something_is_freed(arena: Arena) -> None:
    allocator = Allocator(arena)
    assert allocator.allocate(SIZE + 1) is None
    assert allocator.allocate(SIZE) == HEAD_BYTES
    assert allocator.allocate(0) is None
    allocator.freed(HEAD_BYTES)
    assert allocator.allocate(SIZE) == HEAD_BYTES


def test_places_that_nobody_has_are_freed_without_harm(arena: Arena) -> None:
    allocator = Allocator(arena)
    first = allocator.allocate(64)
    assert first is not None
    for wrong in (first + 1, first + 64, 0, 1 << 60):
        allocator.freed(wrong)
    assert allocator.allocate(64) == first + 64
    allocator.freed(first)
    allocator.freed(first)  # twice
    assert allocator.allocate(64) == first
    assert allocator.allocate(64) == first + 128


def test_an_owned_block_is_freed_with_its_last_reference_in_whatever_thread(arena: Arena) -> None:
    allocator = Allocator(arena)
    place = allocator.allocate(SIZE)
    assert place is not None
    held = [memoryview(allocator.owned(place, SIZE))]  # type: ignore[arg-type]
    part = [held[0][10:20]]
    held.clear()
    gc.collect()
    assert allocator.allocate(64) is None  # a part is still referred to
    thread = threading.Thread(target=part.clear)
    thread.start()
    thread.join()
    assert allocator.allocate(64) == HEAD_BYTES


def test_a_block_may_be_freed_while_the_lock_is_held(arena: Arena) -> None:
    """A collection may run inside of ``allocate``."""
    allocator = Allocator(arena)
    place = allocator.allocate(64)
    assert place is not None
    with allocator._lock:
        allocator.freed(place)
    assert allocator.allocate(64) == place


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="memory is given back on Linux alone")
def test_memory_that_is_given_back_reads_as_zeros_for_both() -> None:
    made = Arena.make(2 * GIVEN_BACK_BYTES)
    other, allocator = other_side(made), Allocator(made)
    size = GIVEN_BACK_BYTES + PAGE
    place = allocator.allocate(size)
    assert place is not None
    made.head[0] = 5
    made.block(place, size)[:] = 9
    allocator.tidy()
    assert int(other.block(place, size).min()) == 9  # in use
    allocator.freed(place)
    allocator.tidy()
    assert int(other.block(place, size).max()) == 0
    assert made.head[0] == 5
    assert allocator.allocate(size) == place
    made.close_descriptor()


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="memory is given back on Linux alone")
def test_only_whole_pages_are_given_back(arena: Arena) -> None:
    arena.block(HEAD_BYTES, 3 * PAGE)[:] = 1
    arena.give_back(HEAD_BYTES + 1, HEAD_BYTES + 2 * PAGE + 1)
    pages = arena.block(HEAD_BYTES, 3 * PAGE).reshape(3, PAGE)
    assert [(int(p.min()), int(p.max())) for p in pages] == [(1, 1), (0, 0), (1, 1)]
    arena.give_back(HEAD_BYTES + 1, HEAD_BYTES + 2)  # no whole page


def test_little_memory_is_kept_for_the_next_message(arena: Arena) -> None:
    allocator = Allocator(arena)
    place = allocator.allocate(SIZE)
    assert place is not None
    assert SIZE <= arenas.GIVEN_BACK_BYTES
    arena.block(place, SIZE)[:] = 3
    allocator.freed(place)
    allocator.tidy()
    assert int(arena.block(place, SIZE).min()) == 3


@given(st.lists(st.one_of(st.integers(0, 3000), st.integers(-20, -1)), max_size=60))
def test_no_two_live_blocks_overlap_and_none_leaves_the_arena(todo: list[int]) -> None:
    """A size allocates; -n frees the n-th oldest."""
    made = Arena.make(8 << 10)
    made.close_descriptor()
    allocator, live = Allocator(made), list[tuple[int, int]]()
    for entry in todo:
        if entry < 0:
            if -entry <= len(live):
                allocator.freed(live.pop(-entry - 1)[0])
            continue
        place = allocator.allocate(entry)
        gaps = _largest_gap(live, made.size)
        if place is None:
            assert gaps < max(ALIGNED, entry)
            continue
        assert place % ALIGNED == 0
        assert HEAD_BYTES <= place <= place + entry <= made.size
        end = place + max(1, entry)
        assert all(end <= begin or place >= last for begin, last in live)
        live.append((place, end))


def _largest_gap(live: list[tuple[int, int]], size: int) -> int:
    """Aligned bytes of the largest gap."""
    edges = sorted((begin, -(-end // ALIGNED) * ALIGNED) for begin, end in live)
    at, largest = HEAD_BYTES, 0
    for begin, end in [*edges, (size, size)]:
        largest, at = max(largest, begin - at), end
    return largest
