"""A coordinator that is reached over IPv6, and over both families where it listens anywhere."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest

from coordinator.client.client import connect
from coordinator.config import Relaying
from coordinator.server import Running
from hostos.net.addresses import join_address, parse_address
from hostos.net.networks import customer, open_listener, unmapped
from protos.credentials import Authority
from protos.relay_tickets import GREETING_BYTES, nonce_of
from protos.short_tokens import ShortToken
from tests.coordinator.serving import start
from tests.patience import HUNG_S
from tests.worker.transport.hosts import Host, enroll, key
from worker.config import WorkerConfig
from worker.control.enroll import join
from worker.machine.device import own_address
from worker.transport.contract import Paths

ANY_IPV4 = "0.0.0.0"  # noqa: S104 - what is tested


def lacking() -> str | None:
    """Why this machine has no loopback of IPv6, None when it has."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        return str(error)
    return None


ipv6 = pytest.mark.skipif(lacking() is not None, reason=f"no IPv6 here: {lacking()}")


def joined(running: Running, where: str, folder: Path) -> str:
    """The address at which a worker that came by ``where`` finds the work port, which answers."""
    token = running.started.join_token or ""
    config = WorkerConfig(where, running.started.entry_port, token, state_dir=folder)
    member = join(config, lambda seconds: False)
    with member.channel(config) as channel:
        grpc.channel_ready_future(channel).result(HUNG_S)
    return member.work_address


def greeted(where: str, port: int) -> None:
    """A relay greets whoever comes."""
    with socket.create_connection((where, port), HUNG_S) as connection:
        nonce_of(connection.recv(GREETING_BYTES, socket.MSG_WAITALL))


@ipv6
@pytest.mark.parametrize(
    ("listens", "reached"),
    [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"]), (ANY_IPV4, ["127.0.0.1", "::1"])],
)
def test_owners_workers_and_relayed_pairs_reach_it_over_every_family_it_listens_on(
    stack: ExitStack, tmp_path: Path, listens: str, reached: list[str]
) -> None:
    running = start(stack, tmp_path / "c", host=listens, relaying=Relaying(port=0))
    started = running.started
    for number, where in enumerate(reached):
        with connect(join_address(where, started.entry_port), started.owner_token) as client:
            assert client.status().workers == []
        work = joined(running, where, tmp_path / str(number))
        assert work == join_address(where, started.work_port)
        assert started.relay_port is not None
        greeted(where, started.relay_port)


@ipv6
@pytest.mark.parametrize(
    ("listens", "advertise", "named"),
    [
        ("::1", "", "[::1]"),
        ("::", "", "HOST"),
        ("::", "2001:db8::7", "[2001:db8::7]"),
        ("::", "[2001:db8::7]:443", "[2001:db8::7]:443"),
        ("127.0.0.1", "train.example.org", "train.example.org"),
        ("127.0.0.1", "train.example.org:443", "train.example.org:443"),
    ],
)
def test_the_join_command_names_an_address_that_a_worker_takes(
    stack: ExitStack, tmp_path: Path, listens: str, advertise: str, named: str
) -> None:
    started = start(stack, tmp_path, host=listens, advertise=advertise).started
    *_, option, text = started.join_command.split()
    token = ShortToken.decode(text)
    where = join_address(token.host, token.port) if token.host else started.join_command.split()[2]
    has_port = named.endswith(":443")
    assert option == "--token"
    assert where == (named if has_port else f"{named}:{started.entry_port}")
    assert parse_address(where)[1] == (443 if has_port else started.entry_port)


@ipv6
@pytest.mark.parametrize(("listens", "dialled"), [("::1", ["::1"]), (ANY_IPV4, ["::1", "127.0.0.1"])])
def test_peers_exchange_tensors_over_ipv6(tmp_path: Path, listens: str, dialled: list[str]) -> None:
    authority = Authority.open(tmp_path)
    b = Host(enroll(authority, "w-b"), at=listens)
    for number, where in enumerate(dialled):
        a = Host(enroll(authority, f"w-{number}"), listen=False)
        b.network.admit(f"w-{number}")
        a.network.meet("w-b", Paths(((where, b.network.port),), dial=True), HUNG_S)
        a.network.send("w-b", key(), b"", b"there" * 50_000)
        assert b.delivered.get(timeout=HUNG_S)[3] == b"there" * 50_000
        a.network.close()
    b.network.close()


@ipv6
def test_a_listener_for_anybody_is_one_for_both_families() -> None:
    for anywhere in ("", ANY_IPV4, "::"):
        with open_listener(anywhere, 0, 8) as listening:
            port = listening.getsockname()[1]
            for where in ("127.0.0.1", "::1"):
                with closing(socket.create_connection((where, port), HUNG_S)):
                    listening.accept()[0].close()
    with open_listener("::1", 0, 8) as listening:
        assert listening.getsockname()[0] == "::1"


@ipv6
def test_a_machine_knows_its_own_address_of_either_family() -> None:
    assert own_address("::1", 7700) == "::1"


@pytest.mark.parametrize(
    ("seen", "address", "of"),
    [
        ("192.0.2.7", "192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::1%eth0", "fe80::/64"),
        ("", "", ""),
    ],
)
def test_ipv4_in_ipv6_is_ipv4_and_a_customer_has_a_whole_network(seen: str, address: str, of: str) -> None:
    assert unmapped(seen) == address
    assert customer(seen) == of
