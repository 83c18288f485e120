"""Peer streams over loopback with TLS: who gets in, what arrives, and what happens when it ends."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import grpc
import pytest

from atoll.errors import AccessDenied, ConnectionFailed, ProtocolMismatch
from lab.shaper import Shaper
from protos import PROTOCOL_VERSION
from protos.credentials import (
    Authority,
    Identity,
    channel_credentials,
    name_options,
)
from tests.fixtures.first_messages import recorded
from tests.patience import HUNG_S, eventually
from tests.worker.transport.hosts import PATIENT, Host, enroll, joined, joined_by, key, whole_and_once
from worker.transport.contract import Paths, PeerLost, TransportConfig, Way
from worker.transport.frames import (
    MEASURED,
    Close,
    Data,
    Direction,
    Frame,
    Hello,
    MessageKey,
    Ping,
    decode_all,
    encode,
)
from worker.transport.measure import burst_rate_bps
from worker.transport.network import PeerNetwork
from worker.transport.pipes import METHOD

POLLER = "_poll_wrapper"
"""In the name of the thread that gRPC's asyncio API keeps for the whole process."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("ca"))


Make = Callable[..., Host]


@pytest.fixture
def host(authority: Authority) -> Iterator[Make]:
    before = set(threading.enumerate())
    made: list[Host] = []

    def make(name: str, config: TransportConfig = PATIENT, *, listen: bool = True) -> Host:
        made.append(Host(enroll(authority, name), config, listen=listen))
        return made[-1]

    yield make
    for one in made:
        one.network.close()
    left = [t for t in threading.enumerate() if t not in before and t.is_alive() and POLLER not in t.name]
    for thread in left:
        thread.join(HUNG_S)
    assert [t.name for t in left if t.is_alive()] == []


def test_strangers_who_hold_connections_keep_no_peer_out(host: Make) -> None:
    """They took a descriptor each, until none was left for a blob, a file or a peer."""
    one, other = host("w-1"), host("w-2", replace(PATIENT, max_connections=8))
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", other.network.port), HUNG_S))
            for _ in range(100)
        ]
        eventually(lambda: sum(map(_ended, silent)) >= 92)
        other.network.admit("w-1")
        one.network.meet("w-2", Paths((("127.0.0.1", other.network.port),), dial=True), HUNG_S)
        one.network.send("w-2", key(), b"head", b"payload")
        assert other.delivered.get(timeout=HUNG_S)[3] == b"payload"


def test_of_the_peers_that_a_coordinator_names_the_newest_are_remembered(
    host: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.transport.network.MAX_EXPECTED", 10)
    one, other = host("w-1"), host("w-2")
    other.network.admit("w-1")
    one.network.meet("w-2", Paths((("127.0.0.1", other.network.port),), dial=True), HUNG_S)
    for number in range(100):
        one.network.admit(f"w-{number + 3}")
    assert list(one.network._expected) == ["w-2", *(f"w-{number}" for number in range(94, 103))]


def _ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def cut(host: Host, count: int) -> None:
    """Break the first ``count`` connections of this host."""
    network = host.network
    for peer in network._peers.all():
        for connection in peer.connections[:count]:
            network._loop.call_soon_threadsafe(connection.fail, "cut by the test")


def lose(host: Host, peer: str, reason: str) -> None:
    """Have this host lose a peer."""
    host.network._loop.call_soon_threadsafe(host.network._lose, host.network._peers.known(peer), reason)


def connected(
    make: Make, config: TransportConfig = PATIENT, shaping: Shaper | None = None
) -> tuple[Host, Host]:
    """``a`` accepts nobody and dials ``b``."""
    a, b = make("w-a", config, listen=False), make("w-b", config)
    a.network.shaping = b.network.shaping = shaping
    b.network.admit("w-a")
    a.network.meet("w-b", Paths((b.address,), dial=True), HUNG_S)
    joined(b.network, "w-a")
    return a, b


# ---------------------------------------------------------------- who gets in


def test_a_worker_that_accepts_nobody_dials_out_and_frames_flow_both_ways(host: Make) -> None:
    a, b = connected(host)
    assert a.network.port == 0
    a.network.send("w-b", key(), b"head", b"there")
    b.network.send("w-a", key(), b"", b"back")
    assert b.delivered.get(timeout=HUNG_S) == ("w-a", key(), b"head", b"there")
    assert a.delivered.get(timeout=HUNG_S) == ("w-b", key(), b"", b"back")


def test_a_peer_nobody_expects_is_refused_until_it_is(host: Make) -> None:
    a, b = host("w-a", listen=False), host("w-b")
    words, within_s = "", 0.5
    while "does not expect 'w-a'" not in words:  # before a busy machine has answered, nothing is known
        with pytest.raises(ConnectionFailed) as refused:
            a.network.meet("w-b", Paths((b.address,), dial=True), within_s)
        words, within_s = str(refused.value), 2 * within_s
    b.network.admit("w-a")
    a.network.meet("w-b", Paths((b.address,), dial=True), HUNG_S)


def test_a_server_with_another_name_is_refused_by_tls(host: Make) -> None:
    a, b = host("w-a", listen=False), host("w-b")
    b.network.admit("w-a")
    words, within_s = "", 0.5
    while "not who answers" not in words:  # before a busy machine has answered, nothing is known
        with pytest.raises(ConnectionFailed) as refused:
            a.network.meet("w-c", Paths((b.address,), dial=True), within_s)
        words, within_s = str(refused.value), 2 * within_s


def test_a_worker_of_another_coordinator_does_not_get_in(host: Make, tmp_path: Path) -> None:
    b = host("w-b")
    b.network.admit("w-a")
    stranger = Host(enroll(Authority.open(tmp_path), "w-a"), listen=False)
    with pytest.raises((AccessDenied, ConnectionFailed)):
        stranger.network.meet("w-b", Paths((b.address,), dial=True), 1)
    stranger.network.close()
    assert not b.network.connected("w-a")


def test_the_wrong_address_in_a_list_does_not_hinder_the_right_one(host: Make) -> None:
    a, b, c = host("w-a", listen=False), host("w-b"), host("w-c")
    b.network.admit("w-a")
    a.network.meet("w-b", Paths((("127.0.0.1", 1), c.address, b.address), dial=True), HUNG_S)
    assert (a.network.connected("w-b"), a.network.connected("w-c")) == (True, False)


def test_nobody_there_is_a_clear_error(host: Make) -> None:
    a = host("w-a", listen=False)
    with pytest.raises(ConnectionFailed, match=r"w-b did not connect within 0.2 s; is its port"):
        a.network.meet("w-b", Paths((("127.0.0.1", 1),), dial=True), 0.2)
    with pytest.raises(PeerLost):
        a.network.send("w-b", key(), b"", b"x")


def test_a_port_in_use_is_a_clear_error(host: Make, authority: Authority) -> None:
    b = host("w-b")
    with pytest.raises(ConnectionFailed, match="choose another port"):
        PeerNetwork(enroll(authority, "w-c"), b.address)


def test_without_tls_names_are_believed_and_payloads_are_summed() -> None:
    a, b = (Host(None, listen=name == "w-b", name=name) for name in ("w-a", "w-b"))
    b.network.admit("w-a")
    a.network.meet("w-b", Paths((b.address,), dial=True), HUNG_S)
    a.network.send("w-b", key(), b"", b"x" * 100_000)
    assert b.delivered.get(timeout=HUNG_S)[3] == b"x" * 100_000
    a.network.close()
    b.network.close()


# ---------------------------------------------------------------- whichever can be dialled is dialled


NOWHERE = ("127.0.0.1", 1)


def test_the_other_end_dials_where_the_first_reaches_nobody(host: Make) -> None:
    a, b = host("w-a"), host("w-b")
    b.network.expect("w-a", Paths((a.address,)), HUNG_S)
    a.network.meet("w-b", Paths((NOWHERE,), dial=True), HUNG_S)
    assert joined_by(a.network) == {"w-b": Way.REVERSED}
    joined(b.network, "w-a")
    assert joined_by(b.network) == {"w-a": Way.DIRECT}
    a.network.send("w-b", key(), b"", b"there")
    assert b.delivered.get(timeout=HUNG_S)[3] == b"there"


def test_the_end_that_is_to_dial_has_its_time_alone(host: Make) -> None:
    a, b = host("w-a"), host("w-b")
    b.network.expect("w-a", Paths((a.address,)), HUNG_S)
    a.network.meet("w-b", Paths((b.address,), dial=True), HUNG_S)
    assert joined_by(a.network) == {"w-b": Way.DIRECT}


def test_a_stranger_at_the_first_address_does_not_hinder_the_other_direction(host: Make) -> None:
    a, b, c = host("w-a"), host("w-b"), host("w-c")
    b.network.expect("w-a", Paths((a.address,)), HUNG_S)
    a.network.meet("w-b", Paths((c.address,), dial=True), HUNG_S)
    assert joined_by(a.network) == {"w-b": Way.REVERSED}


def test_two_that_reach_neither_have_every_reason_said(host: Make) -> None:
    a = host("w-a")
    with pytest.raises(ConnectionFailed, match=r"did not connect within 0.3 s.*127.0.0.1:1"):
        a.network.meet("w-b", Paths((NOWHERE,), dial=True), 0.3)
    with pytest.raises(PeerLost):
        a.network.send("w-b", key(), b"", b"x")


# ---------------------------------------------------------------- what arrives


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_messages_of_any_size_arrive_whole_over_several_connections(host: Make, streams: int) -> None:
    a, b = connected(host, TransportConfig(streams=streams, silence_s=60, reconnect_s=60))
    assert a.network.connections("w-b") == streams
    rng = Random(4711)
    sizes = [0, 1, 4095, 4096, 65_536, *(rng.randrange(3 << 20) for _ in range(15))]
    sent = {}
    for number, size in enumerate(sizes):
        payload, header = rng.randbytes(size), rng.randbytes(size % 50)
        k = key(number, rng.choice(list(Direction)))
        sent[k] = (header, payload)
        a.network.send("w-b", k, header, payload)
    got = [b.delivered.get(timeout=HUNG_S) for _ in sizes]
    assert {k: (header, payload) for _, k, header, payload in got} == sent
    assert a.network.flush("w-b", HUNG_S)
    (report,) = a.network.goodput()
    assert report.peer == "w-b"
    assert report.n_bytes == sum(len(payload) for k, (_, payload) in sent.items() if k.direction in MEASURED)
    assert report.busy_s > 0
    assert report.rtt_s > 0
    assert a.network.goodput() == []


def test_tied_parameters_and_evaluation_tell_no_rate(host: Make) -> None:
    a, b = connected(host, TransportConfig(silence_s=60, reconnect_s=60))
    others = [d for d in Direction if d not in MEASURED]
    for number, direction in enumerate(others):
        a.network.send("w-b", key(number, direction), b"", b"x" * 300_000)
    for _ in others:
        b.delivered.get(timeout=HUNG_S)
    assert a.network.flush("w-b", HUNG_S)
    assert a.network.goodput() == []


def test_a_gradient_overtakes_queued_activations(host: Make, tmp_path: Path) -> None:
    slow = tmp_path / "shape.json"
    slow.write_text('{"self": "a", "peers": {"w-b": {"mbit": 40, "ms": 5}}}')
    config = TransportConfig(streams=1, silence_s=60, reconnect_s=60)
    a, b = connected(host, config, Shaper.load(slow))
    for number in range(4):
        a.network.send("w-b", key(number), b"", bytes(1 << 20))
    a.network.send("w-b", key(0, Direction.BACKWARD), b"", bytes(100_000))
    order = [b.delivered.get(timeout=HUNG_S)[1].direction for _ in range(5)]
    assert order.index(Direction.BACKWARD) < 2


def test_background_messages_wait_for_everything_else_that_is_sent_to_whomever(
    host: Make, tmp_path: Path
) -> None:
    slow = tmp_path / "shape.json"
    slow.write_text('{"self": "a", "peers": {"w-b": {"mbit": 40, "ms": 5}}}')
    config = TransportConfig(streams=1, silence_s=60, reconnect_s=60)
    a, b = connected(host, config, Shaper.load(slow))
    c = host("w-c", config)
    c.network.admit("w-a")
    a.network.meet("w-c", Paths((c.address,), dial=True), HUNG_S)
    for number in range(4):
        a.network.send("w-b", key(number), b"", bytes(1 << 20))
    for number in range(3):
        a.network.send("w-c", key(number), b"", bytes(1 << 20), background=True)
    assert [c.delivered.get(timeout=HUNG_S)[1].micro for _ in range(3)] == [0, 1, 2]
    assert b.delivered.qsize() == 4
    assert a.network.flush("w-c", HUNG_S)
    assert [found.peer for found in a.network.goodput()] == ["w-b"], "of these nothing is measured"


def test_a_full_queue_makes_the_sender_wait_and_times_out_with_numbers(host: Make, tmp_path: Path) -> None:
    slow = tmp_path / "shape.json"
    slow.write_text('{"self": "a", "peers": {"w-b": {"mbit": 1}}}')
    config = TransportConfig(max_queued_bytes=1 << 20, silence_s=60, reconnect_s=60)
    a, _ = connected(host, config, Shaper.load(slow))
    a.network.send("w-b", key(0), b"", bytes(1 << 20))
    with pytest.raises(TimeoutError, match="1048576 bytes in 1 messages"):
        a.network.send("w-b", key(1), b"", bytes(1 << 20), timeout_s=0.1)
    a.network.forget("job")
    a.network.send("w-b", key(2), b"", bytes(1 << 20), timeout_s=HUNG_S)


def test_unwanted_messages_are_dropped_and_do_not_fill_the_senders_queue(host: Make) -> None:
    a, b = connected(host)
    a.network.send("w-b", key(job="stranger"), b"", bytes(3 << 20))
    a.network.send("w-b", key(), b"", b"wanted")
    assert b.delivered.get(timeout=HUNG_S)[3] == b"wanted"
    assert a.network.flush("w-b", HUNG_S)
    assert b.delivered.empty()


def test_a_jobs_receiver_takes_its_messages_and_hears_of_losses(host: Make) -> None:
    class Taker:
        def __init__(self) -> None:
            self.heard: queue.Queue[object] = queue.Queue()

        def expect(self, peer: str, k: MessageKey, total: int) -> memoryview | None:
            return memoryview(bytearray(total))

        def deliver(self, peer: str, k: MessageKey, header: bytes, payload: memoryview) -> None:
            self.heard.put(bytes(payload))

        def lost(self, peer: str, reason: str) -> None:
            self.heard.put((peer, reason))

    a, b = connected(host)
    taker = Taker()
    b.network.register("other", taker)
    a.network.send("w-b", key(job="other"), b"", b"for the taker")
    assert taker.heard.get(timeout=HUNG_S) == b"for the taker"
    a.network.close()
    assert taker.heard.get(timeout=HUNG_S) == ("w-a", "left: worker is leaving")
    b.network.unregister("other", Taker())
    assert b.network._receivers["other"] is taker
    b.network.unregister("other", taker)
    assert "other" not in b.network._receivers
    assert b.delivered.empty()


def test_round_trip_and_bandwidth_are_measured(host: Make, tmp_path: Path) -> None:
    slow = tmp_path / "shape.json"
    slow.write_text('{"self": "x", "peers": {"w-b": {"mbit": 80, "ms": 20}, "x": {"mbit": 80, "ms": 20}}}')
    config = TransportConfig(streams=1, silence_s=60, reconnect_s=60)
    a, _ = connected(host, config, Shaper.load(slow))
    assert a.network.rtt("w-b") >= 0.04
    # The shaper's own rate bounds it from above on any machine.
    assert 1e6 < a.network.bandwidth("w-b", 0.5, 2 << 20) < 90e6


# ---------------------------------------------------------------- hostile peers


class Raw:
    """A stream to ``host`` that sends what it likes, with a valid certificate."""

    def __init__(self, target: Host, identity: Identity) -> None:
        self._out: queue.Queue[bytes | None] = queue.Queue()
        options = name_options(target.network.name)
        credentials = channel_credentials(identity.ca_pem, identity)
        self._channel = grpc.secure_channel(f"127.0.0.1:{target.network.port}", credentials, options=options)
        call = self._channel.stream_stream(METHOD, None, None)
        self.answers = call(iter(self._out.get, None), timeout=HUNG_S)

    def send(self, frame: Frame | bytes, payload: bytes = b"") -> None:
        self._out.put(frame if isinstance(frame, bytes) else encode(frame, payload))

    def hello(self, name: str = "w-a", target: str = "w-b") -> None:
        self.send(Hello(PROTOCOL_VERSION, 1, name, target))

    def frames(self) -> list[Frame]:
        """Everything the host says until it ends the stream."""
        return [frame for message in self.answers for frame, _ in decode_all(message)]

    def refusal(self) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as raised:
            list(self.answers)
        return raised.value.code()

    def close(self) -> None:
        self._out.put(None)
        self._channel.close()


@pytest.fixture
def victim(host: Make, authority: Authority) -> Iterator[tuple[Host, Callable[[], Raw]]]:
    b = host("w-b")
    b.network.admit("w-a")
    opened: list[Raw] = []
    identity = enroll(authority, "w-a")

    def attack() -> Raw:
        opened.append(Raw(b, identity))
        return opened[-1]

    yield b, attack
    for raw in opened:
        raw.close()


def test_a_peer_that_gives_another_name_than_its_certificate_is_refused(
    victim: tuple[Host, Callable[[], Raw]],
) -> None:
    b, attack = victim
    b.network.admit("w-x")
    raw = attack()
    raw.hello(name="w-x")
    assert raw.refusal() is grpc.StatusCode.PERMISSION_DENIED


def test_another_protocol_version_is_refused_and_the_dialler_sees_why(
    victim: tuple[Host, Callable[[], Raw]], host: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, attack = victim
    raw = attack()
    raw.send(recorded("622f406")["frame"])  # the first of the release before
    assert raw.refusal() is grpc.StatusCode.FAILED_PRECONDITION
    c = host("w-c", listen=False)
    b.network.admit("w-c")
    monkeypatch.setattr(c.network, "hello", lambda peer, stream: Hello(99, 1, "w-c", peer.name))
    with pytest.raises(ProtocolMismatch, match="protocol 99"):
        c.network.meet("w-b", Paths((b.address,), dial=True), HUNG_S)


@pytest.mark.parametrize(
    "attack_frames",
    [
        [b"garbage"],
        [encode(Ping(1))[:-1]],
        [encode(Data(0, key(), 0, 1 << 50), bytes(4096))],
        [encode(Data(0, key(), 0, 9000), bytes(5000)), encode(Data(0, key(), 4000, 9000), bytes(5000))],
        [encode(Hello(PROTOCOL_VERSION, 1, "w-a", "w-b"))],
    ],
    ids=["garbage", "truncated", "oversized", "overlapping", "second hello"],
)
def test_a_bad_frame_closes_its_connection_and_nothing_else(
    victim: tuple[Host, Callable[[], Raw]], host: Make, attack_frames: list[bytes]
) -> None:
    b, attack = victim
    c = host("w-c", listen=False)
    b.network.admit("w-c")
    c.network.meet("w-b", Paths((b.address,), dial=True), HUNG_S)
    raw = attack()
    raw.hello()
    for frame in attack_frames:
        raw.send(frame)
    last = raw.frames()[-1]
    assert isinstance(last, Close)
    assert not last.leaving
    c.network.send("w-b", key(), b"", b"still here")
    assert b.delivered.get(timeout=HUNG_S)[3] == b"still here"


def test_a_stream_that_begins_with_something_else_is_refused(victim: tuple[Host, Callable[[], Raw]]) -> None:
    _, attack = victim
    for first in (b"\0" * 100, encode(Ping(1)), encode(Data(0, key(), 0, 1), b"x")):
        raw = attack()
        raw.send(first)
        assert raw.refusal() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_that_never_begins_is_ended(host: Make, authority: Authority) -> None:
    b = host("w-b", TransportConfig(handshake_s=0.2))
    raw = Raw(b, enroll(authority, "w-a"))
    assert raw.refusal() is grpc.StatusCode.CANCELLED
    raw.close()


def test_a_replayed_message_is_delivered_once(victim: tuple[Host, Callable[[], Raw]]) -> None:
    b, attack = victim
    raw = attack()
    raw.hello()
    for _ in range(3):
        raw.send(Data(0, key(), 0, 4), b"once")
    raw.send(Data(1, key(1), 0, 4, oldest=0), b"next")
    assert [b.delivered.get(timeout=HUNG_S)[3] for _ in range(2)] == [b"once", b"next"]
    assert b.delivered.empty()


def test_ten_thousand_random_mutations_do_no_harm(victim: tuple[Host, Callable[[], Raw]]) -> None:
    b, attack = victim
    rng = Random(4711)
    for _ in range(20):
        raw = attack()
        raw.hello()
        for number in range(500):
            wire = bytearray(encode(Data(number, key(number), 0, 64), rng.randbytes(64)))
            wire[rng.randrange(len(wire) - 64)] ^= 1 << rng.randrange(8)
            raw.send(bytes(wire))
        assert isinstance(raw.frames()[-1], Close)
    assert b.delivered.empty()


# ---------------------------------------------------------------- how it ends


def test_a_broken_connection_is_replaced_and_nothing_is_lost_or_doubled(host: Make) -> None:
    a, b = connected(host, TransportConfig(streams=2, silence_s=60, reconnect_s=60))
    for number in whole_and_once(a, b, 2 << 20):
        if number % 3 == 0:
            cut(a, 1 + number % 2)
    assert a.network.flush("w-b", HUNG_S)
    assert b.delivered.empty()
    assert a.losses.empty()
    assert b.losses.empty()


def test_two_that_remember_different_pasts_meet_anew_instead_of_forgetting_in_turns(host: Make) -> None:
    a, b = connected(host, TransportConfig(streams=2, silence_s=60, reconnect_s=60))
    # b lost a, whose connections break; a still remembers the b that there was.
    lose(b, "w-a", "silent")
    assert a.losses.get(timeout=HUNG_S)[0] == "w-b"
    a.network.meet("w-b", Paths((b.address,), dial=True), HUNG_S)
    a.network.send("w-b", key(), b"", b"again")
    assert b.delivered.get(timeout=HUNG_S)[3] == b"again"


def test_a_goodbye_is_heard_at_once_and_with_its_reason(host: Make) -> None:
    a, b = connected(host)
    a.network.close()
    assert b.losses.get(timeout=HUNG_S) == ("w-a", "left: worker is leaving")
    with pytest.raises(PeerLost):
        b.network.send("w-a", key(), b"", b"x")


def test_a_sender_waiting_on_a_full_queue_hears_of_the_loss(host: Make) -> None:
    a, b = connected(host, TransportConfig(max_queued_bytes=1, silence_s=60, reconnect_s=60))
    b.wanted = lambda k, total: threading.Event().wait(0.2)
    errors: queue.Queue[Exception] = queue.Queue()

    def send_many() -> None:
        try:
            for number in range(1000):
                a.network.send("w-b", key(number), b"", bytes(100))
        except PeerLost as error:
            errors.put(error)

    thread = threading.Thread(target=send_many)
    thread.start()
    b.network.close()
    assert isinstance(errors.get(timeout=HUNG_S), PeerLost)
    thread.join()


PEER = """
import sys
from pathlib import Path
from protos.credentials import Identity
from worker.transport.contract import Paths, TransportConfig
from worker.transport.network import PeerNetwork
identity = Identity.load(Path(sys.argv[1]))
network = PeerNetwork(identity, None, config=TransportConfig(silence_s=60))
network.meet("w-b", Paths((("127.0.0.1", int(sys.argv[2])),), dial=True), 120)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def remote(host: Make, authority: Authority, tmp_path: Path) -> Iterator[tuple[Host, subprocess.Popen[str]]]:
    """A worker in a process of its own, connected to a host with default patience."""
    enroll(authority, "w-a").save(tmp_path)
    b = host("w-b", TransportConfig())
    b.network.admit("w-a")
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, str(tmp_path), str(b.network.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    yield b, process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_killed_peer_is_noticed_by_its_broken_connection(
    remote: tuple[Host, subprocess.Popen[str]],
) -> None:
    b, process = remote
    process.kill()
    peer, reason = b.losses.get(timeout=HUNG_S)
    assert peer == "w-a"
    assert "silent" not in reason


def test_a_frozen_peer_is_noticed_by_its_silence(remote: tuple[Host, subprocess.Popen[str]]) -> None:
    b, process = remote
    process.send_signal(signal.SIGSTOP)
    peer, reason = b.losses.get(timeout=HUNG_S)
    assert peer == "w-a"
    assert reason.startswith("silent for ")
    # The promise is two seconds after the last sign of life; the figure is the transport's own.
    assert float(reason.split()[2]) >= TransportConfig().silence_s


# ---------------------------------------------------------------- pure parts


def test_a_burst_is_measured_by_the_receivers_clock_and_without_its_start() -> None:
    # 1 MB/s on each of two connections after a slow first second; acknowledgements come in any order.
    samples = [(10**9, 500), *((int((2 + t + late) * 1e9), 10**6) for late in (0.5, 0.0) for t in range(9))]
    assert burst_rate_bps(samples) == pytest.approx(16e6, rel=0.07)
    with pytest.raises(ConnectionFailed, match="too little"):
        burst_rate_bps(samples[:1])
    with pytest.raises(ConnectionFailed, match="too little"):
        burst_rate_bps([])


def test_a_peer_that_is_barred_is_lost_at_once_and_not_let_in_again(host: Make) -> None:
    a, b = host("w-a"), host("w-b")
    b.network.admit("w-a")
    a.network.meet("w-b", Paths((b.address,), dial=True), 20.0)
    b.network.bar("w-a", "its certificate was revoked: noise")
    assert b.losses.get(timeout=HUNG_S) == ("w-a", "its certificate was revoked: noise")
    with pytest.raises(AccessDenied, match="does not expect"):
        b.network.checked(Hello(PROTOCOL_VERSION, 1, "w-a", "w-b", "", 0))
    b.network.bar("w-nobody", "revoked")
