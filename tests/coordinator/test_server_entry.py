"""Who comes in: tokens, certificates, ids, and what a stranger or a kicked worker gets."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from atoll.errors import AccessDenied, StorageError
from benchmarks.fake_worker import FakeWorker
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
)
from tests.coordinator.serving import Owner, fleet, refused, start
from tests.patience import HUNG_S, eventually


def test_tokens_open_expire_are_used_up_and_revoked(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    owner = Owner(running)
    once = owner.call("CreateToken", pb.CreateTokenRequest(name="lab", max_uses=1))

    def enroll(token: str) -> None:
        FakeWorker(owner.address, token).enroll()

    enroll(once.token)
    assert "used 1 of 1" in str(refused(lambda: enroll(once.token)))
    two = owner.call("CreateToken", pb.CreateTokenRequest(name="old"))
    owner.call("RevokeToken", pb.TokenRequest(id=two.info.id))
    assert "revoked" in str(refused(lambda: enroll(two.token)))
    listed = {t.name: t for t in owner.call("ListTokens", pb.Empty()).tokens}
    assert (listed["lab"].uses, listed["old"].revoked) == (1, True)


def test_a_wrong_token_opens_nothing(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    authority = Authority.open(tmp_path / "ca")
    error = refused(lambda: FakeWorker(Owner(running).address, new_token(authority).encode()).enroll())
    assert isinstance(error, AccessDenied)
    assert "does not know this join token" in str(error)


def test_a_token_of_another_coordinator_is_refused_by_tls(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path / "a")
    other = new_token(Authority.open(tmp_path / "b")).encode()
    assert isinstance(refused(lambda: FakeWorker(Owner(running).address, other).enroll()), AccessDenied)


def test_another_protocol_version_is_refused_in_words(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    (worker,) = fleet(stack, running, 1, protocol=99)
    worker.ended.wait(HUNG_S)
    assert f"speaks protocol {PROTOCOL_VERSION}" in worker.error
    assert "update the older" in worker.error


def test_join_tokens_do_not_open_the_owners_calls(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    assert running.started.join_token is not None
    stranger = Owner(running, JoinToken.decode(running.started.join_token).presented)
    for name, request in (("Status", pb.StatusRequest()), ("CreateToken", pb.CreateTokenRequest())):
        assert isinstance(refused(lambda n=name, r=request: stranger.call(n, r)), AccessDenied)
    missing = pb.BlobList()
    assert isinstance(
        refused(lambda: stranger.blobs.Missing(missing, metadata=stranger.metadata)), AccessDenied
    )
    watch = stranger.stub.Watch(pb.JobRequest(job="x"), metadata=stranger.metadata)
    assert isinstance(refused(lambda: list(watch)), AccessDenied)


def test_the_work_port_wants_a_certificate(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    assert running.started.join_token is not None
    ca = JoinToken.decode(running.started.join_token).ca_pem
    address = f"127.0.0.1:{running.started.work_port}"
    channel = grpc.secure_channel(address, channel_credentials(ca), options=name_options(COORDINATOR))
    with channel, pytest.raises(grpc.RpcError):
        rpc.BlobsStub(channel).Missing(pb.BlobList(), timeout=HUNG_S)


def test_who_was_kicked_for_good_does_not_come_back(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    (worker,) = fleet(stack, running, 1)
    owner = Owner(running)
    eventually(lambda: len(owner.call("Status", pb.StatusRequest()).workers) == 1)
    owner.call("Kick", pb.KickRequest(worker=worker.worker, reason="wrong results", for_good=True))
    worker.ended.wait(HUNG_S)
    assert worker.dismissed is not None
    assert worker.dismissed.for_good

    def hears_why() -> bool:
        # gRPC loses a refusal that comes while a message is written: the next attempt hears it.
        worker.vanish()
        worker.start()
        worker.ended.wait(HUNG_S)
        return "removed for good: wrong results" in worker.error

    eventually(hears_why)


def test_an_id_that_is_taken_is_drawn_again_and_never_given_out_twice(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(stack, tmp_path)
    owner = Owner(running)
    drawn = iter(["w-7f3a2c", "w-7f3a2c", "w-7f3a2c", "w-00000000000000aa", *["w-7f3a2c"] * 99])
    monkeypatch.setattr("coordinator.services.workers.entry.new_worker_id", lambda: next(drawn))
    (first,) = fleet(stack, running, 1)
    eventually(lambda: len(owner.call("Status", pb.StatusRequest()).workers) == 1)
    owner.call("Kick", pb.KickRequest(worker="w-7f3a2c", for_good=True, reason="noise"))
    assert first.ended.wait(HUNG_S)
    (second,) = fleet(stack, running, 1)
    assert (first.worker, second.worker) == ("w-7f3a2c", "w-00000000000000aa")
    error = refused(lambda: FakeWorker(owner.address, running.started.join_token).enroll())
    assert isinstance(error, StorageError)
    assert "all taken" in str(error)
    barred = running.call(lambda server: server.register.refusal("w-7f3a2c"))
    assert "noise" in barred, "a newcomer of the same id lifted it"


def test_the_most_workers_are_an_option_whose_name_the_refusal_says(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path, max_workers=1)
    fleet(stack, running, 1)
    error = refused(lambda: FakeWorker(Owner(running).address, running.started.join_token).enroll())
    assert isinstance(error, StorageError)
    assert "--max-workers" in str(error)


def test_a_malformed_message_sets_its_sender_aside(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    (worker,) = fleet(stack, running, 1)
    owner = Owner(running)
    worker.say(failed=pb.StageFailed(job="j", reason="x", lost_peer="y" * 5000))
    worker.ended.wait(HUNG_S)
    eventually(lambda: "5000 characters" in owner.call("Status", pb.StatusRequest()).workers[0].reason)
