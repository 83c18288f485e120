"""How many connections a peer that we dialled gets: as many as what is under way fills.

One TCP flow carries at most 1.22 * MSS / (RTT * sqrt(loss)) (papers/peers.md 7.4), so a long fast way
needs several. Each costs both ends threads, echoes and memory: on a slow line, or on an eighth of a
core, for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from worker.transport.window import on_line

LANE_BYTES = 128 << 10
"""Under way on a connection, before another one is opened."""
FIRST = 2
SOME_RTT_S = 0.008
MANY_RTT_S = 0.030
RECEIVED_OVER_S = 0.25  # the rate of what arrives is taken over so long, at least


def most_lanes(rtt_s: float) -> int:
    """Connections to a peer at this round trip, at most."""
    return 1 if rtt_s < SOME_RTT_S else 2 if rtt_s < MANY_RTT_S else 8


@dataclass(slots=True)
class Lanes:
    """Of one peer. Not thread-safe: the transport's watching thread asks."""

    address: tuple[str, int]
    most: int
    opened: int = 1  # also the number of the next
    growing: bool = False
    _since: tuple[float, int] = field(default=(0.0, 0))  # (s, bytes received until then)

    def take(self, wanted: int) -> range:
        """The numbers of the connections to open so that there are ``wanted``."""
        numbers = range(self.opened, min(wanted, self.most))
        self.opened += len(numbers)
        return numbers

    def lacking(self, now_s: float, under_way: int, received: int, rtt_s: float) -> range:
        """The same for what is under way: ``under_way`` bytes by what we send, and what arrives,
        ``received`` bytes so far, at the round trip ``rtt_s``."""
        since_s, before = self._since
        arriving = 0.0
        if now_s - since_s >= max(RECEIVED_OVER_S, 2 * rtt_s):
            arriving = on_line((received - before) / (now_s - since_s), rtt_s)
            self._since = (now_s, received)
        if self.growing:
            return range(0)
        return self.take(ceil(max(under_way, arriving) / LANE_BYTES))
