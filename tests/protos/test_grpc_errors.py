"""Errors over gRPC: whoever calls hears the class that the server raised."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator

import grpc
import pytest

from atoll import errors
from atoll.errors import (
    AccessDenied,
    AtollError,
    ConnectionFailed,
    JobFailed,
    NotEnoughMemory,
    PlanError,
    ProtocolMismatch,
    StorageError,
    UsageError,
)
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.blob_calls import BlobsOverGrpc
from protos.grpc_errors import ERROR_NAME, refuse, to_atoll_error
from tests.patience import HUNG_S

KINDS = [
    kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, AtollError)
]  # fmt: skip


class Refusing(rpc.BlobsServicer):
    """A blob store that ends every call with the class of error that the first hash names."""

    async def Missing(self, request: pb.BlobList, context: grpc.aio.ServicerContext) -> pb.BlobList:
        await refuse(context, getattr(errors, request.blobs[0].hash)("2 GiB too few on w3"))

    async def Get(self, request: pb.BlobList, context: grpc.aio.ServicerContext) -> Iterator[pb.BlobChunk]:
        await refuse(context, getattr(errors, request.blobs[0].hash)("2 GiB too few on w3"))
        yield


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    ready, over = threading.Event(), threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        server = grpc.aio.server()
        rpc.add_BlobsServicer_to_server(Refusing(), server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        ready.set()
        await asyncio.to_thread(over.wait, HUNG_S)
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(HUNG_S)
    yield f"127.0.0.1:{ports[0]}"
    over.set()
    thread.join(HUNG_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_hears_the_class_that_the_server_raised(address: str, kind: type[AtollError]):
    with grpc.insecure_channel(address) as channel:
        port = BlobsOverGrpc(channel, (), address)
        with pytest.raises(AtollError) as one:
            port.missing([kind.__name__])
        with pytest.raises(AtollError) as many:
            list(port.get([(kind.__name__, 0)]))
    for caught in (one, many):
        assert type(caught.value) is kind
        assert str(caught.value) == "2 GiB too few on w3"


class Refused(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """An error as the library raises it."""

    def __init__(self, code: grpc.StatusCode, words: str = "words", name: str | None = None) -> None:
        self._code, self._words = code, words
        self._trailing = () if name is None else ((ERROR_NAME, name),)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._words

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._trailing

    def initial_metadata(self) -> None: ...
    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None: ...
    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: object) -> bool:
        return False


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, UsageError),
        (grpc.StatusCode.NOT_FOUND, UsageError),
        (grpc.StatusCode.PERMISSION_DENIED, AccessDenied),
        (grpc.StatusCode.UNAUTHENTICATED, AccessDenied),
        (grpc.StatusCode.FAILED_PRECONDITION, PlanError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, StorageError),
        (grpc.StatusCode.UNIMPLEMENTED, ProtocolMismatch),
        (grpc.StatusCode.ABORTED, AtollError),
        (grpc.StatusCode.UNAVAILABLE, ConnectionFailed),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ConnectionFailed),
        (grpc.StatusCode.CANCELLED, ConnectionFailed),
        (grpc.StatusCode.INTERNAL, ConnectionFailed),
        (grpc.StatusCode.UNKNOWN, ConnectionFailed),
    ],
)
def test_a_call_that_ends_without_a_name_is_judged_by_its_status(
    code: grpc.StatusCode, kind: type[AtollError]
):
    assert type(to_atoll_error(Refused(code), "lab:1")) is kind


def test_a_name_counts_more_than_the_status_unless_no_error_is_called_so():
    status = grpc.StatusCode.FAILED_PRECONDITION
    assert type(to_atoll_error(Refused(status, name="NotEnoughMemory"), "lab:1")) is NotEnoughMemory
    assert type(to_atoll_error(Refused(status, name="print"), "lab:1")) is PlanError
    assert type(to_atoll_error(Refused(grpc.StatusCode.UNAVAILABLE, name="JobFailed"), "lab:1")) is JobFailed


def test_a_refusal_with_a_name_keeps_its_words_and_a_silent_server_is_named():
    busy = Refused(grpc.StatusCode.UNAVAILABLE, "64 calls are open", "ConnectionFailed")
    assert str(to_atoll_error(busy, "lab:1")) == "64 calls are open"
    away = Refused(grpc.StatusCode.UNAVAILABLE, "failed to connect; last error: UNKNOWN: refused)")
    assert "no coordinator answers at lab:1 (UNKNOWN: refused)" in str(to_atoll_error(away, "lab:1"))
    stopped = str(to_atoll_error(Refused(grpc.StatusCode.CANCELLED, "CANCELLED"), "lab:1"))
    assert stopped.startswith("lab:1 ended the call")
    assert "atoll serve" in stopped


def test_only_a_terminals_owner_gets_several_lines():
    error = Refused(grpc.StatusCode.ABORTED, "one\ntwo\x1b[2J" + "x" * 1000)
    assert str(to_atoll_error(error, "lab:1")) == "one two [2J" + "x" * 389
    assert str(to_atoll_error(error, "lab:1", lines=True)) == "one\ntwo [2J" + "x" * 1000


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Ssl handshake failed: SSL_ERROR_SSL: WRONG_VERSION_NUMBER", AccessDenied),
        ("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate", AccessDenied),
        ("Handshake read failed", ConnectionFailed),
    ],
)
def test_tls_failures_differ_from_broken_connections(words: str, kind: type[AtollError]):
    assert type(to_atoll_error(Refused(grpc.StatusCode.UNAVAILABLE, words), "lab:1")) is kind
