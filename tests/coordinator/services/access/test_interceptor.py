"""Strangers cost little: nothing of a call is taken in, let alone parsed, before its token was looked at."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.errors import AccessDenied, BadFrame, ConnectionFailed, UsageError
from benchmarks.fake_worker import FakeWorker
from coordinator.config import CoordinatorConfig
from coordinator.server import Running
from coordinator.services.access import interceptor as access
from coordinator.services.access.interceptor import Calls, EntryThrottle
from coordinator.services.access.owners import Owners
from coordinator.services.workers import work
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.credentials import (
    COORDINATOR,
    Authority,
    JoinToken,
    channel_credentials,
    name_options,
    new_token,
    presented_in,
    secret_hash,
)
from tests.coordinator.serving import Owner, refused, start
from tests.parameters import sampled
from tests.patience import HUNG_S, eventually

LARGE = 12 << 20
WINDOW = 64 * 1024
OVERHEAD = 32 * 1024  # of TLS and HTTP/2 on one connection: handshake, headers, pings
WRONG = (("authorization", "Bearer " + "x" * 22),)


class Counting:
    """A way to a port that counts the bytes that its callers send."""

    def __init__(self, stack: ExitStack, port: int) -> None:
        self.sent, self._target = 0, port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        stack.callback(self._listening.close)
        stack.callback(self._listening.shutdown, socket.SHUT_RDWR)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, count: bool) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                self.sent += len(data) if count else 0
                sink.sendall(data)


def channel(stack: ExitStack, running: Running, port: int) -> grpc.Channel:
    """An anonymous connection to the entry port that would send messages of any size."""
    token = JoinToken.decode(running.started.join_token or "")
    options: list[tuple[str, Any]] = [("grpc.max_send_message_length", -1), *name_options(COORDINATOR)]
    made = grpc.secure_channel(f"127.0.0.1:{port}", channel_credentials(token.ca_pem), options=options)
    stack.callback(made.close)
    return made


def large() -> pb.BlobList:
    """A message whose parsed form is many times as large."""
    return pb.BlobList(blobs=[pb.BlobRef()] * (LARGE // 2))


# ---------------------------------------------------------------- before the token


@pytest.mark.parametrize(
    "metadata", sampled(1, [pytest.param(WRONG, id="wrong token"), pytest.param((), id="no token")])
)
def test_two_calls_of_12_mib_with_a_wrong_token_are_refused_before_they_arrive(
    stack: ExitStack, tmp_path: Path, metadata: Any
) -> None:
    running = start(stack, tmp_path)
    way = Counting(stack, running.started.entry_port)
    blobs = rpc.BlobsStub(channel(stack, running, way.port))
    message = large()
    assert message.ByteSize() >= LARGE
    calls = [blobs.Missing.future(message, metadata=metadata, timeout=HUNG_S) for _ in range(2)]
    assert all(isinstance(refused(call.result), AccessDenied) for call in calls)
    assert way.sent <= 2 * WINDOW + OVERHEAD, f"{way.sent} bytes were taken in"
    way = Counting(stack, running.started.entry_port)  # the others may still pass the first
    stub = rpc.EntryStub(channel(stack, running, way.port))
    request = pb.EnrollRequest(protocol=PROTOCOL_VERSION, csr_pem=bytes(LARGE))
    assert isinstance(refused(lambda: stub.Enroll(request, metadata=metadata, timeout=HUNG_S)), AccessDenied)
    assert way.sent <= WINDOW + OVERHEAD


def test_a_stream_with_a_wrong_token_is_refused_before_its_first_message(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    stub = rpc.EntryStub(channel(stack, running, running.started.entry_port))
    silent = threading.Event()
    stack.callback(silent.set)
    for metadata in (WRONG, ()):
        error = refused(lambda m=metadata: list(stub.Echo(never(silent), metadata=m, timeout=HUNG_S)))
        assert isinstance(error, AccessDenied)
        assert "join token" in str(error)


def test_a_greeting_is_answered_whatever_comes_with_it(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    way = Counting(stack, running.started.entry_port)
    stub = rpc.EntryStub(channel(stack, running, way.port))
    reply = stub.Hello(pb.HelloRequest(version="x" * LARGE), timeout=HUNG_S)
    assert (reply.protocol, reply.work_port) == (PROTOCOL_VERSION, running.started.work_port)
    assert way.sent <= WINDOW + OVERHEAD


class Recorder:
    """A service of one call a shape, whose messages are noted when they are parsed."""

    def __init__(self) -> None:
        self.parsed: list[int] = []

    def parse(self, data: bytes) -> bytes:
        self.parsed.append(len(data))
        return data

    def handlers(self) -> dict[str, Any]:
        async def unary(request: bytes, context: Any) -> bytes:
            return b"%d" % len(request)

        async def collected(requests: AsyncIterator[bytes], context: Any) -> bytes:
            return b"%d" % sum([len(request) async for request in requests])

        async def spread(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield b"%d" % len(request)

        async def through(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for request in requests:
                yield b"%d" % len(request)

        return {
            "UU": grpc.unary_unary_rpc_method_handler(unary, self.parse),
            "SU": grpc.stream_unary_rpc_method_handler(collected, self.parse),
            "US": grpc.unary_stream_rpc_method_handler(spread, self.parse),
            "SS": grpc.stream_stream_rpc_method_handler(through, self.parse),
        }


def asked(shape: str, service: str, metadata: Any, *messages: bytes) -> tuple[Any, list[int]]:
    """What a call of that shape is answered by a port with tokens, and the sizes of what was parsed.

    A client of grpc.aio whose call is answered while it sends may be given its own failure to send instead of
    the answer, about one call in a thousand: such a call is made again."""
    for _ in range(5):
        try:
            return asyncio.run(_asked(shape, service, metadata, *messages))
        except NotSent:
            continue
    raise AssertionError("no message could be sent")


class NotSent(Exception):
    """The client's library failed to send."""


async def _asked(shape: str, service: str, metadata: Any, *messages: bytes) -> tuple[Any, list[int]]:
    owner = new_token(AUTHORITY)
    with tempfile.TemporaryDirectory() as folder:
        owners = Owners(Path(folder), secret_hash(owner.presented), lambda: 0.0)
    gate = access.EntryAccess(owners, REGISTER, EntryThrottle(0.0), clock=lambda: 0.0)
    server, recorder = grpc.aio.server(interceptors=[gate]), Recorder()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, recorder.handlers()),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as client:
            kind = {"U": "unary", "S": "stream"}
            call = getattr(client, f"{kind[shape[0]]}_{kind[shape[1]]}")(f"/{service}/{shape}")
            given = messages[0] if shape[0] == "U" else iter(messages)
            used = metadata(owner) if callable(metadata) else metadata
            reply = call(given, metadata=used, timeout=HUNG_S)
            try:
                found = [part async for part in reply] if shape[1] == "S" else [await reply]
            except grpc.aio.AioRpcError as error:
                if "SendMessageOperation" in (error.details() or ""):
                    raise NotSent from None
                return error.code(), recorder.parsed
            return [int(part) for part in found], recorder.parsed
    finally:
        await server.stop(0)


class _Register:
    def admit(self, presented: str, now_s: float) -> None:
        if presented != "right":
            raise AccessDenied("no such token")


REGISTER: Any = _Register()
JOIN = (("authorization", "Bearer right"),)
SHAPES = ["UU", "SU", "US", "SS"]


@pytest.fixture(scope="module", autouse=True)
def authority(tmp_path_factory: pytest.TempPathFactory) -> None:
    global AUTHORITY
    AUTHORITY = Authority.open(tmp_path_factory.mktemp("ca"))


AUTHORITY: Authority


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("service", ["atoll.v1.Owner", "atoll.v1.Entry"])
def test_no_message_of_a_refused_call_is_parsed_not_even_a_small_one(shape: str, service: str) -> None:
    code, parsed = asked(shape, service, WRONG, b"12345")
    assert (code, parsed) == (grpc.StatusCode.UNAUTHENTICATED, [])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_owner_may_send_large_messages(shape: str) -> None:
    message = bytes(1 << 20)
    answer, parsed = asked(shape, "atoll.v1.Owner", lambda owner: owner.metadata, message)
    assert (answer, parsed) == ([len(message)], [len(message)])


@pytest.mark.parametrize("shape", SHAPES)
def test_who_holds_a_join_token_sends_64_kib_a_message_and_no_more(shape: str) -> None:
    most = access.MAX_ENTRY_BYTES
    answer, parsed = asked(shape, "atoll.v1.Entry", JOIN, bytes(most))
    assert (answer, parsed) == ([most], [most])
    code, parsed = asked(shape, "atoll.v1.Entry", JOIN, bytes(most + 1))
    assert (code, parsed) == (grpc.StatusCode.INVALID_ARGUMENT, [])
    code, parsed = asked(shape, "atoll.v1.Owner", JOIN, b"x")
    assert (code, parsed) == (grpc.StatusCode.UNAUTHENTICATED, []), "a join token opened an owner's call"


@pytest.mark.parametrize(
    ("metadata", "secret"),
    [
        (None, ""),
        ((), ""),
        ((("authorization", "Basic abc"),), ""),
        ((("authorization", "abc"),), ""),
        ((("authorization", "Bearer abc"), ("more", b"x")), "abc"),
        ((("authorization", "Bearer " + "y" * 9999),), "y" * 8192),
    ],
)
def test_a_secret_is_read_from_the_metadata(metadata: Any, secret: str) -> None:
    assert presented_in(metadata) == secret


# ---------------------------------------------------------------- how much at once


def test_a_caller_has_so_many_calls_and_others_have_theirs() -> None:
    calls = Calls(2, "address")
    with ExitStack() as held:
        for caller in "aab":
            held.enter_context(calls.one_of(caller))
        with pytest.raises(ConnectionFailed, match="2 calls of this address"):
            held.enter_context(calls.one_of("a"))
    with calls.one_of("a"), calls.one_of("a"):
        pass
    with suppress(UsageError), calls.one_of("a"):
        raise UsageError("x")
    assert not calls._open, "a caller that has gone is remembered"


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("ipv4:192.0.2.7:5000", "192.0.2.7"),
        ("ipv6:%5B2001:db8:1:2:3::4%5D:5000", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2::9]:5000", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "fe80::/64"),
        ("unix:", ""),
    ],
)
def test_an_address_is_counted_as_what_one_customer_has(peer: str, network: str) -> None:
    context: Any = type("Context", (), {"peer": lambda self: peer})()
    assert work.network_of(context) == network


@pytest.mark.parametrize(
    ("peers", "open_at_once"),
    [
        (["ipv4:192.0.2.7:1", "ipv4:192.0.2.7:2", "ipv4:192.0.2.7:3"], 2),
        (["ipv4:192.0.2.7:1", "ipv4:192.0.2.7:2", "ipv4:192.0.2.8:3"], 3),
        (["ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2", "ipv4:127.0.0.1:3"], 3),
        (["unix:a", "unix:b", "unix:c"], 3),
    ],
)
def test_one_address_has_so_many_sessions_whatever_certificates_they_show(
    peers: list[str], open_at_once: int
) -> None:
    sessions = Calls(2, "address")
    with ExitStack() as held:
        opened = 0
        for peer in peers:
            context: Any = type("Context", (), {"peer": lambda self, peer=peer: peer})()
            with suppress(ConnectionFailed):
                held.enter_context(sessions.one_of(work._place(context)))
                opened += 1
    assert opened == open_at_once


def never(ending: threading.Event) -> Iterator[Any]:
    """Messages of a caller that says nothing."""
    ending.wait(HUNG_S)
    yield from ()


def only_one_refused(stack: ExitStack, calls: list[Any], words: str) -> list[Any]:
    """Those of the calls that stay open, once one was told to try again."""
    stack.callback(lambda: [call.cancel() for call in calls])
    eventually(lambda: any(call.done() for call in calls))
    (over,) = [call for call in calls if call.done()]
    assert over.code() is grpc.StatusCode.UNAVAILABLE, "workers try again after that one alone"
    assert words in over.details()
    return [call for call in calls if call is not over]


def test_an_address_holds_so_many_calls_without_the_owners_token(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path, calls_per_address=3)
    stub, ending = rpc.EntryStub(channel(stack, running, running.started.entry_port)), threading.Event()
    stack.callback(ending.set)
    token = JoinToken.decode(running.started.join_token or "")
    calls = [stub.Echo(never(ending), metadata=token.metadata, timeout=HUNG_S) for _ in range(4)]
    held = only_one_refused(stack, calls, "3 calls of this address are open")
    newcomer = FakeWorker(f"127.0.0.1:{running.started.entry_port}", running.started.join_token)
    with pytest.raises(grpc.RpcError, match="3 calls of this address are open"):
        newcomer.enroll()
    assert Owner(running).call("Status", pb.StatusRequest()).workers == []
    ending.set()
    for call in held:
        assert isinstance(refused(lambda c=call: list(c)), BadFrame)
    eventually(lambda: _answered(lambda: newcomer.enroll() or True))


def test_wrong_tokens_are_answered_late_and_keep_nobody_waiting(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path, wrong_token_delay_s=60.0, wrong_tokens_at_once=2)
    blobs = rpc.BlobsStub(channel(stack, running, running.started.entry_port))
    calls = [blobs.Missing.future(pb.BlobList(), metadata=WRONG) for _ in range(5)]
    stack.callback(lambda: [call.cancel() for call in calls])
    eventually(lambda: sum(call.done() for call in calls) == 3)
    assert all(isinstance(refused(call.result), AccessDenied) for call in calls if call.done())
    assert Owner(running).call("Status", pb.StatusRequest()).workers == []
    FakeWorker(f"127.0.0.1:{running.started.entry_port}", running.started.join_token).enroll()


def test_a_worker_holds_so_many_calls(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path, calls_per_worker=4)
    worker = FakeWorker(f"127.0.0.1:{running.started.entry_port}", running.started.join_token)
    stack.callback(worker.stop)
    worker.start()
    eventually(lambda: running.call(lambda server: len(server.shell.outboxes)) == 1)
    stub, ending = worker.blobs(), threading.Event()
    stack.callback(ending.set)
    calls = [stub.Put.future(never(ending)) for _ in range(4)]  # beside its session
    held = only_one_refused(stack, calls, "4 calls of this worker are open")
    with pytest.raises(grpc.RpcError, match="4 calls of this worker are open"):
        stub.Held(pb.BlobList(), timeout=HUNG_S)
    ending.set()
    [call.result(HUNG_S) for call in held]
    eventually(lambda: _answered(lambda: stub.Held(pb.BlobList(), timeout=HUNG_S)))


def _answered(call: Callable[[], Any]) -> bool:
    """Whether a call is let in; a slot is free a moment after the end of the call that had it."""
    with suppress(grpc.RpcError):
        return call() is not None
    return False


def test_a_port_takes_so_many_calls_at_once_even_of_the_owner(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CoordinatorConfig(tmp_path, max_workers=1).max_calls >= 1024, "a small fleet's owner has room"
    monkeypatch.setattr(CoordinatorConfig, "max_calls", 3)
    owner = Owner(start(stack, tmp_path))
    calls = [owner.stub.Logs(pb.LogsRequest(follow=True), metadata=owner.metadata) for _ in range(4)]
    stack.callback(lambda: [call.cancel() for call in calls])
    eventually(lambda: any(call.done() for call in calls))
    (over,) = [call for call in calls if call.done()]
    assert over.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()
    eventually(lambda: _answered(lambda: owner.call("Status", pb.StatusRequest())))


def test_a_barred_worker_sends_nothing_that_is_parsed(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    worker = FakeWorker(f"127.0.0.1:{running.started.entry_port}", running.started.join_token)
    worker.enroll()
    assert worker.identity is not None
    Owner(running).call("Kick", pb.KickRequest(worker=worker.worker, for_good=True, reason="noise"))
    credentials = channel_credentials(worker.identity.ca_pem, worker.identity)
    made = grpc.secure_channel(
        f"127.0.0.1:{running.started.work_port}",
        credentials,
        options=[("grpc.max_send_message_length", -1), *name_options(COORDINATOR)],
    )
    stack.callback(made.close)
    raw = made.unary_unary("/atoll.v1.Blobs/Missing")  # bytes that no parser takes
    error = refused(lambda: raw(b"\xff" * 1000, timeout=HUNG_S))
    assert isinstance(error, AccessDenied)
    assert "noise" in str(error)


def test_bytes_that_are_no_message_are_refused_in_words(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    raw = channel(stack, running, running.started.entry_port).unary_unary("/atoll.v1.Entry/Enroll")
    metadata = JoinToken.decode(running.started.join_token or "").metadata
    error = refused(lambda: raw(b"\xff" * 1000, metadata=metadata, timeout=HUNG_S))
    assert isinstance(error, BadFrame)
    assert "1000 bytes are no EnrollRequest" in str(error)


def test_a_connection_without_tls_is_closed(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path, handshake_within_s=0.2)
    for port in (running.started.entry_port, running.started.work_port):
        with socket.create_connection(("127.0.0.1", port), HUNG_S) as silent:
            assert silent.recv(1) == b""


def test_a_connection_without_a_call_is_closed_and_the_next_call_opens_another(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path, idle_connection_s=0.2)
    made, closed = channel(stack, running, running.started.entry_port), threading.Event()
    stub = rpc.EntryStub(made)
    assert stub.Hello(pb.HelloRequest(), timeout=HUNG_S).protocol == PROTOCOL_VERSION
    made.subscribe(lambda state: closed.set() if state is grpc.ChannelConnectivity.IDLE else None)
    assert closed.wait(HUNG_S)
    assert stub.Hello(pb.HelloRequest(), timeout=HUNG_S).protocol == PROTOCOL_VERSION


def test_without_tokens_entry_takes_small_messages_alone(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path, insecure=True)
    made = grpc.insecure_channel(f"127.0.0.1:{running.started.entry_port}")
    stack.callback(made.close)
    request = pb.EnrollRequest(protocol=PROTOCOL_VERSION, csr_pem=bytes(access.MAX_ENTRY_BYTES))
    error = refused(lambda: rpc.EntryStub(made).Enroll(request, timeout=HUNG_S))
    assert isinstance(error, BadFrame)
    assert rpc.EntryStub(made).Enroll(pb.EnrollRequest(protocol=PROTOCOL_VERSION), timeout=HUNG_S).worker


@pytest.mark.parametrize(
    "wrong", [{"calls_per_address": 0}, {"calls_per_worker": 3}, {"idle_connection_s": 0.0}]
)
def test_impossible_bounds_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give"):
        CoordinatorConfig(tmp_path, **wrong)
