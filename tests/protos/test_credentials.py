"""Identities and tokens: who gets in, who does not, and that nothing leaks."""

from __future__ import annotations

import datetime as dt
import stat
from concurrent import futures
from contextlib import nullcontext
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import AccessDenied, StorageError
from protos import credentials
from protos.credentials import (
    CLOCK_SKEW,
    COORDINATOR,
    WORKER_ID,
    Authority,
    Identity,
    JoinToken,
    channel_credentials,
    fingerprint,
    identity_from,
    matching_hash,
    name_options,
    new_key,
    new_token,
    new_worker_id,
    peer_name,
    secret_hash,
    server_credentials,
    signing_request,
    token_id,
    verify_certificate,
)
from tests.patience import HUNG_S


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("ca"))


def enroll(authority: Authority, worker: str) -> Identity:
    key = new_key()
    return identity_from(
        key, authority.sign(signing_request(key, "a laptop"), worker), authority.certificate_pem
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_authority_is_created_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    first = Authority.open(tmp_path / "ca")
    assert Authority.open(tmp_path / "ca") == first
    assert mode(tmp_path / "ca") == 0o700
    assert [mode(p) for p in (tmp_path / "ca").iterdir()] == [0o600, 0o600]


def test_half_an_authority_is_refused_instead_of_replaced(tmp_path: Path) -> None:
    Authority.open(tmp_path)
    (tmp_path / "ca-key.pem").unlink()
    with pytest.raises(StorageError, match="missing"):
        Authority.open(tmp_path)


@pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_authority_is_to_be_restored_and_nobody_told_to_join_again(
    tmp_path: Path, name: str, left: int
) -> None:
    Authority.open(tmp_path)
    damaged = tmp_path / name
    damaged.write_bytes(damaged.read_bytes()[:left])
    with pytest.raises(StorageError, match=f"{name} is damaged; restore both from a backup"):
        Authority.open(tmp_path)


def test_an_authority_with_the_certificate_of_another_is_refused(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        Authority.open(tmp_path / folder)
    (tmp_path / "other" / "ca.pem").replace(tmp_path / "one" / "ca.pem")
    with pytest.raises(StorageError, match="of two authorities; restore both"):
        Authority.open(tmp_path / "one")


def test_an_identity_survives_a_round_trip_through_private_files(
    authority: Authority, tmp_path: Path
) -> None:
    identity = enroll(authority, "w-7f3a2c")
    assert Identity.load(tmp_path / "id") is None
    identity.save(tmp_path / "id")
    assert Identity.load(tmp_path / "id") == identity
    assert {mode(p) for p in (tmp_path / "id").iterdir()} == {0o600}
    assert identity.name == "w-7f3a2c"
    assert len(identity.fingerprint) == 64


@pytest.mark.parametrize("written", range(4))
def test_who_is_killed_while_it_renews_has_a_whole_identity(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    before, after = enroll(authority, "w-7f3a2c"), enroll(authority, "w-7f3a2c")
    before.save(tmp_path)
    write, left = credentials.write_private, iter([True] * written)

    def killed(path: Path, data: bytes) -> None:
        if not next(left, False):
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(credentials, "write_private", killed)
    with nullcontext() if written == 3 else pytest.raises(KeyboardInterrupt):
        after.save(tmp_path)
    assert Identity.load(tmp_path) == (before if written < 2 else after)


def test_an_identity_of_a_version_with_three_files_is_read(authority: Authority, tmp_path: Path) -> None:
    identity = enroll(authority, "w-7f3a2c")
    identity.save(tmp_path)
    (tmp_path / "key.pem").write_bytes(identity.key_pem)
    assert Identity.load(tmp_path) == identity
    (tmp_path / "certificate.pem").unlink()
    assert Identity.load(tmp_path) is None


def test_a_key_that_does_not_belong_to_the_certificate_is_refused(authority: Authority) -> None:
    identity = enroll(authority, "w-7f3a2c")
    with pytest.raises(AccessDenied, match="does not belong"):
        identity_from(new_key(), identity.certificate_pem, identity.ca_pem)


def test_a_certificate_of_another_coordinator_is_refused(authority: Authority, tmp_path: Path) -> None:
    stranger = enroll(Authority.open(tmp_path), "w-7f3a2c")
    with pytest.raises(AccessDenied, match="not issued by this coordinator"):
        verify_certificate(stranger.certificate_pem, authority.certificate_pem)


def test_a_clock_a_little_behind_is_tolerated_and_far_off_is_explained(authority: Authority) -> None:
    identity = enroll(authority, "w-7f3a2c")
    now = dt.datetime.now(dt.UTC)
    behind = now - CLOCK_SKEW / 2
    assert verify_certificate(identity.certificate_pem, identity.ca_pem, behind) == "w-7f3a2c"
    for wrong in (now - 2 * CLOCK_SKEW, now + dt.timedelta(days=4000)):
        with pytest.raises(AccessDenied, match="set the clock"):
            verify_certificate(identity.certificate_pem, identity.ca_pem, wrong)


@pytest.mark.parametrize("name", ["coordinator", "w-", "W-1", "w-1.example", "w-" + "a" * 60, "w-a-", ""])
def test_no_certificate_is_signed_for_a_name_that_is_no_worker(authority: Authority, name: str) -> None:
    with pytest.raises(AccessDenied):
        authority.sign(signing_request(new_key(), "x"), name)


@pytest.mark.parametrize("csr", [b"", b"garbage", b"x" * 20_000])
def test_a_malformed_request_is_refused(authority: Authority, csr: bytes) -> None:
    with pytest.raises(AccessDenied):
        authority.sign(csr, "w-7f3a2c")


def test_the_requests_own_name_gives_no_rights(authority: Authority) -> None:
    signed = authority.sign(signing_request(new_key(), COORDINATOR), "w-7f3a2c")
    assert verify_certificate(signed, authority.certificate_pem) == "w-7f3a2c"


def test_a_token_round_trips_and_survives_line_breaks(authority: Authority) -> None:
    token = new_token(authority, work_port=7701)
    text = token.encode()
    wrapped = text[:50] + "\n  " + text[50:] + "\n"
    assert JoinToken.decode(wrapped) == token
    assert fingerprint(token.ca_pem) == fingerprint(authority.certificate_pem)
    assert len(text) < 800


def test_every_single_character_change_of_a_token_is_refused_clearly(authority: Authority) -> None:
    text = new_token(authority).encode()
    for at in range(0, len(text), 7):
        changed = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        with pytest.raises(AccessDenied):
            JoinToken.decode(changed)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=200), st.binary(max_size=200).map(lambda b: "atoll1_" + b.hex())))
def test_no_text_breaks_the_token_parser(text: str) -> None:
    with pytest.raises(AccessDenied):
        JoinToken.decode(text)


def test_only_a_hash_of_the_secret_is_needed_to_check_it(authority: Authority) -> None:
    token, other = new_token(authority), new_token(authority)
    stored = [secret_hash(other.presented), secret_hash(token.presented)]
    assert matching_hash(token.presented, stored) == stored[1]
    assert matching_hash("wrong", stored) is None
    assert matching_hash("", stored) is None
    assert token_id(token.presented).startswith("t-")


def test_nothing_secret_is_printed(authority: Authority) -> None:
    token, identity = new_token(authority), enroll(authority, "w-7f3a2c")
    for shown in (repr(token), repr(identity), repr(authority)):
        assert "PRIVATE" not in shown
        assert "secret" not in shown
        assert token.presented not in shown


def test_worker_ids_are_dns_labels_of_64_bits_and_differ() -> None:
    drawn = {new_worker_id() for _ in range(50)}
    assert len(drawn) == 50
    assert all(WORKER_ID.fullmatch(name) and len(bytes.fromhex(name[2:])) == 8 for name in drawn)


class Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            return (peer_name(context.auth_context()) or "nobody").encode()

        return grpc.unary_unary_rpc_method_handler(answer)


def call(port: int, credentials: grpc.ChannelCredentials, expected: str) -> str:
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=name_options(expected)) as channel:
        return bytes(channel.unary_unary("/x/y")(b"", timeout=HUNG_S)).decode()


@pytest.fixture(scope="module")
def ports(authority: Authority) -> tuple[int, int]:
    """An entry port and a mutual port of the same coordinator."""
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Echo()])
    identity = authority.server_identity()
    entry = server.add_secure_port("127.0.0.1:0", server_credentials(identity, mutual=False))
    work = server.add_secure_port("127.0.0.1:0", server_credentials(identity, mutual=True))
    server.start()
    yield entry, work  # type: ignore[misc]
    server.stop(0).wait()


def test_a_token_is_enough_to_reach_the_entry_port_and_not_the_work_port(
    authority: Authority, ports: tuple[int, int]
) -> None:
    trust = channel_credentials(JoinToken.decode(new_token(authority).encode()).ca_pem)
    assert call(ports[0], trust, COORDINATOR) == "nobody"
    with pytest.raises(grpc.RpcError):
        call(ports[1], trust, COORDINATOR)


def test_the_work_port_knows_a_worker_by_its_certificate(
    authority: Authority, ports: tuple[int, int]
) -> None:
    identity = enroll(authority, "w-7f3a2c")
    assert call(ports[1], channel_credentials(identity.ca_pem, identity), COORDINATOR) == "w-7f3a2c"


def test_a_server_with_another_name_or_authority_is_refused_by_the_client(
    authority: Authority, ports: tuple[int, int], tmp_path: Path
) -> None:
    identity = enroll(authority, "w-7f3a2c")
    with pytest.raises(grpc.RpcError):
        call(ports[1], channel_credentials(identity.ca_pem, identity), "w-000000")
    with pytest.raises(grpc.RpcError):
        call(ports[0], channel_credentials(Authority.open(tmp_path).certificate_pem), COORDINATOR)


def test_a_worker_of_another_coordinator_is_refused_by_the_server(
    authority: Authority, ports: tuple[int, int], tmp_path: Path
) -> None:
    stranger = enroll(Authority.open(tmp_path), "w-7f3a2c")
    with pytest.raises(grpc.RpcError):
        call(ports[1], channel_credentials(authority.certificate_pem, stranger), COORDINATOR)
