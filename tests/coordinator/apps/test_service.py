"""App runs over real gRPC with TLS: who may say what, and what becomes of those who say too much."""

from __future__ import annotations

import hashlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.errors import AccessDenied, AtollError, BadFrame, StorageError, UsageError
from benchmarks.fake_worker import FakeWorker
from coordinator.apps import hub as app_desk
from coordinator.apps import runs as app_runs
from coordinator.apps.parts import PartStore
from coordinator.client.client import Client
from coordinator.client.endpoint import Endpoint
from coordinator.config import CoordinatorConfig
from coordinator.server import Running, Server, serve
from protos import atoll_apps_pb2 as pb
from protos import atoll_apps_pb2_grpc as rpc
from protos import atoll_control_pb2 as control
from protos.credentials import COORDINATOR, JoinToken, channel_credentials, name_options
from protos.grpc_errors import to_atoll_error
from protos.text_limits import LINES_CHARS
from tests.patience import HUNG_S, eventually

ANSWERED_S = 2.0  # a busy machine answers a ping sooner
BUNDLE = b"no app, but bytes"
APP = pb.AppIdentity(hash=hashlib.sha256(BUNDLE).hexdigest(), size=len(BUNDLE), name="a", client="a:a")


@pytest.fixture
def running(stack: ExitStack, tmp_path: Path) -> Running:
    return start(stack, tmp_path)


def start(stack: ExitStack, folder: Path, **changes: Any) -> Running:
    found = serve(CoordinatorConfig(folder / "c", entry_port=0, wrong_token_delay_s=0.0, **changes))
    stack.callback(found.stop)
    return found


class Stream:
    """One end of a run's or a worker's stream."""

    def __init__(self, call: Any, first: Any, metadata: Any = ()) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queue.put(first)
        self.call = call(iter(self._queue.get, None), metadata=metadata, timeout=HUNG_S)

    def say(self, message: Any) -> None:
        self._queue.put(message)

    def until(self, kind: str) -> Any:
        """The next message of a kind."""
        for message in self.call:
            if message.WhichOneof("body") == kind:
                return getattr(message, kind)
        raise AssertionError(f"the stream ended before {kind}")

    def error(self) -> AtollError:
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self.call:
                pass
        return to_atoll_error(caught.value, "test")

    def close(self) -> None:
        self._queue.put(None)
        self.call.cancel()


class Line:
    """A connection to ``port`` that can be cut without a word to either end."""

    def __init__(self, stack: ExitStack, port: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.cut = threading.Event()
        near, self._far = None, socket.create_connection(("127.0.0.1", port))
        stack.callback(self._far.close)
        stack.callback(self._listening.close)

        def accept() -> None:
            nonlocal near
            near, _ = self._listening.accept()
            stack.callback(near.close)
            threading.Thread(target=self._pump, args=(self._far, near), daemon=True).start()
            self._pump(near, self._far)

        threading.Thread(target=accept, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.cut.is_set():
                    sink.sendall(data)


class Owner:
    def __init__(
        self, stack: ExitStack, running: Running, token: str | None = None, port: int | None = None
    ) -> None:
        made = JoinToken.decode(running.started.owner_token or "")
        self.channel = grpc.secure_channel(
            f"127.0.0.1:{port or running.started.entry_port}",
            channel_credentials(made.ca_pem),
            options=[*name_options(COORDINATOR), ("grpc.use_local_subchannel_pool", 1)],
        )
        stack.callback(self.channel.close)
        self.stub = rpc.AppsStub(self.channel)
        self.metadata = (("authorization", f"Bearer {token or made.presented}"),)
        self._stack = stack

    def open(self, run: int = 5, **changes: Any) -> Stream:
        opening = pb.AppOpen(**{"run": run, "app": APP, "bundle": BUNDLE, **changes})
        stream = Stream(self.stub.Run, pb.FromApp(open=opening), self.metadata)
        self._stack.callback(stream.close)
        return stream


class Node:
    """A worker that runs no app but says what it wants."""

    def __init__(self, stack: ExitStack, running: Running, name: str = "fake") -> None:
        started = running.started
        self.worker = FakeWorker(
            f"127.0.0.1:{started.entry_port}", started.join_token, name=name, memory_bytes=1 << 30
        )
        stack.callback(self.worker.stop)
        self.worker.start()
        # The work port wants the worker's certificate; its session's connection has shown it.
        self.stub = rpc.AppWorkStub(self.worker._channel)
        self.stream = Stream(self.stub.Attend, pb.FromNode(hello=pb.AppHello(incarnation=1)))
        stack.callback(self.stream.close)


def refused(call: Callable[[], Any]) -> AtollError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return to_atoll_error(caught.value, "test")


def test_only_the_owners_token_opens_a_run(stack: ExitStack, running: Running) -> None:
    stranger = Owner(stack, running, token="t-12345678.0011223344556677")
    assert isinstance(stranger.open().error(), AccessDenied)
    assert isinstance(refused(lambda: stranger.stub.EndRun(pb.AppClose(run=5))), AccessDenied)
    assert isinstance(refused(lambda: next(stranger.stub.GetParts(pb.PartList(run=5)))), AccessDenied)
    assert Owner(stack, running).open().until("fleet").workers == 0


def test_open_runs_are_listed_and_ended_by_their_owner_or_who_administers(
    stack: ExitStack, running: Running
) -> None:
    first = Owner(stack, running)
    token = JoinToken.decode(running.started.owner_token or "")
    with Client(Endpoint("127.0.0.1", running.started.entry_port, token)) as client:
        tokens = {name: client.create_owner(name, "submit").token for name in ("lab", "other")}
        lab, other = (
            Owner(stack, running, token=JoinToken.decode(tokens[name]).presented) for name in tokens
        )
        stream = lab.open(run=7)
        stream.until("fleet")
        first.open(run=5).until("fleet")
        found = client.app_runs()
        assert [(facts.run, facts.owner, facts.app.name, facts.partitions) for facts in found] == [
            (7, "lab", "a", 0),
            (5, "owner", "a", 0),
        ]
        assert all(facts.opened_s > 0 and not facts.app.signature for facts in found)
        refusal = refused(lambda: other.stub.EndRun(pb.AppClose(run=7), metadata=other.metadata))
        assert isinstance(refusal, AccessDenied)
        client.end_app_run(7, "not needed")
        assert stream.until("ended").reason == "not needed"
        assert [facts.run for facts in client.app_runs()] == [5]
        client.end_app_run(7, "again")  # ended already


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"run": 0}, BadFrame),
        ({"app": pb.AppIdentity(hash="x")}, BadFrame),
        ({"bundle": b"other bytes"}, BadFrame),
        ({"bundle": b"x" * (17 << 20)}, BadFrame),
    ],
)
def test_an_impossible_opening_is_refused(
    stack: ExitStack, running: Running, changes: dict[str, Any], kind: type[AtollError]
) -> None:
    owner = Owner(stack, running)
    assert isinstance(owner.open(**changes).error(), kind)
    owner.open().until("fleet")


def test_a_run_has_one_owner_and_parts_belong_to_it(stack: ExitStack, running: Running) -> None:
    owner = Owner(stack, running)
    owner.open().until("fleet")
    assert isinstance(owner.open().error(), UsageError)
    data = b"p" * 3_000_000
    name = hashlib.sha256(data).hexdigest()

    def put(run: int, name: str, data: bytes = data) -> Any:
        chunks = [
            pb.PartChunk(run=run, hash=name, size=len(data), offset=at, data=data[at : at + (1 << 20)])
            for at in range(0, len(data), 1 << 20)
        ]
        return owner.stub.PutParts(iter(chunks), metadata=owner.metadata)

    assert [part.hash for part in put(5, name).parts] == [name]
    wanted = pb.PartList(run=5, parts=[pb.Part(hash=name, offset=1)])
    got = b"".join(chunk.data for chunk in owner.stub.GetParts(wanted, metadata=owner.metadata))
    assert got == data[1:]
    assert isinstance(refused(lambda: put(6, name)), UsageError)
    assert isinstance(refused(lambda: put(5, "b" * 64)), UsageError)
    assert isinstance(refused(lambda: put(5, "../../x")), BadFrame)
    elsewhere = pb.PartList(run=5, parts=[pb.Part(hash="c" * 64)])
    assert isinstance(
        refused(lambda: next(owner.stub.GetParts(elsewhere, metadata=owner.metadata))), StorageError
    )


def begun(run: Stream, node: Node) -> pb.AppNode:
    """Start an opened run with the one node."""
    node.stream.until("offer")
    node.stream.say(pb.FromNode(ready=pb.AppReady(run=5)))
    while not run.until("fleet").ready:
        pass
    run.say(pb.FromApp(begin=pb.AppBegin(nodes=1)))
    [found] = run.until("nodes").nodes
    return found


def lent(running: Running, node: Node) -> str:
    """The job of the node's worker."""
    return str(
        running.call(lambda server: server.shell.scheduler.roster.workers[node.worker.worker].member.job)
    )


def test_workers_come_back_from_an_owner_whose_line_was_cut_without_a_word(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_runs, "OWNER_RETURNS_S", 0.1)
    running = start(stack, tmp_path, keepalive_s=0.2, keepalive_timeout_s=ANSWERED_S)
    line = Line(stack, running.started.entry_port)
    owner, node = Owner(stack, running, port=line.port), Node(stack, running)
    begun(owner.open(), node)
    # An owner who is silent, but there, keeps what it has.
    time.sleep(ANSWERED_S + 0.5)
    assert lent(running, node) == "app-5"
    line.cut.set()
    eventually(lambda: not lent(running, node))
    assert "not heard of" in node.stream.until("end").reason


def test_the_newest_stream_of_an_owner_takes_its_run_over(stack: ExitStack, running: Running) -> None:
    owner, node = Owner(stack, running), Node(stack, running)
    first = owner.open(key=b"k" * 16)
    me = begun(first, node)
    assert isinstance(owner.open(key=b"x" * 16, resume=True).error(), UsageError)
    second = owner.open(key=b"k" * 16, resume=True)
    assert [n.node for n in second.until("nodes").nodes] == [me.node]
    ended = first.error()
    assert isinstance(ended, UsageError)
    assert "has taken over" in str(ended)
    first.close()
    # Everything is the second one's now, and the end of the first is not that of the run.
    for number in range(3):
        second.say(pb.FromApp(task=pb.AppTask(message=f"m{number}", node=me.node, kind="train")))
        task = node.stream.until("task")
        node.stream.say(pb.FromNode(reply=pb.AppReply(run=5, message=task.message)))
        assert second.until("reply").message == f"m{number}"
    assert running.call(lambda server: server.desk.runs.runs[5].owner_gone_s) is None


def test_replies_wait_at_their_nodes_while_their_owner_reads_slowly(
    stack: ExitStack, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, count = 1 << 20, 40
    monkeypatch.setattr(app_desk, "OWNER_BYTES", 8 * size)
    owner, node = Owner(stack, running), Node(stack, running)
    run = owner.open()
    me = begun(run, node)
    for number in range(count):
        run.say(pb.FromApp(task=pb.AppTask(message=f"m{number}", node=me.node, kind="train")))
    for _ in range(count):
        message = node.stream.until("task").message
        node.stream.say(pb.FromNode(reply=pb.AppReply(run=5, message=message, content=b"x" * size)))

    def box(server: Server) -> tuple[int, int]:
        found = server.desk._owners[5]
        return len(found), found.bytes

    eventually(lambda: running.call(box)[1] > 2 * size)
    most = 0
    for _ in range(50):
        most = max(most, running.call(box)[1])
        time.sleep(0.01)
    assert most <= 4 * size
    assert {run.until("reply").message for _ in range(count)} == {f"m{n}" for n in range(count)}


def test_an_owner_who_does_not_read_what_cannot_wait_loses_its_run_and_hears_why(
    stack: ExitStack, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_desk, "OWNER_BYTES", 20_000)
    owner, node = Owner(stack, running), Node(stack, running)
    run = owner.open()
    begun(run, node)

    def flood(server: Server) -> None:
        """Errors for nodes that are not there, before anything can be read."""
        for number in range(1000):
            if 5 in server.desk.runs.runs:
                task = pb.FromApp(task=pb.AppTask(message=f"{number:0100}", node=1, kind="train"))
                server.desk.owner_says(5, server.desk._owners[5], task)

    running.call(flood)
    assert "wait for its owner, who does not read them" in run.until("ended").reason
    eventually(lambda: not lent(running, node))


def test_a_worker_that_says_the_same_over_and_over_is_not_heard(
    stack: ExitStack, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_desk, "NOTICES_PER_S", 1e-3)
    owner, node = Owner(stack, running), Node(stack, running)
    owner.open().until("fleet")
    node.stream.until("offer")
    for number in range(2 * app_desk.NOTICES):
        node.stream.say(pb.FromNode(refused=pb.AppRefused(run=5, reason=f"\x1b[2J no {number}")))
    assert "more than 100 times at once" in str(node.stream.error())

    def lines(server: Server) -> list[str]:
        return [line.fields_json for line in server.shell.logs.after(0, "")[1] if line.event == "app.refused"]

    logged = running.call(lines)
    assert 0 < len(logged) <= app_desk.NOTICES
    assert not any("\\u001b" in line for line in logged)
    # Nor is it by coming again.
    again = Stream(node.stub.Attend, pb.FromNode(hello=pb.AppHello(incarnation=2)))
    stack.callback(again.close)
    again.say(pb.FromNode(refused=pb.AppRefused(run=5, reason="x")))
    again.say(pb.FromNode(refused=pb.AppRefused(run=5, reason="y")))
    assert isinstance(again.error(), BadFrame)


def test_lines_of_a_worker_that_floods_the_log_are_counted_and_left_out(
    stack: ExitStack, running: Running
) -> None:
    worker = Node(stack, running).worker
    for _ in range(600):
        worker.say(log=control.WorkerLog(level="info", event="flood", fields_json="x" * 9000))

    def lines(server: Server) -> list[str]:
        return [line.fields_json for line in server.shell.logs.after(0, "")[1] if line.event == "worker.log"]

    eventually(lambda: len(running.call(lines)) >= LINES_CHARS // 9000)
    assert len(running.call(lines)) < 2 * LINES_CHARS // 8000


@pytest.mark.parametrize(
    "app",
    [
        {"name": "a\x1b[31m"},
        {"name": "a" * 300},
        {"version": "1\n2"},
        {"publisher": "\u202egnp.exe"},
        {"client": "a" * 2000},
    ],
)
def test_an_app_with_a_name_that_cannot_be_shown_is_refused(
    stack: ExitStack, running: Running, app: dict[str, str]
) -> None:
    identity = pb.AppIdentity()
    identity.CopyFrom(APP)
    identity.MergeFrom(pb.AppIdentity(**app))
    assert isinstance(Owner(stack, running).open(app=identity).error(), BadFrame)


def test_a_worker_sees_only_the_runs_it_was_offered(stack: ExitStack, running: Running) -> None:
    owner, node = Owner(stack, running), Node(stack, running)
    run = owner.open()
    assert node.stream.until("offer").app == APP
    bundle = pb.PartList(run=5, parts=[pb.Part(hash=APP.hash)])
    assert b"".join(chunk.data for chunk in node.stub.GetNodeParts(bundle)) == BUNDLE
    assert isinstance(refused(lambda: next(node.stub.GetNodeParts(pb.PartList(run=6)))), AccessDenied)
    chunk = pb.PartChunk(run=6, hash="a" * 64, size=1, data=b"x")
    assert isinstance(refused(lambda: node.stub.PutNodeParts(iter([chunk]))), AccessDenied)
    run.say(pb.FromApp(close=pb.AppClose(run=5)))
    node.stream.until("end")
    assert isinstance(refused(lambda: next(node.stub.GetNodeParts(bundle))), AccessDenied)


def test_small_parts_go_with_the_first_task_and_are_only_named_after_that(
    stack: ExitStack, running: Running
) -> None:
    owner, node = Owner(stack, running), Node(stack, running)
    run = owner.open()
    me = begun(run, node)
    assert (me.name, me.partition) == ("fake", 0)
    name = hashlib.sha256(b"small").hexdigest()
    for number, data in enumerate((b"small", b"")):
        part = pb.Part(hash=name, size=5, data=data)
        run.say(pb.FromApp(task=pb.AppTask(message=f"m{number}", node=me.node, kind="train", parts=[part])))
        task = node.stream.until("task")
        assert [p.data for p in task.parts] == [data]
        node.stream.say(pb.FromNode(reply=pb.AppReply(run=5, message=task.message, parts=[part])))
        assert run.until("reply").message == f"m{number}"
    status = running.call(lambda server: server.shell.scheduler.roster.workers[node.worker.worker].member.job)
    assert status == "app-5"
    # What was forgotten has to be sent anew.
    run.say(pb.FromApp(forget=pb.AppForget(run=5, hashes=[name])))
    lacking = pb.Part(hash=name, size=5)
    run.say(pb.FromApp(task=pb.AppTask(message="m2", node=me.node, kind="train", parts=[lacking])))
    assert isinstance(run.error(), BadFrame)


@pytest.mark.parametrize(
    "message",
    [
        pb.FromApp(),
        pb.FromApp(task=pb.AppTask(message="")),
        pb.FromApp(task=pb.AppTask(message="m", kind="k" * 300)),
        pb.FromApp(task=pb.AppTask(message="m", parts=[pb.Part(hash="a" * 64, size=3, data=b"abc")])),
        pb.FromApp(task=pb.AppTask(message="m", content=b"x" * (17 << 20))),
        pb.FromApp(forget=pb.AppForget(hashes=["x"])),
    ],
)
def test_a_hostile_message_ends_its_stream_and_nothing_else(
    stack: ExitStack, running: Running, message: pb.FromApp
) -> None:
    owner = Owner(stack, running)
    run = owner.open()
    run.until("fleet")
    run.say(message)
    assert isinstance(run.error(), BadFrame)
    owner.open(run=6).until("fleet")


def test_parts_are_kept_for_every_run_that_has_them_and_no_longer(tmp_path: Path) -> None:
    parts = PartStore(tmp_path / "parts", 1 << 30, 1 << 30)
    small, large = b"small", b"l" * 100
    names = [hashlib.sha256(data).hexdigest() for data in (small, large)]
    for run in (1, 2):
        parts.take_small(run, names[0], small)
        assert parts.write(run, "w-0", names[1], 100, 0, large)
    assert parts.drop(1, None, None) == ([], [])
    assert not parts.has(1, names[0])
    assert b"".join(parts.chunks(names[1], 90)) == b"l" * 10
    assert parts.drop(2, [names[0], "f" * 64], "") == ([names[0]], [])
    assert parts.drop(2, None, None) == ([names[1]], [names[1]])
    parts.delete([names[1]])
    assert not parts.store.has(names[1])
    with pytest.raises(BadFrame, match="damaged"):
        parts.take_small(1, names[0], b"other")


def test_a_node_cannot_spoil_the_part_that_another_sends(tmp_path: Path) -> None:
    parts = PartStore(tmp_path / "parts", 1 << 30, 1 << 30)
    data = b"an answer"
    name = hashlib.sha256(data).hexdigest()
    assert not parts.write(1, "w-1", name, 100, 0, b"another's")
    assert parts.write(1, "w-0", name, len(data), 0, data)
    assert b"".join(parts.chunks(name, 0)) == data


def test_what_two_nodes_answer_alike_stays_until_both_replies_are_taken(tmp_path: Path) -> None:
    parts = PartStore(tmp_path / "parts", 1 << 30, 1 << 30)
    data = b"the same"
    name = hashlib.sha256(data).hexdigest()
    assert parts.write(1, "w-0", name, 8, 0, data)
    parts.hand_over(1, "w-0", "m0", [name])
    assert parts.write(1, "w-1", name, 8, 0, data)
    assert parts.drop(1, [name], "m0") == ([], [])
    parts.hand_over(1, "w-1", "m1", [name])
    gone, files = parts.drop(1, [name], "m1")
    # It came once more before its file was removed.
    assert parts.write(1, "w-2", name, 8, 0, data)
    parts.delete(files)
    assert gone == [name]
    assert parts.store.has(name)
