"""What a process adds to its memory is bounded, by each means there is, with bubblewrap and without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.worker.hosting.launching import WAYS, ended, launched, life, read_line, sandbox_for
from worker.hosting import TUNED
from worker.hosting.contained import limits
from worker.hosting.contained.control_group import ControlGroup, memory_groups
from worker.hosting.contained.launch import Ending, Launched
from worker.hosting.contained.limits import MOST_PROCESSES, descendants, resident_bytes

MIB = 1 << 20
ADDED = 64 * MIB
READY = """
import mmap, os, sys, time
tell, go = int(sys.argv[1]), int(sys.argv[2])
held = bytearray(b"x") * (32 << 20)  # before it is ready
os.write(tell, b"ready\\n")
os.read(go, 1)
"""
ENDLESS = READY + "kept = []\nwhile True: kept.append(bytearray(b'x') * (1 << 20)); time.sleep(0.0005)\n"
SHARED = f"""{READY}
kept = []
while True:
    kept.append(mmap.mmap(-1, 1 << 20))
    kept[-1].write(b'x' * (1 << 20))
    time.sleep(0.0005)
"""
CHILDREN = f"""{READY}
for n in range(50):
    if not os.fork():
        more = bytearray(b"x") * (8 << 20)
        time.sleep(600)
time.sleep(600)
"""
WITHIN = READY + f"more = bytearray(b'x') * {ADDED}\nprint('within')\n"


class Means(StrEnum):
    """How memory is bounded."""

    CONTROL_GROUP = "control group"
    WATCHDOG = "watchdog"


@pytest.fixture(params=list(Means))
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Means:
    """Each means; without one of them as if there were none here."""
    if request.param is Means.WATCHDOG:
        monkeypatch.setattr(ControlGroup, "create", lambda: "this test goes without")
    elif why_not := memory_groups():
        pytest.skip(f"no control group: {why_not}")
    return Means(request.param)


class Bounded:
    """A program that is bounded once it is ready, and then goes on."""

    def __init__(
        self, code: str, way: str, means: Means, shared_bytes: int = 0, *, waits: bool = False
    ) -> None:
        """``waits``: until ``go_on``."""
        self._waits = waits
        with ExitStack() as opened:
            self.read, write = opened.enter_context(life())
            go, self._go = os.pipe()
            given: Sequence[int] = [write, go]
            self.made: Launched = opened.enter_context(
                launched(code, way, given=given, arguments=[str(write), str(go)])
            )
            os.close(write)
            os.close(go)
            assert read_line(self.read) == b"ready\n"
            bound = self.made.limit_added(ADDED, shared_bytes)
            assert bound is not None
            assert (bound.group is not None) is (means is Means.CONTROL_GROUP)
            self.baseline_bytes, self.bound = bound.baseline_bytes, bound
            self._opened = opened.pop_all()

    def __enter__(self) -> Bounded:
        if not self._waits:
            self.go_on()
        return self

    def go_on(self) -> None:
        os.write(self._go, b"g")

    def __exit__(self, *how: object) -> None:
        os.close(self._go)
        self._opened.close()

    def ending(self) -> Ending:
        """How it ended by itself, all of it."""
        found = ended(self.made)
        assert os.read(self.read, 1) == b""
        return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", [ENDLESS, SHARED, CHILDREN], ids=["own", "shared", "children"])
def test_who_allocates_without_end_is_ended_and_the_bound_is_named(way: str, code: str, means: Means) -> None:
    with Bounded(code, way, means) as bounded:
        ending = bounded.ending()
    assert ending.memory_bytes == ADDED
    assert str(ending).startswith("SIGKILL: its memory bound: ")
    assert "64 MiB" in ending.cause
    assert ending.cause.endswith(f"({means})")


@pytest.mark.parametrize("way", WAYS)
def test_who_adds_what_it_may_is_left_alone(way: str, means: Means) -> None:
    with Bounded(WITHIN, way, means) as bounded:
        assert 32 * MIB < bounded.baseline_bytes < 80 * MIB
        ending = bounded.ending()
    assert (str(ending), ending.lines) == ("exit code 0", ("within",))


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_is_shared_with_us_does_not_count(way: str, means: Means) -> None:
    size = ADDED + 4 * TUNED.slack_bytes
    code = f"""{READY}
kept = mmap.mmap(-1, {size})
for n in range({size >> 20}): kept.write(bytes(1 << 20))
time.sleep(0.3)
"""
    with Bounded(code, way, means, shared_bytes=size) as bounded:
        assert str(bounded.ending()) == "exit code 0"


@pytest.mark.parametrize("way", WAYS)
def test_one_huge_allocation_fails_inside_and_not_by_the_systems_killer(way: str, means: Means) -> None:
    code = READY + "try: bytearray(64 << 30)\nexcept MemoryError: print('refused')\n"
    with Bounded(code, way, means) as bounded:
        ending = bounded.ending()
    assert (str(ending), ending.lines) == ("exit code 0", ("refused",))


@pytest.mark.parametrize("way", WAYS)
def test_processes_without_end_are_ended_all_of_them(way: str, means: Means) -> None:
    code = READY + "while True: os.fork(); time.sleep(0.02)\n"
    with Bounded(code, way, means) as bounded:
        ending = bounded.ending()
    # Each forked process takes some pages too, and on a slow machine that may be seen first.
    assert ending.cause.startswith(f"it had more than {MOST_PROCESSES}") != ending.memory


@pytest.mark.parametrize("way", WAYS)
def test_the_most_that_was_held_is_known_until_it_is_counted_anew(way: str, means: Means) -> None:
    code = f"""{READY}
more = bytearray(b"x") * (24 << 20)
del more
os.write(tell, b"freed\\n")
time.sleep(600)
"""
    with Bounded(code, way, means, waits=True) as bounded:
        assert bounded.bound.peak_bytes < 8 * MIB
        bounded.go_on()
        assert read_line(bounded.read) == b"freed\n"
        assert 22 * MIB <= bounded.bound.peak_bytes < 40 * MIB  # the kernel counts in batches
        bounded.bound.restart_peak()
        assert bounded.bound.peak_bytes < 8 * MIB


def test_the_bound_is_of_one_moment_and_not_raised_later(means: Means) -> None:
    with (
        Bounded(READY + "time.sleep(600)", "bare", means) as bounded,
        pytest.raises(ValueError, match="bounded already"),
    ):
        bounded.made.limit_added(1 << 30)


def test_a_tree_is_counted_without_who_stands_above_it(means: Means) -> None:
    code = READY + "if os.fork(): os.wait()\nelse: os.fork(); print('on', flush=True); time.sleep(600)\n"
    with Bounded(code, "bare", means) as bounded:
        while len(descendants(bounded.made.pid)) < 3:
            assert bounded.made.alive
        found = descendants(bounded.made.pid)
        assert resident_bytes(found) >= 32 * MIB
        assert os.getpid() not in found
        assert bounded.made.pid not in found
    assert descendants(bounded.made.pid) == []
    assert resident_bytes([bounded.made.pid]) == 0
    assert limits.TUNED.memory_look_s <= 0.1


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_is_killed_leaves_no_control_group(way: str) -> None:
    sandbox_for(way)
    if why_not := memory_groups():
        pytest.skip(f"no control group: {why_not}")
    code = f"""
import sys
from tests.worker.hosting.contained.test_limits import READY, Bounded, Means
with Bounded(READY + "time.sleep(600)", {way!r}, Means.CONTROL_GROUP) as bounded:
    print(bounded.made._bound.group.folder, bounded.made.pid, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        folder, guard = worker.stdout.readline().split()
        assert Path(folder).is_dir()
        worker.kill()
    eventually(lambda: not Path("/proc", guard).exists())
    assert not Path(folder).exists()
