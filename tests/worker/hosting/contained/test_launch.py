"""How a launched process ends, and that all of it does, with bubblewrap and without."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from hostos.app_guard import Guarded
from tests.patience import HUNG_S
from tests.worker.hosting.launching import WAYS, ended, launched, life, read_line, sandbox_for
from worker.hosting.contained.environment import compute_environment
from worker.hosting.contained.launch import KILLED, Launched
from worker.hosting.contained.limits import descendants
from worker.hosting.contained.sandbox import View


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("pass", "exit code 0"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
def test_an_ending_names_the_code_or_the_signal(way: str, code: str, words: str) -> None:
    with launched(code, way) as made:
        ending = ended(made)
        assert str(ending) == words
        assert (ending.code is None) == words.startswith("SIG")
        assert not ending.memory
        assert made.ended() == ending
        assert not made.alive
        assert made.limit_added(1 << 20) is None


@pytest.mark.parametrize("way", WAYS)
def test_what_was_printed_last_is_kept_and_cleaned(way: str) -> None:
    with launched(r"""
import sys
for n in range(100): print(n, flush=True)
print("\x1b[2J\u202eabc", file=sys.stderr)
raise SystemExit("x" * 9000)
""", way) as made:  # fmt: skip
        ending = ended(made)
    assert str(ending) == "exit code 1"
    assert len(ending.lines) == 40
    assert " [2J abc" in ending.lines
    assert max(map(len, ending.lines)) == 1000


@pytest.mark.parametrize("way", WAYS)
def test_what_hangs_is_killed_and_the_cause_is_named(way: str) -> None:
    told = threading.Event()
    with life() as (read, write):
        command = [sys.executable, "-I", "-c", HANGING, str(write)]
        made = Launched(
            command, [write], View(), compute_environment(), sandbox=sandbox_for(way), at_end=told.set
        )
        os.close(write)
        assert read_line(read) == b"ready\n"
        assert made.ended() is None
        assert made.wait(0.01) is None
        made.kill("no answer within 30 s")
        made.kill("another reason")
        assert str(made.ended()) == "SIGKILL: no answer within 30 s"
        assert os.read(read, 1) == b""
    assert told.wait(HUNG_S)


HANGING = """
import os, signal, sys
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
os.write(int(sys.argv[1]), b"ready\\n")
while True: pass
"""


@pytest.mark.parametrize("way", WAYS)
def test_what_somebody_else_kills_is_said_to_be_so(way: str) -> None:
    with life() as (read, write):
        command = [sys.executable, "-I", "-c", HANGING, str(write)]
        made = Launched(command, [write], View(), compute_environment(), sandbox=sandbox_for(way))
        os.close(write)
        assert read_line(read) == b"ready\n"
        os.kill(descendants(made.pid)[-1], signal.SIGKILL)
        assert str(made.wait(HUNG_S)) == f"SIGKILL: {KILLED}"


SPREADING = """
import os, sys, time
tell = int(sys.argv[1])
heard, said = os.pipe()
for leave in (False, True):
    if os.fork() == 0:
        if leave:
            os.setsid()
            if os.fork(): os._exit(0)
        if os.fork() == 0: os.setpgid(0, 0)
        os.write(said, b".")
        time.sleep(600)
        os._exit(0)
for _ in range(4): os.read(heard, 1)
os.write(tell, b"ready\\n")
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("then", ["import time; time.sleep(600)", "os.kill(os.getpid(), 11)"])
def test_all_that_it_started_ends_with_it_wherever_it_went(way: str, then: str) -> None:
    with (
        life() as (read, write),
        launched(SPREADING + then, way, given=[write], arguments=[str(write)]) as made,
    ):
        os.close(write)
        assert read_line(read) == b"ready\n"
        if "sleep" in then:
            made.kill()
        else:
            assert str(ended(made)) == "SIGSEGV"
        assert os.read(read, 1) == b"", "nobody else holds the other end"


@pytest.mark.parametrize("way", WAYS)
def test_it_dies_with_the_process_that_launched_it(way: str) -> None:
    sandbox_for(way)
    code = f"""
import os, sys
from tests.worker.hosting.launching import launched
write = int(sys.argv[1])
with launched({SPREADING + "time.sleep(600)"!r}, {way!r}, given=[write], arguments=[sys.argv[1]]):
    os.close(write)
    sys.stdin.read()
"""
    with life() as (read, write):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(write)], stdin=subprocess.PIPE, pass_fds=[write]
        ) as parent:
            os.close(write)
            assert read_line(read) == b"ready\n"
            parent.kill()
        assert os.read(read, 1) == b""


INHERITED = """
import os, socket, sys
open_here = []
for number in range(3, 256):
    try:
        os.fstat(number)
        open_here.append(str(number))
    except OSError:
        pass
with socket.socket(fileno=int(sys.argv[1])) as pipe:
    pipe.sendall(pipe.recv(100) + b" and back: " + " ".join(open_here).encode())
"""


@pytest.mark.parametrize("way", WAYS)
def test_descriptors_are_inherited_under_their_numbers_and_no_others(way: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as other:
        os.set_inheritable(other.fileno(), True)
        number = theirs.fileno()
        with launched(INHERITED, way, given=[number], arguments=[str(number)]) as made:
            theirs.close()
            ours.sendall(b"there")
            found = b"".join(iter(lambda: ours.recv(1000), b""))
            assert str(ended(made)) == "exit code 0"
    assert found.decode() == f"there and back: {number}"


@pytest.mark.parametrize("way", WAYS)
def test_it_is_ended_first_when_memory_is_short_and_leaves_no_core_dump(way: str) -> None:
    code = """
import resource
print(int(open("/proc/self/oom_score_adj").read()), resource.getrlimit(resource.RLIMIT_CORE))
"""
    with launched(code, way) as made:
        assert ended(made).lines == ("1000 (0, 0)",)


def test_a_program_that_is_not_there_is_an_end_like_any_other() -> None:
    made = Launched(["/nonexistent/python"], [], View(), {}, sandbox=sandbox_for("bare"))
    assert str(ended(made)) == "exit code 127"


def test_a_path_of_the_view_that_is_not_there_is_named() -> None:
    with launched("pass", "contained", View(read_only=(Path("/nonexistent/data"),))) as made:
        ending = ended(made)
    assert ending.code == 1
    assert "/nonexistent/data" in ending.lines[-1]


def test_who_has_a_guards_number_after_it_was_waited_for_is_left_alone() -> None:
    guarded = Guarded([sys.executable, "-c", ""], [], compute_environment(1))
    guarded.process.wait(HUNG_S)
    with subprocess.Popen(["/bin/sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE) as stranger:
        try:
            assert stranger.stdout is not None
            child = int(stranger.stdout.readline())
            guarded.process.pid = stranger.pid
            guarded.end()
            with pytest.raises(subprocess.TimeoutExpired):  # it ends when its child does
                stranger.wait(1.0)
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            stranger.kill()
