"""An ended certificate, a wrong clock and another coordinator are three things, with three remedies."""

from __future__ import annotations

import datetime as dt
import re
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.errors import AccessDenied, AtollError, ConnectionFailed
from coordinator.client.client import Client
from coordinator.client.endpoint import Endpoint
from protos import PROTOCOL_VERSION, credentials
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.certificate_words import server_refusal, shown_certificate
from protos.credentials import (
    Authority,
    Identity,
    identity_from,
    new_key,
    new_token,
    server_credentials,
    signing_request,
)
from tests.worker.cli.test_doctor import quick
from worker.cli.doctor import examine
from worker.config import WorkerConfig
from worker.control.enroll import Membership, find_work_address, join

__all__ = ["quick"]  # a fixture: this machine's facts are made up

ENDED, EARLY, WRONG = "ended on", "is not valid before", "another coordinator runs there"
Issue = Callable[[], Identity]


class Door(rpc.EntryServicer):
    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        return pb.HelloReply(protocol=PROTOCOL_VERSION, version="1", work_port=7701)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path / "ca")


@pytest.fixture(params=[ENDED, EARLY, WRONG])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Certificates that are issued from now on are of this kind."""
    if request.param == ENDED:
        monkeypatch.setattr(credentials, "CERTIFICATE_LIFETIME", -credentials.CLOCK_SKEW / 2)
    if request.param == EARLY:
        monkeypatch.setattr(credentials, "CLOCK_SKEW", -dt.timedelta(days=2))
    return str(request.param)


@pytest.fixture
def port(authority: Authority, case: str, tmp_path: Path) -> Iterator[int]:
    """An entry port with a certificate of ``case``."""
    issuer = Authority.open(tmp_path / "other") if case == WRONG else authority
    server = grpc.server(futures.ThreadPoolExecutor(2))
    rpc.add_EntryServicer_to_server(Door(), server)
    found = server.add_secure_port("127.0.0.1:0", server_credentials(issuer.server_identity(), mutual=False))
    server.start()
    yield found
    server.stop(None).wait()


def config(tmp_path: Path, port: int, token: str = "") -> WorkerConfig:
    return WorkerConfig(
        host="127.0.0.1", port=port, token=token, state_dir=tmp_path / "worker", connect_timeout_s=0.0
    )


def identity(authority: Authority) -> Identity:
    key = new_key()
    signed = authority.sign(signing_request(key, "x"), "w-1")
    return Identity("w-1", key, signed, authority.certificate_pem)


REMEDY = {ENDED: "restart `atoll serve`", EARLY: "set this machine's clock", WRONG: "ask for a token"}


def test_join_doctor_and_the_owner_say_the_same_of_the_coordinator(
    authority: Authority, case: str, port: int, tmp_path: Path
) -> None:
    token = new_token(authority)
    said = []
    with pytest.raises(AccessDenied) as refused:
        join(config(tmp_path, port, token.encode()), lambda _: False)
    said.append(str(refused.value))
    with Client(Endpoint("127.0.0.1", port, token)) as client, pytest.raises(AccessDenied) as refused:
        client.hello()
    said.append(str(refused.value))
    report = examine(config(tmp_path, port, token.encode()), lambda what: None)
    assert report.error is not None
    said.append(str(report.error))
    assert len({re.sub(r"clock says \S+ \S+ UTC", "", words) for words in said}) == 1  # it may have gone on
    assert f"127.0.0.1:{port}" in said[0]
    assert case in said[0]
    assert REMEDY[case] in said[0]
    assert [other for other in REMEDY if other in said[0]] == [case]


def test_without_a_token_the_doctor_reads_the_dates_of_what_it_is_shown(
    case: str, port: int, tmp_path: Path
) -> None:
    report = examine(config(tmp_path, port), lambda what: None)
    assert (report.error is None) == (case == WRONG)  # it has nothing to compare an issuer with
    assert case == WRONG or case in str(report.error)


@pytest.mark.parametrize("case", [ENDED, EARLY], indirect=True)
def test_the_workers_own_certificate_is_told_from_the_coordinators(authority: Authority, case: str) -> None:
    mine = identity(authority)
    with pytest.raises(AccessDenied, match=f"this machine's certificate {case}.*this machine's clock says"):
        identity_from(mine.key_pem, mine.certificate_pem, mine.ca_pem)


def test_a_worker_whose_certificate_ends_while_it_runs_is_told_so(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(credentials, "CERTIFICATE_LIFETIME", -credentials.CLOCK_SKEW / 2)
    member = Membership("w-1", identity(authority), "127.0.0.1:1", 0.0)
    with pytest.raises(AccessDenied, match=r"ended on .*join again with a new token"):
        find_work_address(config(tmp_path, 1), member)


def test_another_members_port_is_no_coordinator(authority: Authority) -> None:
    shown = identity(authority).certificate_pem
    said = server_refusal("lab:1", shown, authority.certificate_pem, dt.datetime.now(dt.UTC))
    assert said == "lab:1 is of this coordinator's fleet but not the coordinator; is it a worker's port?"


@pytest.mark.parametrize("answers", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_shows_no_certificate_is_said_to_show_none(answers: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, futures.ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answers)

        answered = pool.submit(answer)
        with pytest.raises(AtollError) as refused:
            shown_certificate(f"127.0.0.1:{listener.getsockname()[1]}")
        answered.result()
    assert isinstance(refused.value, AccessDenied | ConnectionFailed)
