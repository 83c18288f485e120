"""Measurements on a live link: round trips of echoes, the rate of a burst, what training achieved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.errors import ConnectionFailed
from worker.transport import TUNED
from worker.transport.contract import PeerLost
from worker.transport.frames import Direction, MessageKey

if TYPE_CHECKING:
    from worker.transport.peers.peer import Peer

_BURST = MessageKey("", 0, 0, 0, 0, Direction.EVALUATION_CODED)


def round_trip(peer: Peer, echoes: int) -> float:
    """Median of ``echoes`` echoes, seconds. Raises PeerLost, ConnectionFailed."""
    return statistics.median([_echo(peer) for _ in range(echoes)])


def _echo(peer: Peer) -> float:
    with peer.lock:
        if peer.front is None:
            raise ConnectionFailed(f"{peer.name} is not connected")
        number = peer.front.ping(time.monotonic())
        peer.echoes[number] = 0.0
        peer.room.wait_for(lambda: peer.gone or peer.echoes[number] > 0, TUNED.echo_timeout_s)
        took_s = peer.echoes.pop(number)
        if peer.gone:
            raise PeerLost(peer.name, peer.gone)
    if not took_s:
        raise ConnectionFailed(f"{peer.name} did not answer an echo within {TUNED.echo_timeout_s:g} s")
    return took_s


def burst(peer: Peer, seconds: float, max_bytes: int) -> float:
    """Bits per second of a burst, by the receiver's clock. Raises PeerLost, ConnectionFailed."""
    samples: list[tuple[int, int]] = []
    with peer.lock:
        if peer.acks is not None:
            raise ConnectionFailed(f"a measurement to {peer.name} is already under way")
        peer.acks = samples
    try:
        # Of no job, so the peer counts it and throws it away.
        peer.submit(_BURST, b"", memoryview(bytes(max_bytes)), seconds, more=False)
        peer.flush(seconds)
        peer.forget(lambda key: key == _BURST)
        # What is under way still arrives, unless the link is far slower than its window thought.
        peer.flush(1.0)
    except TimeoutError as error:
        raise ConnectionFailed(str(error)) from None
    finally:
        peer.acks = None
    if peer.gone:
        raise PeerLost(peer.name, peer.gone)
    return burst_rate_bps(samples)


def burst_rate_bps(samples: Sequence[tuple[int, int]]) -> float:
    """Bits per second from acknowledgements: (receiver's clock ns, bytes more than before).

    The first half of the time only opens the window. Raises ConnectionFailed when too little arrived to tell.
    """
    found = sorted(samples)
    middle_ns = (found[0][0] + found[-1][0]) / 2 if found else 0
    start_ns = max((clock_ns for clock_ns, _ in found if clock_ns <= middle_ns), default=0)
    nbytes = sum(nbytes for clock_ns, nbytes in found if clock_ns > start_ns)
    if not nbytes:
        raise ConnectionFailed("too little of the measurement arrived; measure longer")
    return nbytes * 8e9 / (found[-1][0] - start_ns)
