"""Whoever speaks the protocol of the release before is refused with the side to update, whichever side it is.

The messages are the bytes that commit 622f406 says first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.errors import ProtocolMismatch
from benchmarks.fake_worker import FakeWorker
from coordinator.client.client import Client
from coordinator.client.endpoint import Endpoint
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from tests.coordinator.serving import Owner, refused, start
from tests.fixtures.first_messages import recorded
from tests.patience import HUNG_S
from worker.control.greeting import greet

BEFORE = recorded("622f406")
EXIT_CODE = 7


class Older(FakeWorker):
    """A worker that introduces itself as the release before does."""

    def introduction(self) -> pb.Introduction:
        return pb.FromWorker.FromString(BEFORE["FromWorker"]).introduction


class Entry(rpc.EntryServicer):
    """A coordinator of the release before."""

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        return pb.HelloReply.FromString(BEFORE["HelloReply"])


@pytest.fixture
def older(stack: ExitStack) -> str:
    """Where a coordinator of the release before answers."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    rpc.add_EntryServicer_to_server(Entry(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(server.stop, None)
    return f"127.0.0.1:{port}"


def mismatch(call: Callable[[], Any]) -> str:
    """Return the words of a call that is refused for its version."""
    with pytest.raises(ProtocolMismatch) as refusal:
        call()
    assert refusal.value.exit_code == EXIT_CODE
    return str(refusal.value)


def test_the_release_before_spoke_another_protocol() -> None:
    assert (BEFORE["protocol"], BEFORE["version"]) == (PROTOCOL_VERSION - 1, "0.7.0")


def test_a_worker_of_before_gets_no_certificate_and_no_session(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path, insecure=True)
    owner = Owner(running)
    request = pb.EnrollRequest.FromString(BEFORE["EnrollRequest"])
    error = refused(lambda: owner.entry.Enroll(request, timeout=HUNG_S))
    assert isinstance(error, ProtocolMismatch)
    worker = Older(owner.address, None)
    stack.callback(worker.stop)
    assert worker.start().ended.wait(HUNG_S)
    for words in (str(error), worker.error):
        assert f"speaks protocol {PROTOCOL_VERSION}" in words
        assert "this worker 9; update the older of the two" in words


def test_a_worker_does_not_join_a_coordinator_of_before(stack: ExitStack, older: str) -> None:
    stub = rpc.EntryStub(stack.enter_context(grpc.insecure_channel(older)))
    words = mismatch(lambda: greet(stub, older, None))
    assert words.startswith(f"{older} speaks protocol 9 (atoll 0.7.0), this worker {PROTOCOL_VERSION} (")
    assert words.endswith("; update the older of the two")


def test_an_owner_is_told_to_update_a_coordinator_of_before(older: str) -> None:
    host, _, port = older.rpartition(":")
    with Client(Endpoint(host, int(port))) as client:
        words = mismatch(client.hello)
    assert "speaks protocol 9" in words
    assert words.endswith("update the coordinator")
