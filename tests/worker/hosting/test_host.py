"""The daemon's side of computing, against processes that keep the rules, break them, hang and die."""

from __future__ import annotations

import errno
import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from atoll.errors import AtollError, UsageError
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from tests.patience import HUNG_S, eventually
from tests.worker.hosting.scripted import taken
from tests.worker.hosting.world import World, neighbour
from worker.data.registry import dataset_folder
from worker.hosting import processes
from worker.hosting.contained import child
from worker.hosting.contained.launch import Launched
from worker.hosting.processes import MAX_DEATHS
from worker.machine.own_share import RESERVE_BYTES
from worker.pipe.keys import from_key
from worker.session import events, instructions
from worker.transport.frames import Direction, MessageKey

Start = Callable[..., World]
KEY = MessageKey("j", 1, 5, 0, 0, Direction.FORWARD)
PROBE = control.ProbeOps(request=9, ops=[control.ProbeOp()])


def moved() -> instructions.Reconfigure:
    message = control.Reconfigure(job="j", plan_version=2, step=10)
    return instructions.Reconfigure(events.Reconfigure("j", 2, 1, 10, (neighbour("w-c"),), message))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a world whose process does so on each kind of message."""
    worlds: list[World] = []

    def begin(**handlers: str) -> World:
        worlds.append(World(tmp_path / str(len(worlds)), handlers, monkeypatch))
        worlds[-1].start()
        return worlds[-1]

    yield begin
    for world in worlds:
        world.host.stop(0.2)


# ------------------------------------------------------------ a process that keeps the rules


def test_a_process_says_what_it_is_and_computes_a_step(start: Start) -> None:
    world = start(
        load="report(loaded=control.Loaded(job='j', plan_version=1))",
        run_step="report(ready=control.StepReady(job='j', plan_version=1, step=m.step))",
        evaluate="report(spans=control.Spans(job='j'))\n"
        "report(spans=control.Spans(job='k'))\n"
        "report(log=control.WorkerLog(job='j', event='stage.waits'))",
    )
    world.load()
    assert isinstance(world.event(), events.Loaded)
    world.host.do(instructions.RunStep("j", 1, 5))
    done = world.event()
    assert (type(done), done.job, done.version, done.step) == (events.StepReady, "j", 1, 5)
    assert [link.peer for link in done.links] == ["w-b"]  # what the links measured
    world.host.do(instructions.Evaluate(events.StepCommit("j", 1, 5, 1.0, False, True, False)))
    said = [world.sent.get(timeout=HUNG_S).WhichOneof("body") for _ in range(2)]
    assert said == ["spans", "log"]  # of its own job alone


def test_a_step_carries_the_joules_since_its_stage_was_loaded(start: Start) -> None:
    """The GPUs' counter comes by the status page; what a process claims of itself does not count."""
    world = start(
        load="report(loaded=control.Loaded(job='j', plan_version=1))",
        run_step="report(ready=control.StepReady(job='j', plan_version=1, step=m.step, energy_j=1e9))",
    )
    world.child.status.count(0, 0, 0, 1000.0)
    world.load()
    world.event()
    world.child.status.count(0, 0, 0, 1250.0)
    for at, joules in ((0, 250.0), (1, 0.0)):
        world.host.do(instructions.RunStep("j", 1, at))
        assert world.event().energy_j == joules


def test_a_stage_goes_on_with_other_neighbours_and_its_log_says_from_where_it_is_whole(start: Start) -> None:
    world = start(
        load="applied()",
        reconfigure="report(loaded=control.Loaded(job='j', plan_version=m.plan_version))",
    )
    assert world.host.logged_from == 0
    world.load(first_step=4)
    world.event()
    assert world.host.logged_from == 4
    world.host.do(events.StepCommit("j", 1, 9, 1.0, False, False, False, replay_from=8))
    assert world.host.logged_from == 8
    world.host.do(moved())
    loaded = world.event()
    assert (type(loaded), loaded.version) == (events.Loaded, 2)
    assert ("j", 1) in world.network.forgotten
    assert world.host._state.links == (neighbour("w-c").link,)
    world.host.do(events.Release("j", 2, "over"))
    assert world.host.logged_from == 0


def test_neighbours_are_expected_though_the_stage_is_not_loaded_yet(start: Start) -> None:
    world = start()  # whose process never asks to be connected
    world.network.joined = False
    world.load()
    assert world.network.expected == ["w-b"]
    world.host.do(moved())
    assert world.network.expected == ["w-b", "w-c"]


def test_a_stage_that_is_gone_is_not_reconfigured(start: Start) -> None:
    world = start(load="applied()")
    world.load()
    world.event()
    world.child.kill("for a test")
    assert isinstance(world.event(), events.StageFailed)
    world.host.do(moved())
    broke = world.event()
    assert "the stage is gone" in broke.reason


def test_what_an_earlier_life_logged_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "state" / "send_log" / "3"
    left.mkdir(parents=True)
    world = World(tmp_path / "state", {}, monkeypatch)
    world.start()
    assert not left.exists()
    world.host.stop(0.2)


def test_a_device_that_is_not_there_is_an_error_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "say(ready=pb.ComputeReady(error='no CUDA device here'))"
    world = World(tmp_path, {"setup": says}, monkeypatch)
    with pytest.raises(UsageError, match="no CUDA device here"):
        world.start()
    world.host.stop(0.2)


def test_a_process_that_cannot_begin_shows_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, {"setup": "print('no such library', flush=True); os._exit(3)"}, monkeypatch)
    with pytest.raises(AtollError, match=r"ended \(exit code 3\)\nno such library"):
        world.start()


def test_tensors_travel_both_ways_through_the_arenas(start: Start) -> None:
    """The arenas are mapped by the process itself, which sends back what came, reversed."""
    world = start(
        load="global incoming, outgoing\n"
        "from worker.pipe.arena import Arena\n"
        "incoming, outgoing = (Arena(int(sys.argv[i]), int(sys.argv[i + 1])) for i in (2, 4))\n"
        "key = pb.Key(job='j', plan_version=1, step=5, direction=3)\n"
        "say(wanted=pb.WantedList(messages=[pb.Wanted(peer='w-b', key=key, max_bytes=9)]))\n"
        "applied()",
        arrived="data = incoming.block(m.offset, m.size)[::-1]\n"
        "place = outgoing.block(8192, m.size)\n"
        "place[:] = data\n"
        "say(freed=[m.offset])\n"
        "m.key.direction = 0\n"
        "say(outgoing=pb.Outgoing(peer='w-b', key=m.key, header=b'h', offset=8192, size=m.size))",
        freed="applied(m[0])",
    )
    world.load()
    world.event()
    receiver = world.network.receivers["j"]
    assert receiver.expect("w-b", KEY, 10) is None
    place = receiver.expect("w-b", KEY, 3)
    assert place is not None
    place[:] = b"abc"
    receiver.deliver("w-b", KEY, b"h", place)
    peer, key, header, data = world.network.sent.get(timeout=HUNG_S)
    assert (peer, key, header, data) == ("w-b", KEY._replace(direction=Direction.BACKWARD), b"h", b"cba")
    world.host.do(instructions.Interrupt("any message takes along what the daemon has sent"))
    assert world.event().step == 8192


def test_a_process_gets_blobs_batches_and_connections_of_its_job(start: Start) -> None:
    world = start(
        setup="global scratch\nscratch = m.scratch_dir\nready()",
        load="say(fetch=pb.FetchBlobs(request=1, blobs=[control.BlobRef(hash='a' * 64, size=5)]))\n"
        "open(scratch + '/0', 'w').write('hello')\n"
        "file = pb.StoreFile(hash='b' * 64, size=5, path=scratch + '/0')\n"
        "say(store=pb.StoreFiles(request=2, files=[file]))\n"
        "say(connect=pb.JobLinks(request=3))\n"
        "asked = control.BatchRequest(job='j', inputs=['x'], first_step=4, count=2)\n"
        "say(batches=pb.FetchBatches(request=4, batches=asked))",
        answer="assert not m.kind, m\napplied(m.request)",
        batch="applied(100 + m.batch.step)",
    )
    world.load()
    assert sorted(world.event().step for _ in range(6)) == [1, 2, 3, 4, 104, 105]
    assert world.blobs.fetched == [{"a" * 64: 5}]
    assert [(file.hash, file.path.name) for file in world.blobs.stored] == [("b" * 64, "0")]
    assert world.network.admitted == ["w-b"]


def test_batches_of_a_job_that_was_released_meanwhile_are_not_sent(start: Start) -> None:
    world = start(
        load="say(batches=pb.FetchBatches(request=4, batches=control.BatchRequest(job='k')))",
        answer="applied(m.request if m.error == 'cancelled' else 0)",
        batch="applied(100)",
    )
    world.load()
    assert world.event().step == 4


def test_what_was_said_of_the_assignment_before_is_left_and_harms_nobody(start: Start) -> None:
    """Of the same job and version, as where a standby is given another rank."""
    of_before = "key = pb.Key(job='j', plan_version=1, step=5, direction=3)\n"
    world = start(
        load_asked=of_before + "say(wanted=pb.WantedList(messages=[pb.Wanted(peer='w-x', key=key)]))\n"
        "say(outgoing=pb.Outgoing(peer='w-x', key=key, offset=0, size=3))\n"
        "say(connect=pb.JobLinks(request=3))\n"
        "say(batches=pb.FetchBatches(request=4, batches=control.BatchRequest(job='j')))\n"
        "say(forget=pb.JobLinks(job='j', plan_version=1))\n"
        "report(failed=control.StageFailed(job='j', plan_version=1))\n"
        "report(ops_probed=control.OpsProbed(request=9))",
        answer="applied(m.request if m.error == 'cancelled' else 0)",
        batch="applied(100)",
    )
    world.host.do(events.ProbeOps(9, PROBE))
    before = world.child
    world.load()
    assert isinstance(world.event(), events.OpsProbed)
    assert sorted(world.event().step for _ in range(2)) == [3, 4]
    world.load()
    assert sorted(world.event().step for _ in range(2)) == [3, 4]
    assert world.child is before
    assert world.network.sent.empty()
    assert world.network.admitted == []


def test_what_a_killed_daemon_left_on_the_disk_is_gone_at_the_next_start(
    start: Start, tmp_path: Path
) -> None:
    kept = tmp_path / "0" / "compute" / "main.py"  # of a user whose own folder it is
    left = [tmp_path / "0" / name for name in ("compute/77-1/0", "send_log/4/1")]
    for file in (kept, *left):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    world = start()
    assert [file.parent.exists() for file in (kept, *left)] == [True, False, False]
    assert world.child.scratch.is_dir()


# ------------------------------------------------------------ rules that are broken

_KEY = "key = pb.Key(job={job!r}, plan_version=1, step=5, direction=3)\n"
BREACHES = {
    "rubbish": ("pipe._socket.sendall(b'\\0\\0\\0\\4' + b'\\xff' * 4)", "a damaged message"),
    "too long": ("pipe._socket.sendall(b'\\xff' * 8)", "a message of 4294967295 bytes"),
    "beyond a bound": (
        "report(failed=control.StageFailed(job=held, lost_peer='w\\n'))",
        "StageFailed.lost_peer 'w\\n' holds control characters",
    ),
    "speaks for us": (
        "report(leaving=control.Leaving(reason='bye'))",
        "a message to the coordinator of kind leaving",
    ),
    "our file": (
        "file = pb.StoreFile(hash='b' * 64, size=5, path='/etc/passwd')\n"
        "say(store=pb.StoreFiles(request=1, files=[file]))",
        "a file to store at '/etc/passwd', which is not the compute process's own",
    ),
    "a way up": (
        "file = pb.StoreFile(hash='b' * 64, size=5, path=scratch + '/../secret')\n"
        "say(store=pb.StoreFiles(request=1, files=[file]))",
        "which is not the compute process's own",
    ),
    "no hash": (
        "say(fetch=pb.FetchBlobs(request=1, blobs=[control.BlobRef(hash='../key', size=5)]))",
        "blob",
    ),
    "another job's tensors": (
        _KEY.format(job="k") + "say(wanted=pb.WantedList(messages=[pb.Wanted(peer='w-b', key=key)]))",
        "a message of job 'k' with 'w-b'",
    ),
    "a stranger's tensors": (
        _KEY.format(job="a stranger's tensors")
        + "say(outgoing=pb.Outgoing(peer='w-x', key=key, offset=8192, size=3))",
        "with 'w-x', none of which is here",
    ),
    "our memory": ("say(outgoing=pb.Outgoing(offset=0, size=8))", "bytes 0 to 8 of an arena"),
    "ready again": ("ready()", "it was ready before"),
    "a log of no kind": (
        "say(log=pb.ComputeLog(level='close', event='op', fields_json='{}'))",
        "an event of no kind in the log",
    ),
    "a damaged log": (
        "say(log=pb.ComputeLog(level='info', event='op', fields_json='{' * 9999))",
        "an event with damaged fields in the log",
    ),
    "silent end": ("pipe.close(); time.sleep(600)", "it closed its pipe"),
    "exit": ("print('last words', flush=True); os._exit(7)", "exit code 7"),
    "signal": ("os.kill(os.getpid(), 11)", "SIGSEGV"),
}


def test_whoever_breaks_a_rule_is_ended_with_the_reason_and_another_takes_over(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each breach is a job of its own; between them the same host goes on."""
    cases = "".join(
        f"if m.job == {job!r}:\n" + "".join(f"    {line}\n" for line in code.splitlines())
        for job, (code, _) in BREACHES.items()
    )
    world = start(
        setup="global scratch\nscratch = m.scratch_dir\nready()",
        load=f"{cases}if m.job == 'honest':\n    applied()",
    )
    seen = {world.child.launched.pid}
    for job, (_, reason) in BREACHES.items():
        monkeypatch.setattr(
            child, "TUNED", replace(child.TUNED, ends_within_s=0.1 if job == "silent end" else HUNG_S)
        )
        world.load(job)
        broke = world.event()
        assert (type(broke), broke.job, broke.gone) == (events.StageFailed, job, True)
        assert reason in broke.reason, job
        assert "the compute process ended" in broke.reason
        seen.add(world.child.launched.pid)
    assert len(seen) == len(BREACHES) + 1
    world.load("honest")
    assert isinstance(world.event(), events.StepApplied)
    assert world.blobs.stored == []
    assert world.blobs.fetched == []


def test_a_process_that_does_not_read_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    world = start(load="time.sleep(600)")
    world.load()
    monkeypatch.setattr(child, "MAX_UNREAD_BYTES", 1 << 20)
    order = "x" * (1 << 19)
    for _ in range(8):
        world.host.do(instructions.Interrupt(order))
    assert "it does not read what it is sent" in world.event().reason


def test_what_a_process_asks_for_waits_until_it_reads(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches are asked for faster than they are read; only so many are under way."""
    monkeypatch.setattr(child, "MAX_UNREAD_BYTES", 1 << 16)
    world = start(
        load="global n\nn = 0\nasked = control.BatchRequest(job='j', inputs=['x'], count=5000)\n"
        "say(batches=pb.FetchBatches(request=1, batches=asked))\ntime.sleep(0.3)",
        batch="global n\nn += 1",
        answer="applied(n)",
    )
    world.load()
    assert world.event().step == 5000


def test_a_process_that_answers_no_ping_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    world = start(ping="pass", load="pass")
    eventually(lambda: world.host._state.now is not None and world.host._state.now.ready)
    quick = replace(processes.TUNED, ping_s=0.05, pong_s=0.3, process_look_s=0.02)
    monkeypatch.setattr(processes, "TUNED", quick)
    world.load()
    assert "it has not answered for" in world.event().reason


def test_an_op_that_does_not_end_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.hosting.watch.TUNED", replace(processes.TUNED, seen_s=0.01))
    monkeypatch.setattr(processes, "TUNED", replace(processes.TUNED, process_look_s=0.02))
    world = start(
        load="from worker.pipe.arena import Arena\n"
        "from worker.pipe.status import ComputeStatus, Mark\n"
        "status = ComputeStatus(Arena(int(sys.argv[4]), int(sys.argv[5])).head)\n"
        "status.begin(status.encoded(Mark(\"op 'aten.special_zeta.default' (loss)\", 0.2)))\n"
        "while True:\n    pass"
    )
    world.load()
    reason = world.event().reason
    assert reason.startswith("op 'aten.special_zeta.default' (loss) ended the compute process")
    assert "what is honest ends within 0 s" in reason


# ------------------------------------------------------------ deaths


def test_a_job_that_ends_three_processes_is_refused_and_others_are_not(start: Start) -> None:
    world = start(load="if m.job == 'j':\n    os._exit(3)\napplied()")
    for _ in range(MAX_DEATHS):
        world.load()
        broke = world.event()
        assert broke.gone
        assert "exit code 3" in broke.reason
    world.load()
    refused = world.event()
    assert isinstance(refused, events.StageFailed)
    assert not refused.gone
    assert "takes no more of job j, which ended its process 3 times" in refused.reason
    assert "exit code 3" in refused.reason
    world.load("k")
    assert world.event().job == "k"


def test_a_site_that_comes_back_smaller_is_introduced_anew_and_what_it_was_given_meanwhile_is_planned_anew(
    start: Start,
) -> None:
    facts = "control.DeviceFacts(kind='cpu', memory_limit_bytes=1 << 30, processes=1 if m.may_shrink else 2)"
    world = start(
        setup=f"time.sleep(m.may_shrink * 0.5)\nsay(ready=pb.ComputeReady(device={facts}))",
        load="if m.plan_version == 1:\n    os._exit(3)",
    )
    resized = queue.SimpleQueue[bool]()
    world.host._state.ports = replace(world.ports, resized=lambda: resized.put(True))
    assert world.host.device.processes == 2
    world.load()
    assert "exit code 3" in world.event().reason
    world.load(version=2)  # before it is known what the site has left
    assert resized.get(timeout=HUNG_S)
    again = world.event()
    assert (type(again), again.version, again.gone) == (events.StageFailed, 2, True)
    assert again.reason == "this site goes on with 1 of 2 processes"
    assert world.host.device.processes == 1


def test_a_process_that_ends_at_rest_starts_again_after_a_pause_and_ops_are_refused_meanwhile(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TUNED", replace(processes.TUNED, again_first_s=HUNG_S))
    world = start(
        report_codecs="report(codec_speeds=control.CodecSpeeds())",
        time_ops="report(ops_probed=control.OpsProbed(request=m.request))",
    )
    world.host.report_codecs()
    world.sent.get(timeout=HUNG_S)
    world.child.kill("for a test")
    eventually(lambda: world.host._state.now is None)
    world.host.do(events.ProbeOps(9, PROBE))
    answer = world.event()
    assert answer.request == 9
    assert "for a test" in answer.error
    world.host._processes._again()  # the pause is over
    world.sent.get(timeout=HUNG_S)  # the next one was asked for the codecs again
    world.host.do(events.ProbeOps(9, PROBE))
    assert not world.event().error
    assert world.posted.empty()  # no job was concerned


def _short_of_descriptors(monkeypatch: pytest.MonkeyPatch, times: int) -> Mock:
    """What starts processes from now on; so many of them cannot be started."""
    errors = [OSError(errno.EMFILE, "Too many open files")] * times
    tried = Mock(wraps=Launched, side_effect=[*errors, *[DEFAULT] * 9])
    monkeypatch.setattr(child, "Launched", tried)
    return tried


@pytest.mark.parametrize("loaded", [False, True])
def test_a_process_that_could_not_be_started_is_started_later(
    start: Start, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    monkeypatch.setattr(processes, "TUNED", replace(processes.TUNED, again_first_s=0.01))
    world = start(load="applied()")
    if loaded:
        world.load()
        world.event()
    tried = _short_of_descriptors(monkeypatch, 2)
    world.child.kill("for a test")
    if loaded:
        assert world.event().gone
    eventually(
        lambda: world.host._state.now is not None and world.host._state.now.ready and tried.call_count == 3
    )
    assert world.posted.empty()


def test_a_stage_without_a_process_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    world = start(load="applied()")
    world.host.make_room()
    _short_of_descriptors(monkeypatch, 1)
    world.load()
    broke = world.event()
    assert (type(broke), broke.gone) == (events.StageFailed, False)
    assert broke.reason.startswith("cannot start a compute process: Too many open files; raise the limit")
    world.load("k")
    assert isinstance(world.event(), events.StepApplied)


def test_ops_that_end_their_process_are_answered_once_and_nobody_hears_of_others(start: Start) -> None:
    world = start(
        load="report(ops_probed=control.OpsProbed(request=8))\napplied()",
        time_ops="os._exit(3)",
    )
    world.load()
    assert isinstance(world.event(), events.StepApplied)  # nobody asked for request 8
    world.host.do(events.Release("j", 1, "over"))
    world.host.do(events.ProbeOps(9, PROBE))
    assert "exit code 3" in world.event().error


def test_the_way_to_the_coordinator_is_timed_without_waiting_for_what_computes(start: Start) -> None:
    world = start(load="time.sleep(600)")
    world.load()
    world.host.do(events.ProbeOps(7, control.ProbeOps(request=7)))
    assert world.posted.get_nowait().request == 7


def test_what_a_job_said_after_it_was_dropped_is_not_passed_on(start: Start) -> None:
    world = start(drop="applied(1)", load="applied(2)")
    world.load()
    assert world.event().step == 2
    world.host.do(events.Release("j", 1, "over"))
    assert world.network.receivers == {}
    assert ("j", None) in world.network.forgotten
    world.load("k")
    assert (taken(world.posted).job, world.posted.empty()) == ("k", True)


# ------------------------------------------------------------ federated jobs

JOINED = "report(loaded=control.Loaded(job='f', plan_version=2))"
TRAINED = (
    "update = control.UpdateReady(job='f', round=m.round)\n"
    "update.update.hash = 'a' * 64\n"
    "report(update_ready=update)"
)


def test_a_federated_job_has_a_process_of_its_own_which_strangers_ops_do_not_get(start: Start) -> None:
    world = start(
        join=JOINED,
        time_ops="report(ops_probed=control.OpsProbed(request=m.request))",
        load="applied()",
    )
    shared = world.child
    world.join()
    assert isinstance(world.event(), events.Loaded)
    own = world.child
    assert own is not shared
    data = dataset_folder(world.state_dir, "mine").absolute()
    assert data in own.view.read_only
    assert [path.parent.name for path in own.view.read_write] == ["federated", "compute"]
    assert data not in shared.view.read_only
    world.host.do(events.Release("f", 2, "over"))
    world.host.do(events.ProbeOps(9, PROBE))
    assert world.event().request == 9
    assert data not in world.child.view.read_only
    world.join()
    world.event()
    world.load()
    assert world.event().job == "j"
    assert data not in world.child.view.read_only


def test_a_federated_job_that_loses_its_process_between_rounds_joins_again_by_itself(start: Start) -> None:
    world = start(join=JOINED, train=TRAINED)
    world.join()
    assert isinstance(world.event(), events.Loaded)
    world.child.kill("for a test")
    assert isinstance(world.event(), events.Loaded)  # another process's, and no failure before it
    world.train(4)
    update = world.event()
    assert (type(update), update.round) == (events.UpdateReady, 4)


def test_a_round_whose_process_dies_has_failed_and_the_next_one_is_trained(start: Start) -> None:
    world = start(join=JOINED, train=f"if m.round == 4:\n    os._exit(3)\n{TRAINED}")
    world.join()
    world.event()
    world.train(4)
    broke = world.event()
    assert (type(broke), broke.round, broke.during) == (events.ClientFailed, 4, "train")
    assert "exit code 3" in broke.reason
    world.train(5)
    found = [world.event(), world.event()]
    assert [type(event) for event in found] == [events.Loaded, events.UpdateReady]


def test_a_round_that_was_ordered_while_the_job_is_joined_again_is_not_forgotten(start: Start) -> None:
    """The word that it joined does not end the round that was ordered meanwhile."""
    world = start(join=JOINED, train="if m.round == 5:\n    time.sleep(600)\nos._exit(3)")
    world.join()
    world.event()
    world.train(4)
    assert world.event().during == "train"
    world.train(5)  # before the next process has said that it joined
    assert isinstance(world.event(), events.Loaded)
    world.child.kill("for a test")
    broke = world.event()
    assert (type(broke), broke.round) == (events.ClientFailed, 5)


def test_a_federated_job_that_ends_three_processes_is_refused(start: Start) -> None:
    world = start(join=JOINED, train="os._exit(3)")
    world.join()
    world.event()
    for at_round in range(MAX_DEATHS):
        world.train(at_round)
        broke = world.event()
        assert (type(broke), broke.round) == (events.ClientFailed, at_round)
        if at_round < MAX_DEATHS - 1:
            assert isinstance(world.event(), events.Loaded)
    for refused in (lambda: world.train(7), world.join):
        refused()
        broke = world.event()
        assert "takes no more of job f" in broke.reason
        assert broke.during == "load"  # so that the job's rounds are not repeated for this client
    assert world.child.view.read_write == (world.child.scratch,)  # ready for other jobs, without its data


def test_keys_on_the_scripted_pipe_are_those_of_the_transport() -> None:
    key = pb.Key(job="j", plan_version=1, step=5, direction=3)
    assert from_key(key) == KEY


# ------------------------------------------------------------ a guest's manners


def test_a_suspended_host_has_no_process_and_wakes_with_other_limits(start: Start) -> None:
    world = start(setup="ready(); say(codec_speeds=f'{m.compute_share} {m.memory_bytes}'.encode())")
    first = world.child
    world.load()
    world.host.limit_share(0.25)
    assert not world.host.limit_memory(0, 0)
    assert world.host.limit_memory(1 << 34, 0)
    world.host.do(instructions.Suspend("by its owner"))
    eventually(lambda: not first.alive)
    assert world.host._state.now is None
    assert world.host.memory_bytes == 0
    world.host.do(events.ProbeOps(3, PROBE))
    assert isinstance(world.event(), events.OpsProbed)
    world.host.do(instructions.Wake())
    eventually(
        lambda: world.child.alive and world.host._state.now is not None and world.host._state.now.ready
    )
    assert world.child is not first
    eventually(lambda: world.host._state.speeds.read() == f"0.25 {1 << 34}".encode())
    facts = world.host.device
    assert facts.memory_limit_bytes + facts.own_memory_bytes == 1 << 34
    bound = world.child.launched.bound
    assert bound is not None
    assert facts.own_memory_bytes > RESERVE_BYTES + bound.baseline_bytes // 2


def test_a_host_makes_room_for_an_app_while_it_holds_no_job(start: Start) -> None:
    world = start(
        load="report(loaded=control.Loaded(job='j', plan_version=1))",
        time_ops="report(ops_probed=control.OpsProbed(request=3))",
    )
    first = world.child
    world.host.make_room()
    eventually(lambda: not first.alive)
    assert world.host._state.now is None
    assert world.host.device.kind  # what is known of it stays known
    world.host.do(events.ProbeOps(3, PROBE))
    probed = world.event()
    assert (type(probed), probed.request) == (events.OpsProbed, 3)
    world.host.make_room()
    assert world.host._state.now is None
    world.load()
    assert isinstance(world.event(), events.Loaded)
    holding = world.child
    world.host.make_room()
    assert world.child is holding
    world.host.do(events.Release("j", 1, "over"))
    world.host.make_room()
    assert world.host._state.now is None
    world.host.do(instructions.Suspend("by its owner"))
    world.host.do(events.ProbeOps(4, PROBE))
    assert isinstance(world.event(), events.OpsProbed)  # without a process: the owner has the machine
    assert world.host._state.now is None


def test_a_share_reaches_the_process_that_runs(start: Start) -> None:
    world = start(compute_share="say(codec_speeds=str(m).encode())")
    world.host.limit_share(0.5)
    eventually(lambda: world.host._state.speeds.read() == b"0.5")
