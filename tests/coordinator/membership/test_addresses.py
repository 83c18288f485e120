"""Nobody is asked to dial a nearer network than the one that a worker was seen to come from."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import BadFrame
from coordinator.config import Liveness, Probing
from coordinator.membership import member
from coordinator.membership.addresses import Near, nearness, passed_on
from coordinator.membership.roster import Roster, Worker
from coordinator.messages.events import Introduction
from coordinator.services.access.callers import host_of
from coordinator.services.workers.resolving import MAX_ADDRESSES, MAX_NAMES, look_up, resolved
from coordinator.services.workers.wire import introduction_from
from protos import atoll_control_pb2 as pb
from tests.patience import HUNG_S

PUBLIC, LAN, LINK, HERE = "203.0.114.9", "192.168.1.5", "169.254.1.2", "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "near"),
    [
        (PUBLIC, Near.PUBLIC),
        ("2a00:1450::5", Near.PUBLIC),
        ("::ffff:203.0.114.9", Near.PUBLIC),
        (LAN, Near.PRIVATE),
        ("10.0.0.1", Near.PRIVATE),
        ("172.18.0.2", Near.PRIVATE),
        ("100.64.0.7", Near.PRIVATE),
        ("fd00::1", Near.PRIVATE),
        ("::ffff:192.168.1.5", Near.PRIVATE),
        (LINK, Near.LINK),
        ("169.254.169.254", Near.LINK),
        ("fe80::1%eth0", Near.LINK),
        (HERE, Near.MACHINE),
        ("127.9.9.9", Near.MACHINE),
        ("::1", Near.MACHINE),
        ("::ffff:127.0.0.1", Near.MACHINE),
        ("", None),
        ("0.0.0.0", None),  # noqa: S104
        ("224.0.0.1", None),
        ("ff02::1", None),
        ("255.255.255.255", None),
        ("2002:c0a8:0105::1", None),  # 6to4 of a private address
        ("2001:0:c0a8:105::", None),  # Teredo
        ("64:ff9b::c0a8:105", None),  # NAT64 of a private address
        ("home.example.org", None),
    ],
)
def test_how_near_a_network_is(host: str, near: Near | None) -> None:
    assert nearness(host) is near


@pytest.mark.parametrize(
    ("seen", "everybody", "nearby"),
    [
        (PUBLIC, [PUBLIC], [LAN]),
        (LAN, [PUBLIC, LAN], []),
        (LINK, [PUBLIC, LAN, LINK], []),
        (HERE, [PUBLIC, LAN, LINK, HERE], []),
        ("::1", [PUBLIC, LAN, LINK, HERE], []),
        ("", [PUBLIC], []),
    ],
)
def test_who_hears_of_which_address(seen: str, everybody: list[str], nearby: list[str]) -> None:
    stated = tuple((host, 9000) for host in (PUBLIC, LAN, LINK, HERE))
    assert passed_on(stated, seen) == (
        tuple((host, 9000) for host in everybody),
        tuple((host, 9000) for host in nearby),
    )


def test_a_worker_that_does_not_know_its_address_has_the_one_it_is_seen_at() -> None:
    stated = (("", 1), ("0.0.0.0", 2), ("::", 3))  # noqa: S104
    assert passed_on(stated, PUBLIC) == (((PUBLIC, 1), (PUBLIC, 2), (PUBLIC, 3)), ())
    assert passed_on(stated, "") == ((), ())


@given(
    st.lists(st.tuples(st.ip_addresses().map(str), st.integers(1, 65535)), max_size=16).map(tuple),
    st.ip_addresses().map(str) | st.just(""),
)
def test_no_address_is_nearer_than_its_worker(stated: tuple[tuple[str, int], ...], seen: str) -> None:
    everybody, nearby = passed_on(stated, seen)
    here = nearness(seen) or Near.PUBLIC
    assert all((near := nearness(host)) is not None and near <= here for host, _ in everybody)
    assert all(nearness(host) is Near.PRIVATE for host, _ in nearby)
    assert not nearby or nearness(seen) is Near.PUBLIC
    assert set(everybody) | set(nearby) <= {*stated, *((seen, port) for _, port in stated)}


# ---------------------------------------------------------------- names


def names(**known: Sequence[str]) -> dict[str, Sequence[str]]:
    return {name.replace("_", "."): found for name, found in known.items()}


def test_a_name_counts_as_what_it_means_when_it_is_stated() -> None:
    known = names(home_example=[PUBLIC, LAN], trap_example=[HERE])
    stated = (("home.example", 9), (PUBLIC, 8), ("trap.example", 22), ("no.example", 7), ("", 6))
    found = asyncio.run(resolved(stated, lambda name: known.get(name, ())))
    assert found == ((PUBLIC, 9), (LAN, 9), (PUBLIC, 8), (HERE, 22), ("", 6))
    assert passed_on(found, PUBLIC) == (((PUBLIC, 9), (PUBLIC, 8), (PUBLIC, 6)), ((LAN, 9),))


def test_names_and_their_addresses_are_counted() -> None:
    asked: list[str] = []

    def many(name: str) -> Sequence[str]:
        asked.append(name)
        return [f"203.0.114.{n}" for n in range(50)]

    found = asyncio.run(resolved(tuple((f"n{n}.example", n + 1) for n in range(16)), many))
    assert len(asked) == MAX_NAMES
    assert len(found) == MAX_NAMES * MAX_ADDRESSES


def test_a_name_that_nobody_answers_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.services.workers.resolving.WITHIN_S", 0.01)
    over = threading.Event()
    try:
        found = asyncio.run(
            resolved((("slow.example", 1), (PUBLIC, 2)), lambda _: [HERE] * over.wait(HUNG_S))
        )
    finally:
        over.set()
    assert found == ((PUBLIC, 2),)


def test_names_are_looked_up_as_this_machine_does() -> None:
    assert HERE in look_up("localhost")
    assert look_up("0x7f000001")[:1] in ([HERE], [], ())  # however libc reads it, it is an address
    assert look_up("a" * 64 + ".invalid") == ()


@pytest.mark.parametrize(
    "host", ["unix:/run/docker.sock", "dns:///x", "ipv4:10.0.0.1", "a b", "[::1]", "x/y"]
)
def test_what_is_neither_an_address_nor_a_name_is_refused(host: str) -> None:
    stated = pb.Introduction(peer_addresses=[pb.Address(host=host, port=1)])
    with pytest.raises(BadFrame, match="neither an address nor a name"):
        introduction_from(stated)


# ---------------------------------------------------------------- who may dial whom


def roster(**workers: tuple[str, list[str]]) -> Roster:
    """Workers by name: where each is seen, and what it states."""
    found = Roster(Liveness(), Probing())
    for name, (seen, hosts) in workers.items():
        everybody, nearby = passed_on(tuple((host, 9000) for host in hosts), seen)
        told = Introduction(
            name, 1, "cpu", "", 1, 1, 1, addresses=everybody, nearby=nearby, seen=seen
        )  # fmt: skip
        found.workers[name] = Worker(member.joined(name, 1, 0.0), told, 1)
    return found


def test_two_machines_behind_one_router_reach_each_other_and_nobody_else_is_sent_there() -> None:
    known = roster(
        home1=(PUBLIC, ["192.168.1.5"]), home2=(PUBLIC, ["192.168.1.6"]), away=("198.52.0.1", ["192.168.1.7"])
    )
    assert known.addresses("home1", "home2") == (("192.168.1.5", 9000),)
    assert known.connectable("home1", "home2")
    assert known.addresses("home1", "away") == known.addresses("away", "home1") == ()
    assert not known.connectable("home1", "away")


def test_whoever_has_a_public_address_is_dialled_by_everybody() -> None:
    known = roster(server=(PUBLIC, [PUBLIC]), home=("198.52.0.1", ["10.0.0.2"]))
    assert known.connectable("home", "server")
    assert known.addresses("server", "home") == ((PUBLIC, 9000),)


class FakeContext:
    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


@pytest.mark.parametrize(
    ("peer", "near"),
    [
        ("ipv4:192.168.1.5:4711", Near.PRIVATE),
        ("ipv6:%5B::1%5D:4711", Near.MACHINE),
        ("ipv6:[::ffff:10.0.0.1]:4711", Near.PRIVATE),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", Near.LINK),
        ("unix:", None),
    ],
)
def test_what_grpc_says_of_a_caller_is_read(peer: str, near: Near | None) -> None:
    assert nearness(host_of(FakeContext(peer))) is near  # type: ignore[arg-type]
