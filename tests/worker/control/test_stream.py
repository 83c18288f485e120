"""A session's stream: in order both ways, one end, and why it ended."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import grpc.aio
import pytest

from atoll.errors import AccessDenied, AtollError, ConnectionFailed, JobFailed, NoWorkers, ProtocolMismatch
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.grpc_errors import ERROR_NAME
from tests.patience import HUNG_S
from worker.control.stream import Stream

Handler = Callable[[Iterator[pb.FromWorker], grpc.ServicerContext], Iterator[pb.ToWorker]]


def beat(step: int) -> pb.FromWorker:
    return pb.FromWorker(heartbeat=pb.Heartbeat(step=step))


class Coordinator(rpc.WorkServicer):
    """Answers a session as the test says."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        rpc.add_WorkServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Session(
        self, request_iterator: Iterator[pb.FromWorker], context: grpc.ServicerContext
    ) -> Iterator[pb.ToWorker]:
        yield from self._handler(request_iterator, context)

    def stop(self) -> None:
        self._server.stop(0).wait(HUNG_S)


class Session:
    """A stream to ``handler``, and what it told."""

    def __init__(
        self, handler: Handler, max_queued: int = 100, received: Callable[[Any], None] | None = None
    ) -> None:
        self.coordinator = Coordinator(handler)
        self.received: queue.Queue[pb.ToWorker] = queue.Queue()
        self.ends: queue.Queue[AtollError | None] = queue.Queue()
        address = f"127.0.0.1:{self.coordinator.port}"
        self.stream = Stream(
            lambda: grpc.aio.insecure_channel(address),
            (("atoll-worker", "w-1"),), address, beat(0), max_queued,
            received or self.received.put, self.ends.put,
        )  # fmt: skip

    def end(self) -> AtollError | None:
        """Why it ended; it must do so once."""
        error = self.ends.get(timeout=HUNG_S)
        time.sleep(0.05)
        assert self.ends.empty()
        return error


@pytest.fixture
def session() -> Iterator[Callable[..., Session]]:
    opened: list[Session] = []

    def make(handler: Handler, **options: Any) -> Session:
        opened.append(Session(handler, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.stream.close(wait=False)
        one.coordinator.stop()


def echo(requests: Iterator[pb.FromWorker], _: grpc.ServicerContext) -> Iterator[pb.ToWorker]:
    for request in requests:
        yield pb.ToWorker(commit=pb.StepCommit(step=request.heartbeat.step))


def test_what_is_said_arrives_in_order_from_several_threads(session: Callable[..., Session]) -> None:
    one = session(echo, max_queued=1000)
    talkers = [
        threading.Thread(target=lambda k=k: [one.stream.send(beat(1000 * k + n)) for n in range(100)])
        for k in (1, 2, 3)
    ]
    for talker in talkers:
        talker.start()
    steps = [one.received.get(timeout=HUNG_S).commit.step for _ in range(301)]
    assert steps[0] == 0  # the introduction
    for k in (1, 2, 3):
        assert [s for s in steps if s // 1000 == k] == [1000 * k + n for n in range(100)]


def test_a_received_message_may_be_answered_where_it_is_told(session: Callable[..., Session]) -> None:
    done = threading.Event()
    opened: queue.Queue[Session] = queue.Queue(1)

    def received(message: pb.ToWorker) -> None:
        one = opened.get(timeout=HUNG_S)
        opened.put(one)
        if message.commit.step == 20:
            done.set()
        else:
            one.stream.send(beat(message.commit.step + 1))

    opened.put(session(echo, received=received))
    assert done.wait(HUNG_S)


def test_closing_waits_until_what_was_said_has_left(session: Callable[..., Session]) -> None:
    heard: list[int] = []

    def listen(requests: Iterator[pb.FromWorker], _: grpc.ServicerContext) -> Iterator[pb.ToWorker]:
        heard.extend(request.heartbeat.step for request in requests)
        yield from ()

    one = session(listen)
    for step in range(1, 50):
        assert one.stream.send(beat(step))
    one.stream.close()
    assert heard == list(range(50))
    assert one.end() is None


def test_a_message_that_costs_more_than_it_may_ends_the_stream_unparsed(
    session: Callable[..., Session],
) -> None:
    def hostile(requests: Iterator[pb.FromWorker], _: grpc.ServicerContext) -> Iterator[pb.ToWorker]:
        copies = pb.KeepCopies(copies=[pb.StageCopy()] * (1 << 19))
        yield pb.ToWorker(keep_copies=copies)

    one = session(hostile)
    end = one.end()
    assert isinstance(end, ConnectionFailed)
    assert "parts in its first" in str(end)
    assert one.received.empty()


def test_a_stream_that_is_abandoned_ends_at_once_as_if_it_had_broken(session: Callable[..., Session]) -> None:
    one = session(echo)
    assert one.received.get(timeout=HUNG_S).commit.step == 0
    one.stream.abandon("this machine's address has changed")
    error = one.end()
    assert isinstance(error, ConnectionFailed)
    assert str(error) == "this machine's address has changed"


def test_a_coordinator_that_ends_the_session_is_no_error(session: Callable[..., Session]) -> None:
    def dismiss(requests: Iterator[pb.FromWorker], _: grpc.ServicerContext) -> Iterator[pb.ToWorker]:
        next(requests)
        yield pb.ToWorker(dismiss=pb.Dismiss(reason="enough"))

    one = session(dismiss)
    assert one.end() is None
    assert one.received.get_nowait().dismiss.reason == "enough"
    assert one.stream.send(beat(1))  # dropped


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, AccessDenied),
        (grpc.StatusCode.UNAVAILABLE, ConnectionFailed),
    ],
)
def test_a_refusal_says_why(
    session: Callable[..., Session], code: grpc.StatusCode, kind: type[AtollError]
) -> None:
    def refuse(requests: Iterator[pb.FromWorker], context: grpc.ServicerContext) -> Iterator[pb.ToWorker]:
        next(requests)
        context.abort(code, "not this one")
        yield from ()

    error = session(refuse).end()
    assert isinstance(error, kind)
    assert "not this one" in str(error)


@pytest.mark.parametrize("kind", [ProtocolMismatch, NoWorkers, JobFailed])
def test_a_refusal_is_of_the_class_that_the_coordinator_named(
    session: Callable[..., Session], kind: type[AtollError]
) -> None:
    def refuse(requests: Iterator[pb.FromWorker], context: grpc.ServicerContext) -> Iterator[pb.ToWorker]:
        next(requests)
        context.set_trailing_metadata(((ERROR_NAME, kind.__name__),))
        context.abort(grpc.StatusCode.ABORTED, "not this one")
        yield from ()

    error = session(refuse).end()
    assert type(error) is kind
    assert str(error) == "not this one"


def test_a_refusal_during_a_message_is_a_broken_session_at_least(session: Callable[..., Session]) -> None:
    def refuse(_: Iterator[pb.FromWorker], context: grpc.ServicerContext) -> Iterator[pb.ToWorker]:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not this one")
        yield from ()

    for _ in range(20):
        error = session(refuse).end()
        assert isinstance(error, AccessDenied | ConnectionFailed)
        assert "not this one" in str(error) or "broke during a message" in str(error)


def test_nobody_there_is_an_error() -> None:
    ends: queue.Queue[AtollError | None] = queue.Queue()
    stream = Stream(
        lambda: grpc.aio.insecure_channel("127.0.0.1:9"),
        (),
        "127.0.0.1:9",
        beat(0),
        10,
        lambda _: None,
        ends.put,
    )
    error = ends.get(timeout=HUNG_S)
    assert isinstance(error, ConnectionFailed)
    assert "no coordinator answers at 127.0.0.1:9" in str(error)
    stream.close()


def test_more_than_may_be_queued_ends_the_stream(session: Callable[..., Session]) -> None:
    hold = threading.Event()

    def deaf(_: Iterator[pb.FromWorker], __: grpc.ServicerContext) -> Iterator[pb.ToWorker]:
        hold.wait(HUNG_S)
        yield from ()

    one = session(deaf, max_queued=8)
    large = pb.FromWorker(log=pb.WorkerLog(fields_json="x" * 1_000_000))
    said = [one.stream.send(large) for _ in range(40)]
    assert said.index(False) >= 7  # the introduction may be the eighth
    assert one.end() is None
    hold.set()


def test_a_message_that_cannot_be_handled_ends_the_stream_with_an_error(
    session: Callable[..., Session],
) -> None:
    def broken(_: pb.ToWorker) -> None:
        raise KeyError("lost")

    error = session(echo, received=broken).end()
    assert isinstance(error, ConnectionFailed)
    assert "KeyError" in str(error)
