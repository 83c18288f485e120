"""Networks of workers in one process: a message is delivered at once, on a copy, by the sender's thread.

Real Links in real threads use them, which no clock of tests/sim could hold up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.links.ports import Arrival
    from worker.transport.contract import Receiver
    from worker.transport.frames import MessageKey


@dataclass
class Hub:
    """Keeps what was sent: by whom to whom, and its bytes. ``dropped``: what its receiver did not take, or
    had announced to be shorter."""

    dropped: list[MessageKey] = field(default_factory=list)
    ports: dict[str, Port] = field(default_factory=dict)
    sent: list[tuple[str, str, MessageKey]] = field(default_factory=list)
    packets: dict[MessageKey, list[bytes]] = field(default_factory=dict)

    def port(self, name: str) -> Port:
        """Return a worker's network."""
        return self.ports.setdefault(name, Port(self, name))


@dataclass
class Port:
    """One worker's network; ``full``: nothing can be sent in time."""

    hub: Hub
    name: str
    receivers: dict[str, Receiver] = field(default_factory=dict)
    forgotten: list[tuple[str, int | None]] = field(default_factory=list)
    full: bool = False
    announced: dict[MessageKey, int] = field(default_factory=dict)
    behind: list[MessageKey] = field(default_factory=list)  # what it sent in the background

    @property
    def sent(self) -> list[MessageKey]:
        """Return the messages that this worker sent."""
        return [key for sender, _, key in self.hub.sent if sender == self.name]

    def register(self, job: str, receiver: Receiver) -> None:
        self.receivers[job] = receiver

    def unregister(self, job: str, receiver: Receiver) -> None:
        if self.receivers.get(job) is receiver:
            del self.receivers[job]

    def announce(self, arrivals: list[tuple[Arrival, int]]) -> None:
        self.announced.update({arrival.key: most for arrival, most in arrivals})

    def forget(self, job: str, plan_version: int | None = None) -> None:
        self.forgotten.append((job, plan_version))

    def flush(self, peer: str, timeout_s: float) -> bool:
        return True

    def send(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None = None,
        more: bool = False,
        background: bool = False,
    ) -> None:
        if self.full:
            raise TimeoutError
        self.hub.sent.append((self.name, peer, key))
        if background:
            self.behind.append(key)
        self.hub.packets.setdefault(key, []).append(header + bytes(payload))
        receiver = self.hub.ports[peer].receivers.get(key.job)
        most = self.hub.ports[peer].announced.get(key, len(payload))
        buffer = receiver.expect(self.name, key, len(payload)) if receiver else None
        if receiver is None or buffer is None or len(payload) > most:
            self.hub.dropped.append(key)
        else:
            buffer[:] = payload
            receiver.deliver(self.name, key, header, buffer)
