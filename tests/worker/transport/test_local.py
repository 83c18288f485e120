"""Devices of one daemon: joined without a socket, reached from elsewhere by one port."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import pytest

from atoll.errors import AtollError
from protos.credentials import Authority, Identity
from protos.devices import device_name
from tests.patience import HUNG_S
from tests.worker.transport.hosts import PATIENT, Host, enroll, key
from worker.transport.contract import Paths, PeerLost, Way
from worker.transport.frames import Direction
from worker.transport.local import DeviceNetwork, LocalLinks
from worker.transport.network import PeerNetwork

NEVER = Paths()


class Device(Host):
    """A host that is a device of a daemon."""

    def __init__(self, links: LocalLinks, identity: Identity, number: int) -> None:
        self.delivered = queue.Queue()
        self.losses = queue.Queue()
        self.ways = queue.Queue()
        self.wanted = lambda k, total: True
        self.network = DeviceNetwork(
            links,
            identity,
            None if number else ("127.0.0.1", 0),
            lambda peer, reason: self.losses.put((peer, reason)),
            PATIENT,
            name=device_name(identity.name, number),
            joined=lambda peer, way, relay: self.ways.put((peer, way, relay)),
        )
        self.network.register("job", self)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def pair(authority: Authority) -> Iterator[tuple[Device, Device]]:
    """Two devices of the machine w-a."""
    links, identity = LocalLinks(), enroll(authority, "w-a")
    made = (Device(links, identity, 0), Device(links, identity, 1))
    yield made
    for device in made:
        device.network.close()


@pytest.fixture
def elsewhere(authority: Authority) -> Iterator[Callable[[str], Host]]:
    made: list[Host] = []

    def make(name: str) -> Host:
        made.append(Host(enroll(authority, name), listen=False))
        return made[-1]

    yield make
    for host in made:
        host.network.close()


def test_both_are_joined_at_once_and_hear_of_it(pair: tuple[Device, Device]) -> None:
    first, second = pair
    assert not first.network.connected("w-a/1")
    first.network.meet("w-a/1", NEVER, HUNG_S)
    assert first.network.connected("w-a/1")
    assert second.network.connected("w-a")
    assert first.ways.get_nowait() == ("w-a/1", Way.LOCAL, "")
    assert second.network.reported() == [("w-a", Way.LOCAL, "")]
    first.network.expect("w-a/1", NEVER, HUNG_S)
    assert first.ways.empty()


def test_a_message_lies_in_the_receivers_block_when_send_returns(pair: tuple[Device, Device]) -> None:
    first, second = pair
    first.network.meet("w-a/1", NEVER, HUNG_S)
    payload = bytearray(range(256)) * 16
    first.network.send("w-a/1", key(1), b"head", payload)
    payload[:] = bytes(len(payload))  # it may change now
    assert second.delivered.get_nowait() == ("w-a", key(1), b"head", bytes(range(256)) * 16)
    second.network.send("w-a", key(2), b"", b"")
    assert first.delivered.get_nowait() == ("w-a/1", key(2), b"", b"")
    assert first.network.flush("w-a/1", 0.0)
    both = {"w-a", "w-a/1"}
    assert PeerNetwork.progress(first.network, both) == PeerNetwork.progress(second.network, both) == 0
    assert first.network.progress(both) == second.network.progress(both) == 1
    first.network.send("w-a/1", key(3)._replace(direction=Direction.COPY), b"", b"blob")
    assert first.network.progress(both) == 1
    assert first.network.progress({"w-b"}) == 0, "who only reads the log is no progress"


def test_what_nobody_wants_is_dropped(pair: tuple[Device, Device]) -> None:
    first, second = pair
    first.network.meet("w-a/1", NEVER, HUNG_S)
    second.wanted = lambda k, total: False
    second.network._receivers["job"].expect = lambda *_: None  # type: ignore[method-assign]
    first.network.send("w-a/1", key(), b"", b"abc")
    first.network.send("w-a/1", key(job="another"), b"", b"abc")
    assert second.delivered.empty()


def test_who_was_not_met_is_not_sent_to(pair: tuple[Device, Device]) -> None:
    with pytest.raises(PeerLost, match="not connected"):
        pair[0].network.send("w-a/1", key(), b"", b"abc")


def test_a_device_that_leaves_is_lost_to_the_others(pair: tuple[Device, Device]) -> None:
    first, second = pair
    first.network.meet("w-a/1", NEVER, HUNG_S)
    second.network.close()
    assert first.losses.get(timeout=HUNG_S) == ("w-a/1", "worker is leaving")
    assert not first.network.connected("w-a/1")
    with pytest.raises(PeerLost):
        first.network.send("w-a/1", key(), b"", b"abc")


def test_their_link_is_measured_as_memory_is_copied(pair: tuple[Device, Device]) -> None:
    first, _ = pair
    first.network.meet("w-a/1", NEVER, HUNG_S)
    assert 0.0 < first.network.rtt("w-a/1") < 0.1
    assert 1e7 < first.network.bandwidth("w-a/1", 1.0, 32 << 20) < 1e12
    assert first.network.goodput() == []
    first.network.send("w-a/1", key(), b"", bytes(1000))
    (found,) = first.network.goodput()
    assert (found.peer, found.n_bytes) == ("w-a/1", 1000)
    assert first.network.goodput() == []


def test_a_worker_elsewhere_reaches_each_device_by_the_one_port(
    pair: tuple[Device, Device], elsewhere: Callable[[str], Host]
) -> None:
    first, second = pair
    other = elsewhere("w-b")
    address = ("127.0.0.1", first.network.port)
    for device in pair:
        device.network.admit("w-b")
        other.network.meet(device.network.name, Paths((address,), dial=True), HUNG_S)
        other.network.send(device.network.name, key(3), b"", b"for one alone")
        assert device.delivered.get(timeout=HUNG_S) == ("w-b", key(3), b"", b"for one alone")
    assert first.delivered.empty()
    second.network.send("w-b", key(4), b"", b"back")
    assert other.delivered.get(timeout=HUNG_S) == ("w-a/1", key(4), b"", b"back")


def refusal(caller: Host, peer: str, listener: Device, word: str) -> str:
    """How ``caller`` is refused by the port of ``listener``, in words that hold ``word``."""
    words, within_s = "", 0.5
    while word not in words:  # before a busy machine has answered, nothing is known
        with pytest.raises(AtollError) as error:
            caller.network.meet(peer, Paths((("127.0.0.1", listener.network.port),), dial=True), within_s)
        words, within_s = str(error.value), 2 * within_s
    return words


def test_a_certificate_speaks_for_no_other_machines_devices(
    pair: tuple[Device, Device], authority: Authority
) -> None:
    first, second = pair
    forger = Device(LocalLinks(), enroll(authority, "w-c"), 0)
    try:
        forger.network.name = "w-b/1"
        second.network.admit("w-b/1")
        words = refusal(forger, "w-a/1", first, "calls itself")
        assert "w-c calls itself 'w-b/1'" in words
    finally:
        forger.network.close()


def test_a_device_that_is_not_there_is_refused(
    pair: tuple[Device, Device], elsewhere: Callable[[str], Host]
) -> None:
    words = refusal(elsewhere("w-b"), "w-a/2", pair[0], "this is")
    assert "this is w-a, not 'w-a/2'" in words
