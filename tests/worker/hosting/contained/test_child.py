"""One compute process: what it says is heard in order, and its end is told once, with the reason."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import BadFrame, StorageError
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from tests.patience import HUNG_S, eventually
from tests.worker.hosting.scripted import command
from worker.hosting.contained import child
from worker.hosting.contained.child import Child, make_scratch
from worker.hosting.contained.launch import Ending
from worker.hosting.contained.sandbox import View, probe
from worker.pipe.status import DaemonStatus

Start = Callable[..., "Running"]


class Running:
    """A child, and what is heard of it."""

    def __init__(self, scratch: Path, heard: Callable[[pb.FromCompute], object] | None) -> None:
        self.heard: queue.SimpleQueue[pb.FromCompute] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[Ending] = queue.SimpleQueue()
        take = heard or self.heard.put
        view = View((), (scratch,), "cpu")
        self.child = Child(view, probe(), 1, scratch, lambda _, m: take(m), lambda _, e: self.ends.put(e))

    def says(self) -> pb.FromCompute:
        return self.heard.get(timeout=HUNG_S)

    def end(self) -> Ending:
        return self.ends.get(timeout=HUNG_S)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(
        child, "TUNED", replace(child.TUNED, ends_within_s=HUNG_S)
    )  # how it ended is known, however late it does
    made: list[Running] = []

    def begin(heard: Callable[[pb.FromCompute], object] | None = None, **handlers: str) -> Running:
        monkeypatch.setattr(child, "COMMAND", command(handlers))
        made.append(Running(make_scratch(tmp_path, str(len(made))), heard))
        return made[-1]

    yield begin
    for running in made:
        running.child.kill("the test is over")


def test_messages_go_both_ways_in_order_and_the_daemons_time_is_shown(start: Start) -> None:
    running = start(
        interrupt="say(log=pb.ComputeLog(event=m))",
        report_codecs="from worker.pipe.arena import Arena\n"
        "from worker.pipe.status import DaemonStatus\n"
        "page = Arena(int(sys.argv[2]), int(sys.argv[3])).head\n"
        "say(log=pb.ComputeLog(event=str(DaemonStatus(page).cpu_s)))",
    )
    for word in ("one", "two", "three"):
        running.child.send(pb.ToCompute(interrupt=word))
    assert [running.says().log.event for _ in range(3)] == ["one", "two", "three"]
    running.child.send(pb.ToCompute(report_codecs=True))
    assert 0 < float(running.says().log.event) == DaemonStatus(running.child.incoming.arena.head).cpu_s


def test_a_process_that_is_asked_to_ends_by_itself_and_its_scratch_is_gone(start: Start) -> None:
    running = start(setup="open(m.scratch_dir + '/0', 'w').write('x')\nready()")
    running.child.send(pb.ToCompute(setup=pb.ComputeSetup(scratch_dir=str(running.child.scratch))))
    assert running.says().HasField("ready")
    assert [path.name for path in running.child.scratch.iterdir()] == ["0"]
    running.child.close(HUNG_S)
    assert running.end().code == 0
    assert not running.child.alive
    assert not running.child.scratch.exists()
    running.child.send(pb.ToCompute(ping=1))  # does no harm
    running.child.kill("again")
    assert running.ends.empty()


def test_a_process_that_does_not_stop_is_ended(start: Start) -> None:
    running = start(interrupt="say(pong=1)\nwhile True:\n    time.sleep(1)")
    running.child.send(pb.ToCompute(interrupt=""))
    running.says()
    running.child.close(0.1)
    assert running.end().cause == "the worker needs it no more"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os._exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 6)", "SIGABRT"),
        ("raise ValueError('of its own')", "exit code 1"),
        ("pipe.close()\ntime.sleep(600)", "SIGKILL: it closed its pipe"),
        (
            "pipe._socket.sendall(b'\\0\\0\\0\\2\\xff\\xff')",
            "SIGKILL: it broke the rules of its pipe: a damaged",
        ),
    ],
)
def test_every_end_has_its_reason(start: Start, monkeypatch: pytest.MonkeyPatch, code: str, how: str) -> None:
    if "it closed its pipe" in how:
        monkeypatch.setattr(child, "TUNED", replace(child.TUNED, ends_within_s=0.1))
    running = start(interrupt=f"print('last words', flush=True)\n{code}")
    running.child.send(pb.ToCompute(interrupt=""))
    ending = running.end()
    assert str(ending).startswith(how)
    assert ending.lines[0] == "last words"


def test_a_message_that_is_refused_ends_the_process_that_sent_it(start: Start) -> None:
    def refuse(_: pb.FromCompute) -> None:
        raise BadFrame("not so")

    running = start(refuse, interrupt="say(pong=1)\ntime.sleep(60)")
    running.child.send(pb.ToCompute(interrupt=""))
    assert running.end().cause == "it broke the rules of its pipe: not so"


def test_a_fault_of_ours_ends_the_process_too_and_is_told_as_ours(start: Start) -> None:
    def broken(_: pb.FromCompute) -> None:
        raise KeyError("ours")

    running = start(broken, interrupt="say(pong=1)\ntime.sleep(60)")
    running.child.send(pb.ToCompute(interrupt=""))
    assert running.end().cause == "KeyError in this worker"


def test_room_is_where_the_process_reads(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_UNREAD_BYTES", 4 << 20)
    running = start(discard="while not os.path.exists(m.reason):\n    time.sleep(0.01)")
    gate = running.child.scratch / "go on"
    assert running.child.has_room(0.0)
    running.child.send(pb.ToCompute(discard=control.StepDiscard(reason=str(gate))))
    running.child.send(pb.ToCompute(interrupt="x" * (3 << 20)))
    assert not running.child.has_room(0.05)
    threading.Timer(0.05, gate.touch).start()
    assert running.child.has_room(HUNG_S)


def test_what_has_ended_has_room_for_nothing_more_and_nobody_waits(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(interrupt="os._exit(0)")
    running.child.send(pb.ToCompute(interrupt=""))
    running.end()
    monkeypatch.setattr(child, "MAX_UNREAD_BYTES", -2)
    assert running.child.has_room(HUNG_S)


def _open_descriptors() -> set[str]:
    gc.collect()  # maps have descriptors of their own
    return {name for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").exists()}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open descriptors are seen on Linux")
def test_a_machine_short_of_descriptors_starts_no_process_and_loses_none(
    start: Start, tmp_path: Path
) -> None:
    first = start()  # what it loads is loaded from now on
    first.child.kill("for a test")
    first.end()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = _open_descriptors()
    free = (number for number in itertools.count() if str(number) not in before)
    refused = 0
    while not refused or not first.child.alive:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(free), hard))
        try:
            first = start()
        except StorageError as error:
            refused, reason = refused + 1, str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if not first.child.alive:
            assert reason.startswith("cannot start a compute process: Too many open files; raise the limit")
            eventually(lambda: _open_descriptors() == before)
            assert list((tmp_path / "compute").iterdir()) == []
    assert refused > 4  # two arenas, each mapped, and a pipe


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "compute").write_text("")
    with pytest.raises(StorageError, match="choose another --state-dir"):
        make_scratch(tmp_path, "1")
    old = make_scratch(tmp_path / "state", "1")
    (old / "left").write_text("")
    assert list(make_scratch(tmp_path / "state", "1").iterdir()) == []
