"""Streams of workers: a newer one ends the older, and no line that is cut leaves one behind."""

from __future__ import annotations

import asyncio
import queue
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from benchmarks.fake_worker import FakeWorker
from coordinator.messages import instructions as do
from coordinator.server import Running, Server
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos import message_sizes
from protos.credentials import COORDINATOR, channel_credentials, name_options
from tests.coordinator.apps.test_service import Line
from tests.coordinator.serving import Owner, fleet, start
from tests.patience import HUNG_S, eventually


def served(running: Running) -> tuple[int, int]:
    """Streams of sessions that the coordinator serves now, and readers of them."""

    def count(server: Server) -> tuple[int, int]:
        found = asyncio.all_tasks()
        readers = sum(getattr(t.get_coro(), "__qualname__", "") == "WorkService._read" for t in found)
        return sum("atoll.v1.Work/Session" in t.get_name() for t in found), readers

    streams, readers = running.call(count)
    return int(streams), int(readers)


def again(worker: FakeWorker) -> FakeWorker:
    """Another process with the same identity."""
    return FakeWorker(
        worker.entry, worker.token, worker.name, identity=worker.identity, worker=worker.worker,
        work_port=worker.work_port, memory_bytes=worker.memory_bytes, incarnation=worker.incarnation + 1,
    )  # fmt: skip


def test_of_twenty_sessions_of_one_certificate_the_newest_alone_stays_open(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    (first,) = fleet(stack, running, 1)
    eventually(lambda: running.call(lambda server: len(server.shell.outboxes)) == 1)
    assert served(running) == (1, 1)
    found = [first]
    for _ in range(19):
        found.append(again(first))
        stack.callback(found[-1].stop)
        found[-1].start()
        assert found[-2].ended.wait(HUNG_S)
    assert all("copy of the same state folder" in worker.error for worker in found[:-1])
    eventually(lambda: served(running) == (1, 1))
    (worker,) = Owner(running).call("Status", pb.StatusRequest()).workers
    assert (worker.state, found[-1].ended.is_set()) == ("pool", False)


def test_the_log_names_who_comes_and_who_goes(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    with capture_logs() as logged:
        (worker,) = fleet(stack, running, 1, name="attic")
        worker.stop()
        eventually(lambda: any(entry["event"] == "session.closed" for entry in logged))
    named = [(e["event"], e["worker"], e["name"]) for e in logged if e["event"].startswith("session.")]
    assert named == [(event, worker.worker, "attic") for event in ("session.opened", "session.closed")]


def test_what_waited_for_a_replaced_session_is_not_said_to_it(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    (first,) = fleet(stack, running, 1)
    eventually(lambda: running.call(lambda server: len(server.shell.outboxes)) == 1)

    def replace(server: Server) -> tuple[int, str]:
        before = server.shell.outboxes[first.worker]
        before.queue.put_nowait(do.Release("a-job", 1, "stale"))
        server.shell.attach(type(before)(first.worker, before.session + 1, asyncio.Queue()))
        return before.queue.qsize(), before.reason

    assert running.call(replace) == (1, "a newer session replaced this one")  # the end alone
    assert first.ended.wait(HUNG_S)
    assert "release" not in first.received


def test_a_worker_that_reads_nothing_cannot_keep_a_replaced_stream(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.shell.CLOSE_WITHIN_S", 0.1)
    running = start(stack, tmp_path)
    worker = FakeWorker(f"127.0.0.1:{running.started.entry_port}", running.started.join_token)
    worker.enroll()
    assert worker.identity is not None
    channel = grpc.secure_channel(
        f"127.0.0.1:{running.started.work_port}",
        channel_credentials(worker.identity.ca_pem, worker.identity),
        options=[("grpc.http2.bdp_probe", 0), *name_options(COORDINATOR)],  # its window stays at 64 KiB
    )
    stack.callback(channel.close)
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    said.put(pb.FromWorker(introduction=worker.introduction()))
    call = rpc.WorkStub(channel).Session(iter(said.get, None))
    stack.callback(call.cancel)
    eventually(lambda: running.call(lambda server: len(server.shell.outboxes)) == 1)

    def fill(server: Server) -> None:
        for _ in range(200):  # 13 MB, more than windows and sockets take in unread
            server.shell.outboxes[worker.worker].queue.put_nowait(do.Release("j", 1, "x" * 65_000))

    running.call(fill)
    depths: list[int] = []

    def stuck() -> bool:
        depths.append(running.call(lambda server: server.shell.outboxes[worker.worker].queue.qsize()))
        return len(depths) > 5 and depths[-1] == depths[-5] < 200

    eventually(stuck)
    assert depths[-1] > 0, "the window took everything: nothing was shown"
    newer = again(worker)
    stack.callback(newer.stop)
    newer.start()
    eventually(lambda: served(running)[1] == 1)
    with pytest.raises(grpc.RpcError, match="copy of the same state folder"):
        list(call)  # once it reads again, it is told
    eventually(lambda: served(running) == (1, 1))


@pytest.mark.parametrize("body", ["heartbeat", "loaded", "introduction"])
def test_24_mib_of_empty_parts_from_a_worker_cost_the_coordinator_no_more_than_they_weigh(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    running = start(stack, tmp_path)
    (other,) = fleet(stack, running, 1)
    worker = FakeWorker(f"127.0.0.1:{running.started.entry_port}", running.started.join_token)
    worker.enroll()
    assert worker.identity is not None
    channel = grpc.secure_channel(
        f"127.0.0.1:{running.started.work_port}",
        channel_credentials(worker.identity.ca_pem, worker.identity),
        options=[("grpc.max_send_message_length", -1), *name_options(COORDINATOR)],
    )
    stack.callback(channel.close)
    parsed: list[int] = []
    real = message_sizes.read
    monkeypatch.setattr(
        "coordinator.services.workers.work.read",
        lambda kind, data: (real(kind, data), parsed.append(len(data)))[0],
    )
    number = pb.FromWorker.DESCRIPTOR.fields_by_name[body].number
    inner = b"\x0a\x00" * (24 << 19)
    hostile = _varint(number << 3 | 2) + _varint(len(inner)) + inner
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    said.put(pb.FromWorker(introduction=worker.introduction()).SerializeToString())
    said.put(hostile)
    call = channel.stream_stream("/atoll.v1.Work/Session")(iter(said.get, None))
    stack.callback(call.cancel)
    refused = lambda: next(  # noqa: E731
        (w for w in Owner(running).call("Status", pb.StatusRequest()).workers if w.worker == worker.worker),
        pb.WorkerStatus(),
    )
    eventually(lambda: "malformed" in refused().reason)
    assert f"of {len(inner)}" in refused().reason or f"of {len(hostile)}" in refused().reason
    assert max(parsed) < 64 << 10
    assert not other.ended.is_set()


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def test_a_work_line_cut_without_a_word_is_given_up(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path, keepalive_s=0.3, keepalive_timeout_s=2.0)
    line = Line(stack, running.started.work_port)
    worker = FakeWorker(f"127.0.0.1:{running.started.entry_port}", running.started.join_token)
    worker.enroll()
    worker.work_port = line.port
    stack.callback(worker.stop)
    worker.start()
    eventually(lambda: running.call(lambda server: len(server.shell.outboxes)) == 1)
    assert served(running) == (1, 1)
    line.cut.set()
    eventually(lambda: served(running) == (0, 0))
    assert running.call(lambda server: server.shell.outboxes) == {}
    assert not worker.ended.is_set(), "its own end has heard nothing"
