"""Transport's contract with the rest of the worker: settings, receivers, and the loss of a peer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from atoll.errors import ConnectionFailed
from atoll.messages.to_worker import Paths as Paths
from atoll.messages.to_worker import RelayOffer as RelayOffer
from worker.transport.frames import MessageKey


class PeerLost(ConnectionFailed):
    """A peer is gone, or sent what cannot be used; ``peer`` names it."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"lost {peer}: {reason}")
        self.peer = peer
        self.reason = reason


class Way(StrEnum):
    """How this worker is joined with a peer."""

    LOCAL = "local"  # a device of the same daemon
    DIRECT = "direct"  # dialled from here
    REVERSED = "reversed"  # dialled from there
    RELAYED = "relayed"  # both dialled a relay


class Receiver(Protocol):
    """Who takes the messages of one job, in the thread that serves all peers: never block."""

    def expect(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        """Return where ``total`` payload bytes of ``key`` go; None: not wanted."""

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        """A whole message has arrived."""

    def lost(self, peer: str, reason: str) -> None:
        """The peer is gone."""


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Bounds and patience of the links; every field with its unit."""

    max_message_bytes: int = 1 << 30
    max_queued_bytes: int = 256 << 20  # unconfirmed, per peer; then send() waits
    max_messages: int = 1024  # unconfirmed, per peer
    max_background_bytes: int = 16 << 20  # the same of background messages, which count for themselves
    max_background_messages: int = 256  # that wait
    max_window_bytes: int = 64 << 20  # in flight to a peer
    max_connections: int = 64  # accepted, all peers together
    streams: int = 0  # connections to a peer; 0 = by the round trip
    ping_s: float = 0.5
    silence_s: float = 1.5  # without any frame: frozen
    idle_s: float = 30.0  # without a chunk either way: not part of what we train, so hardly pinged
    reconnect_s: float = 0.4  # or six round trips, if that is more
    relay_reconnect_s: float = 30.0  # the same of a peer behind a relay, which may be started anew
    move_s: float = 10.0  # the same of one whose address, or ours, has changed
    upgrade_s: float = 10.0  # a relayed peer is dialled again after so long, then twice that, ...
    upgrade_most_s: float = 160.0  # ... up to this
    coordinator: str = ""  # host of a relay that is offered without one
    handshake_s: float = 5.0
    close_s: float = 0.5  # for the last frames of a graceful close
    use_proxy: bool = False  # dial peers by way of the environment's proxy

    @property
    def tick_s(self) -> float:
        return min(0.1, self.ping_s / 2, self.reconnect_s / 2)
