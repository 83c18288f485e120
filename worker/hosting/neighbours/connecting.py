"""Being connected with the neighbours of a plan, all at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from atoll.errors import AtollError, ConnectionFailed
from worker.hosting import TUNED
from worker.transport.contract import PeerLost

if TYPE_CHECKING:
    from atoll.messages.to_worker import PeerLink
    from worker.cancel import Cancel
    from worker.session.events import ProbeLink
    from worker.transport.contract import Paths
    from worker.transport.network import PeerNetwork

MIN_PROBE_BYTES = 64 << 10


def expect(links: Sequence[PeerLink], network: PeerNetwork, timeout_s: float) -> None:
    """Begin to be connected to every neighbour, and return at once: those who are there already wait no
    longer for this end than a connection takes, though its stage may load for minutes."""
    for link in links:
        if not network.connected(link.worker):
            network.expect(link.worker, link.paths, timeout_s)


def connect(links: Sequence[PeerLink], network: PeerNetwork, timeout_s: float, cancel: Cancel) -> None:
    """Be connected to every neighbour. Raises PeerLost naming the one that is not, Cancelled."""
    deadline_s = time.monotonic() + timeout_s
    for link in links:
        network.admit(link.worker)
    _together([partial(_reach, network, link, timeout_s) for link in links], deadline_s, cancel)


def _reach(network: PeerNetwork, link: PeerLink, timeout_s: float) -> None:
    try:
        connect_one(network, link.worker, link.paths, timeout_s)
    except PeerLost:
        raise
    except ConnectionFailed as error:
        raise PeerLost(link.worker, str(error)) from None


def connect_one(network: PeerNetwork, peer: str, paths: Paths, timeout_s: float) -> None:
    """Be connected to ``peer`` by whichever way works first. Raises ConnectionFailed."""
    if not network.connected(peer):
        network.meet(peer, paths, timeout_s)


def time_link(network: PeerNetwork, asked: ProbeLink) -> tuple[float, float, str]:
    """Return a link's round trip in seconds, its rate in bits a second, and what went wrong, "" nothing."""
    rtt_s = rate_bps = 0.0
    peer = asked.link.worker
    try:
        connect_one(network, peer, asked.link.paths, TUNED.probed_within_s)
        rtt_s = network.rtt(peer)
        if asked.max_bytes:
            rate_bps = network.bandwidth(peer, asked.seconds, max(asked.max_bytes, MIN_PROBE_BYTES))
    except AtollError as failed:
        return rtt_s, rate_bps, str(failed)
    return rtt_s, rate_bps, ""


def _together(waits: Sequence[Callable[[], object]], deadline_s: float, cancel: Cancel) -> None:
    """Run all at once; the first error counts. Given up, not stopped, when cancelled."""
    failures: list[AtollError] = []

    def attempt(wait: Callable[[], object]) -> None:
        try:
            wait()
        except AtollError as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(w,), name="atoll-dial", daemon=True) for w in waits]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failures:
        cancel.wait(TUNED.connecting_poll_s)
        if time.monotonic() > deadline_s + 2.0:
            break
    if failures:
        raise failures[0]
