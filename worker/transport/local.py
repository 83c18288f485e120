"""Links between the devices of one daemon: a message is copied from arena to arena, and touches no socket.

Each device is a worker with a network of its own. What comes from other machines arrives at the port of the
first, which passes a caller on to the device that it names. Between two devices there is nothing to dial,
encrypt, queue or confirm: who sends writes into the block that the receiver of the job names for it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.messages.from_worker import Goodput
from atoll.spare import MOST_PIECE_BYTES
from worker.transport import TUNED
from worker.transport.contract import Paths, PeerLost, TransportConfig, Way
from worker.transport.frames import MEASURED, OF_STEPS, Direction, MessageKey
from worker.transport.network import PeerNetwork

if TYPE_CHECKING:
    from protos.credentials import Identity
    from worker.manners.traffic import Traffic

_NOBODYS = MessageKey("", 0, 0, 0, 0, Direction.EVALUATION_CODED)


@dataclass(slots=True)
class _Carried:
    """What one device sent another: training's boundary tensors since the last report, messages of steps in
    all."""

    messages: int = 0
    bytes: int = 0
    busy_s: float = 0.0


class LocalLinks:
    """The networks of one daemon's devices by their names; the first in is the one that listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._networks: dict[str, DeviceNetwork] = {}

    def enter(self, network: DeviceNetwork) -> None:
        """One more device."""
        with self._lock:
            self._networks[network.name] = network

    def leave(self, network: DeviceNetwork) -> list[DeviceNetwork]:
        """One less; returns the others, none where it had left before."""
        with self._lock:
            if self._networks.get(network.name) is not network:
                return []
            del self._networks[network.name]
            return list(self._networks.values())

    def find(self, name: str) -> DeviceNetwork | None:
        """The network of a device that is here."""
        return self._networks.get(name)


class DeviceNetwork(PeerNetwork):
    """All links of one device: those within its daemon, and those to other machines."""

    def __init__(
        self,
        links: LocalLinks,
        identity: Identity | None,
        listen: tuple[str, int] | None,
        lost: Callable[[str, str], None],
        config: TransportConfig,
        *,
        name: str,
        traffic: Traffic | None = None,
        joined: Callable[[str, Way | None, str], None] = lambda peer, way, relay: None,
    ) -> None:
        """``name``: the device's; the rest as of ``PeerNetwork``. Raises ConnectionFailed."""
        self._links = links
        self._met: set[str] = set()  # devices here with which it is joined
        self._joined_local = joined
        self._carried: dict[str, _Carried] = {}
        self._counting = threading.Lock()
        super().__init__(identity, listen, lost, config, name=name, traffic=traffic, joined=joined)
        links.enter(self)

    def _addressed(self, name: str) -> PeerNetwork:
        return self._links.find(name) or self

    # ---------------------------------------------------------------- being joined

    def _join(self, peer: str) -> bool:
        """Be joined with a device of this daemon; False where the peer is none."""
        sibling = self._links.find(peer)
        if sibling is None or sibling is self:
            return False
        for one, other in ((self, peer), (sibling, self.name)):
            with one._peers.changed:
                new = other not in one._met
                one._met.add(other)
                one._peers.changed.notify_all()
            if new:
                one._joined_local(other, Way.LOCAL, "")
        return True

    def meet(self, peer: str, paths: Paths, timeout_s: float) -> None:
        if not self._join(peer):
            super().meet(peer, paths, timeout_s)

    def expect(self, peer: str, paths: Paths, timeout_s: float) -> None:
        if not self._join(peer):
            super().expect(peer, paths, timeout_s)

    def connections(self, peer: str) -> int:
        return 1 if peer in self._met else super().connections(peer)

    def reported(self) -> list[tuple[str, Way, str]]:
        return super().reported() + [(peer, Way.LOCAL, "") for peer in sorted(self._met)]

    def close(self) -> None:
        for other in self._links.leave(self):
            other._left(self.name)
        super().close()

    def _left(self, peer: str) -> None:
        """A device of this daemon has left."""
        with self._peers.changed:
            if peer not in self._met:
                return
            self._met.discard(peer)
            receivers = list(self._receivers.values())
        reason = "worker is leaving"
        if self._lost is not None:
            self._lost(peer, reason)
        for receiver in receivers:
            receiver.lost(peer, reason)

    # ---------------------------------------------------------------- messages

    def _submit(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        view: memoryview,
        timeout_s: float | None,
        *,
        more: bool,
        background: bool,
    ) -> None:
        if peer not in self._met:
            super()._submit(peer, key, header, view, timeout_s, more=more, background=background)
            return
        began_s = time.perf_counter()
        self._sibling(peer)._take(self.name, key, header, view)
        self._count(peer, key, len(view), time.perf_counter() - began_s)

    def _take(self, source: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        """Any thread: have a message from a device of this daemon; one that nobody wants is dropped, as
        from any peer."""
        receiver = self._receivers.get(key.job)
        place = receiver.expect(source, key, len(payload)) if receiver is not None else None
        if receiver is None or place is None:
            return
        if len(payload):  # numpy lets other threads run meanwhile, a memoryview does not
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(payload, np.uint8))
        receiver.deliver(source, key, header, place)

    def spare(self, peer: str) -> tuple[int, float]:
        return (MOST_PIECE_BYTES, 0.0) if peer in self._met else super().spare(peer)

    def _sibling(self, peer: str) -> DeviceNetwork:
        found = self._links.find(peer)
        if found is None:
            raise PeerLost(peer, "not connected")
        return found

    def flush(self, peer: str, timeout_s: float) -> bool:
        return peer in self._met or super().flush(peer, timeout_s)

    # ---------------------------------------------------------------- figures

    def _count(self, peer: str, key: MessageKey, nbytes: int, took_s: float) -> None:
        with self._counting:
            carried = self._carried.setdefault(peer, _Carried())
            carried.messages += key.direction in OF_STEPS
            if nbytes and key.direction in MEASURED:
                carried.bytes += nbytes
                carried.busy_s += took_s

    def rtt(self, peer: str) -> float:
        if peer not in self._met:
            return super().rtt(peer)
        return statistics.median(2.0 * self._handing_over_s(peer) for _ in range(TUNED.echoes))

    def _handing_over_s(self, peer: str) -> float:
        began_s = time.perf_counter()
        self._sibling(peer)._take(self.name, _NOBODYS, b"", memoryview(b""))
        return time.perf_counter() - began_s

    def bandwidth(self, peer: str, seconds: float, max_bytes: int) -> float:
        """As of ``PeerNetwork``; within the daemon, the rate at which this machine copies memory."""
        if peer not in self._met:
            return super().bandwidth(peer, seconds, max_bytes)
        piece = np.ones(min(TUNED.measured_piece_bytes, max(1, max_bytes)), np.uint8)
        place = piece.copy()  # so its pages are there
        copied, began_s = 0, time.perf_counter()
        while copied < max_bytes and time.perf_counter() - began_s < seconds:
            np.copyto(place, piece)
            copied += len(piece)
        return 8.0 * copied / max(time.perf_counter() - began_s, 1e-9)

    def goodput(self) -> list[Goodput]:
        with self._counting:
            found = [
                Goodput(peer, carried.bytes, carried.busy_s, 0.0)
                for peer, carried in self._carried.items()
                if carried.bytes
            ]
            for carried in self._carried.values():
                carried.bytes, carried.busy_s = 0, 0.0
        return super().goodput() + found

    def progress(self, peers: Collection[str]) -> int:
        carried = sum(found.messages for peer, found in list(self._carried.items()) if peer in peers)
        return super().progress(peers) + carried
