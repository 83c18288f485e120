"""Joining with a short token: by a real coordinator, and past those who answer in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.errors import AccessDenied, AtollError, ConnectionFailed
from coordinator.client.client import Client, connect
from coordinator.config import CoordinatorConfig
from coordinator.server import Running, serve
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.credentials import Authority, JoinToken, new_token, server_credentials, shortened
from protos.short_tokens import ShortToken
from worker.config import WorkerConfig, make_config
from worker.control.enroll import join
from worker.control.pinned import MAX_REPLY_BYTES


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serve(CoordinatorConfig(state_dir=tmp_path_factory.mktemp("c"), entry_port=0)) as started:
        yield started


@pytest.fixture
def owner(running: Running) -> Iterator[Client]:
    with connect(f"127.0.0.1:{running.started.entry_port}", running.started.owner_token) as client:
        yield client


def joined(folder: Path, token: str, **more: Any) -> Any:
    return join(make_config({"state_dir": folder, "token": token, **more}, {}), lambda _: False)


def test_a_worker_joins_by_the_printed_command_alone(running: Running, tmp_path: Path) -> None:
    _, _, option, token = running.started.join_command.split()
    assert option == "--token"
    assert len(token) <= 90
    member = joined(tmp_path / "w", token)
    assert member.identity is not None
    assert member.work_address == f"127.0.0.1:{running.started.work_port}"
    assert joined(tmp_path / "w", token).worker == member.worker, "it is a member already"


def test_a_member_whose_coordinator_is_away_needs_no_second_look(running: Running, tmp_path: Path) -> None:
    token = running.started.join_command.split()[3]
    member = joined(tmp_path / "w", token)
    with pytest.raises(ConnectionFailed):  # by its identity: nothing is fetched where nobody is
        joined(tmp_path / "w", token, host="127.0.0.1", port=9, connect_timeout_s=0.0)
    assert member.identity is not None


def test_tokens_open_during_an_exchange_and_after_it(tmp_path: Path) -> None:
    with serve(CoordinatorConfig(state_dir=tmp_path / "c", entry_port=0)) as running:
        port = running.started.entry_port
        before = running.started.join_command.split()[3]
        with connect(f"127.0.0.1:{port}", running.started.owner_token) as owner:
            owner.rotate_authority(86_400.0)
            during = shortened(JoinToken.decode(owner.create_token("d").token), "127.0.0.1", port).encode()
            where = {"host": "127.0.0.1", "port": port}
            for name, token in (("a", before), ("b", during)):
                assert joined(tmp_path / name, token, **where).identity.of_newest()
            owner.drop_authority()
        assert joined(tmp_path / "d", during, **where).identity.of_newest()
        with pytest.raises(AccessDenied, match="not the token's"):
            joined(tmp_path / "e", before)


def test_behind_a_proxy_a_long_token_is_asked_for(running: Running, tmp_path: Path) -> None:
    token = running.started.join_command.split()[3]
    with pytest.raises(AccessDenied, match="token create --long"):
        joined(tmp_path / "w", token, use_proxy=True)


# ---------------------------------------------------------------- who answers in its place


@dataclass
class Impostor(rpc.EntryServicer):
    """Answers greetings with ``ca_pem`` and notes all that it is sent."""

    ca_pem: bytes
    heard: list[str] = field(default_factory=list)

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        self.heard.append(f"Hello {request} {context.invocation_metadata()}")
        return pb.HelloReply(
            protocol=PROTOCOL_VERSION, version="0", authorities=pb.Authorities(ca_pem=self.ca_pem)
        )

    def Enroll(self, request: pb.EnrollRequest, context: Any) -> pb.EnrollReply:
        self.heard.append(f"Enroll {request} {context.invocation_metadata()}")
        return pb.EnrollReply(worker="w-7f3a2c")


@contextmanager
def answering(impostor: Impostor, authority: Authority) -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    rpc.add_EntryServicer_to_server(impostor, server)
    port = server.add_secure_port(
        "127.0.0.1:0", server_credentials(authority.server_identity(), mutual=False)
    )
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("shown", "error"),
    [
        (lambda theirs, ours: theirs, AccessDenied),
        (lambda theirs, ours: ours, AccessDenied),
        (lambda theirs, ours: theirs + ours, AccessDenied),
        (lambda theirs, ours: b"", AccessDenied),
        (lambda theirs, ours: b"-----BEGIN CERTIFICATE-----", AccessDenied),
        (lambda theirs, ours: ours + b"x" * MAX_REPLY_BYTES, AtollError),
        (lambda theirs, ours: ours * 8, AccessDenied),
    ],
    ids=["its own", "the token's", "both", "none", "damaged", "oversized", "many"],
)
def test_whoever_answers_in_the_coordinators_place_learns_no_secret(
    shown: Callable[[bytes, bytes], bytes], error: type[AtollError], tmp_path: Path
) -> None:
    ours, theirs = Authority.open(tmp_path / "ours"), Authority.open(tmp_path / "theirs")
    token = new_token(ours)
    impostor = Impostor(shown(theirs.certificate_pem, ours.certificate_pem))
    with answering(impostor, theirs) as port:
        short = shortened(token, "127.0.0.1", port).encode()
        with pytest.raises(error):
            joined(tmp_path / "w", short, connect_timeout_s=0.0)
    assert impostor.heard, "it was asked for the authority"
    assert not any("Enroll" in call or token.presented in call for call in impostor.heard)
    assert not (tmp_path / "w" / "identity").exists()


def test_the_coordinator_itself_is_sent_the_secret_once_it_has_proven_itself(tmp_path: Path) -> None:
    ours = Authority.open(tmp_path / "ours")
    token, impostor = new_token(ours), Impostor(ours.certificate_pem)
    with answering(impostor, ours) as port:
        short = shortened(token, "127.0.0.1", port).encode()
        with pytest.raises(AccessDenied):  # its answer holds no certificate
            joined(tmp_path / "w", short)
    assert any("Enroll" in call and token.presented in call for call in impostor.heard)


# ---------------------------------------------------------------- whose address counts


def test_an_address_beside_the_token_counts_more_than_the_tokens(tmp_path: Path) -> None:
    token = ShortToken(bytes(16), (bytes(16),), "192.0.2.7", 7700).encode()
    given = {"state_dir": tmp_path, "token": token}
    assert _where(make_config(given, {})) == ("192.0.2.7", 7700)
    assert _where(make_config({**given, "host": "192.0.2.8", "port": 1}, {})) == ("192.0.2.8", 1)
    assert _where(make_config({"state_dir": tmp_path}, {"ATOLL_TOKEN": token})) == ("192.0.2.7", 7700)
    assert replace(make_config(given, {}), token="").token == ""


def _where(config: WorkerConfig) -> tuple[str, int]:
    return config.host, config.port
