"""App runs over real gRPC with TLS: who may say what, and what becomes of those who say too much."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.errors import AccessDenied, AtollError, BadFrame, StorageError, UsageError
from benchmarks.fake_worker import FakeWorker
from coordinator.app_parts import PartStore
from coordinator.calls import told
from coordinator.config import CoordinatorConfig
from coordinator.server import Running, serve
from protos import atoll_apps_pb2 as pb
from protos import atoll_apps_pb2_grpc as rpc
from protos.credentials import COORDINATOR, JoinToken, channel_credentials, name_options

BUNDLE = b"no app, but bytes"
APP = pb.AppIdentity(hash=hashlib.sha256(BUNDLE).hexdigest(), size=len(BUNDLE), name="a", client="a:a")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def running(stack: ExitStack, tmp_path: Path) -> Running:
    found = serve(CoordinatorConfig(state_dir=tmp_path / "c", entry_port=0, wrong_token_delay_s=0.0))
    stack.callback(found.stop)
    return found


class Stream:
    """One end of a run's or a worker's stream."""

    def __init__(self, call: Any, first: Any, metadata: Any = ()) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queue.put(first)
        self.call = call(iter(self._queue.get, None), metadata=metadata, timeout=30)

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
        return told(caught.value, "test")

    def close(self) -> None:
        self._queue.put(None)
        self.call.cancel()


class Owner:
    def __init__(self, stack: ExitStack, running: Running, token: str | None = None) -> None:
        made = JoinToken.decode(running.started.owner_token or "")
        self.channel = grpc.secure_channel(
            f"127.0.0.1:{running.started.entry_port}",
            channel_credentials(made.ca_pem),
            options=name_options(COORDINATOR),
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
    return told(caught.value, "test")


def test_only_the_owners_token_opens_a_run(stack: ExitStack, running: Running) -> None:
    stranger = Owner(stack, running, token="t-12345678.0011223344556677")
    assert isinstance(stranger.open().error(), AccessDenied)
    assert isinstance(refused(lambda: stranger.stub.EndRun(pb.AppClose(run=5))), AccessDenied)
    assert isinstance(refused(lambda: next(stranger.stub.GetParts(pb.PartList(run=5)))), AccessDenied)
    assert Owner(stack, running).open().until("fleet").workers == 0


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
    node.stream.until("offer")
    node.stream.say(pb.FromNode(ready=pb.AppReady(run=5)))
    while not run.until("fleet").ready:
        pass
    run.say(pb.FromApp(begin=pb.AppBegin(nodes=1)))
    [me] = run.until("nodes").nodes
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
