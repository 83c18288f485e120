"""Networks of a test whose deliveries and losses land in queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from protos.credentials import Authority, Identity, identity_from, new_key, signing_request
from tests.patience import HUNG_S, eventually
from worker.transport.contract import TransportConfig, Way
from worker.transport.frames import Direction, MessageKey
from worker.transport.network import PeerNetwork

PATIENT = TransportConfig(silence_s=60.0, reconnect_s=60.0)
"""For tests that are not about patience, on a busy machine."""


def enroll(authority: Authority, worker: str) -> Identity:
    key = new_key()
    return identity_from(key, authority.sign(signing_request(key, "x"), worker), authority.certificate_pem)


def key(number: int = 0, direction: Direction = Direction.FORWARD, job: str = "job") -> MessageKey:
    return MessageKey(job, 1, 0, number, 7, direction)


class Host:
    """A network whose deliveries of job "job" and losses land in queues."""

    def __init__(
        self,
        identity: Identity | None,
        config: TransportConfig = PATIENT,
        *,
        listen: bool = True,
        name: str = "",
        at: str = "127.0.0.1",
        **more: Any,
    ) -> None:
        self.delivered: queue.Queue[tuple[str, MessageKey, bytes, bytes]] = queue.Queue()
        self.losses: queue.Queue[tuple[str, str]] = queue.Queue()
        self.ways: queue.Queue[tuple[str, Way | None, str]] = queue.Queue()
        self.wanted: Callable[[MessageKey, int], bool] = lambda k, total: total <= 32 << 20
        self.network = PeerNetwork(
            identity,
            (at, 0) if listen else None,
            lambda peer, reason: self.losses.put((peer, reason)),
            config,
            name=name,
            joined=lambda peer, way, relay: self.ways.put((peer, way, relay)),
            **more,
        )
        self.network.register("job", self)

    def expect(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        return memoryview(bytearray(total)) if self.wanted(key, total) else None

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        self.delivered.put((peer, key, header, bytes(payload)))

    def lost(self, peer: str, reason: str) -> None:
        assert self.losses.queue[-1] == (peer, reason), "the network's owner hears of it first"

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.network.port)


def joined(network: PeerNetwork, peer: str) -> None:
    """Wait until ``peer`` is connected, whoever dialled."""
    network.admit(peer)
    eventually(lambda: network.connected(peer))


def joined_by(network: PeerNetwork) -> dict[str, Way]:
    """How each connected peer is joined."""
    return {peer.name: peer.way for peer in network._peers.all() if peer.way is not None}


def whole_and_once(a: Host, b: Host, n_bytes: int) -> Iterator[int]:
    """Send twelve messages from w-a to w-b; yields after each that came. In the end all have, unchanged."""
    rng = Random(4711)
    payloads = [rng.randbytes(n_bytes) for _ in range(12)]

    def send_all() -> None:
        for number, payload in enumerate(payloads):
            a.network.send("w-b", key(number), b"", payload)

    sender = threading.Thread(target=send_all)
    sender.start()
    got = {}
    for number in range(len(payloads)):
        _, k, _, payload = b.delivered.get(timeout=HUNG_S)
        got[k.micro] = payload
        yield number
    sender.join()
    assert [got[n] for n in range(len(payloads))] == payloads
