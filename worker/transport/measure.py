"""Measurements on a live link: round trips of echoes, the rate of a burst, what training achieved."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from atoll.errors import ConnectionFailed
from worker.transport.contract import PeerLost

ECHOES = 10


@dataclass(frozen=True, slots=True)
class Goodput:
    """What one peer acknowledged of training's boundary tensors since the last report."""

    peer: str
    bytes: int
    busy_s: float  # the line's time for them
    rtt_s: float  # 0 before the first measurement
    quickest_bps: float = 0.0  # of the quickest quarter of what the line carried (``linetime``)


class Echoing(Protocol):
    """A connection."""

    number: int

    def ping(self, now_s: float) -> int:
        """Send an echo request; returns its number. The peer's lock is held."""


class Measured(Protocol):
    """A peer as far as measurements go; ``room`` is notified when what is waited for may have come."""

    name: str
    gone: str
    probe_bytes: int
    probe_acks: list[tuple[int, int, int]] | None
    echoes: dict[tuple[int, int], float]
    room: threading.Condition

    @property
    def lock(self) -> AbstractContextManager[Any, Any]: ...

    @property
    def front(self) -> Echoing | None: ...

    @property
    def probe_done(self) -> bool: ...

    def nudge_all(self) -> None: ...


def round_trip(peer: Measured, echoes: int, timeout_s: float) -> float:
    """Median of ``echoes`` 64-byte echoes, seconds. Raises PeerLost, ConnectionFailed."""
    return statistics.median([_echo(peer, timeout_s) for _ in range(echoes)])


def _echo(peer: Measured, timeout_s: float) -> float:
    with peer.lock:
        lane = peer.front
        if lane is None:
            raise ConnectionFailed(f"{peer.name} is not connected")
        awaited = (lane.number, lane.ping(time.monotonic()))
        peer.echoes[awaited] = 0.0
        peer.room.wait_for(lambda: peer.gone or peer.echoes[awaited] > 0, timeout_s)
        took_s = peer.echoes.pop(awaited)
        if peer.gone:
            raise PeerLost(peer.name, peer.gone)
    if not took_s:
        raise ConnectionFailed(f"{peer.name} did not answer an echo within {timeout_s:g} s")
    return took_s


def burst(peer: Measured, seconds: float, max_bytes: int) -> float:
    """Bits per second of a burst, by the receiver's clock. Raises PeerLost, ConnectionFailed."""
    with peer.lock:
        if peer.probe_acks is not None:
            raise ConnectionFailed(f"a measurement to {peer.name} is already under way")
        samples: list[tuple[int, int, int]] = []
        peer.probe_acks, peer.probe_bytes = samples, max_bytes
        peer.nudge_all()
        peer.room.wait_for(lambda: peer.gone or peer.probe_done, seconds)
        peer.probe_bytes = 0
        # What is under way still arrives, unless the link is far slower than its window thought.
        peer.room.wait_for(lambda: peer.gone or peer.probe_done, 1.0)
        peer.probe_acks = None
        if peer.gone:
            raise PeerLost(peer.name, peer.gone)
    return burst_rate_bps(samples)


def burst_rate_bps(samples: Sequence[tuple[int, int, int]]) -> float:
    """Bits per second from (connection, receiver's clock ns, cumulative bytes) acknowledgements.

    The first half of the bytes only opens the windows. Raises ConnectionFailed when too
    little arrived to tell.
    """
    base: dict[int, int] = {}  # what a connection had carried before
    latest: dict[int, int] = {}
    curve = []
    for lane, clock_ns, received in sorted(samples, key=lambda sample: sample[1]):
        base.setdefault(lane, received)
        latest[lane] = max(received, latest.get(lane, 0))
        curve.append((clock_ns, sum(latest[lane] - base[lane] for lane in latest)))
    if len(curve) < 2:
        raise ConnectionFailed("too little of the measurement arrived; measure longer")
    first, last = curve[0], curve[-1]
    start = next(point for point in curve if point[1] - first[1] >= (last[1] - first[1]) / 2)
    if last[0] <= start[0] or last[1] <= start[1]:
        start = first
    if last[0] <= start[0]:
        raise ConnectionFailed("too little of the measurement arrived; measure longer")
    return (last[1] - start[1]) * 8e9 / (last[0] - start[0])
