"""How long the link to a peer was busy: what turns acknowledged bytes into the link's own rate.

A chunk sent at s on an idle link is acknowledged at s + size/rate + rtt; one sent while another is
still being carried waits for it. So the link was busy with a chunk from max(the acknowledgement
before it, s + rtt) to its own acknowledgement. Pauses of the sender, even those shorter than a
round trip, are no work of the link: bytes over these seconds is the link's rate whether it was
kept full or not. Where only some of the bytes count, they get their share of those seconds.

An end that is out of processor time, a quota's or a busy machine's, reads and acknowledges late, which
looks like a slow link. But it is not always out of it: what the quickest part of the bytes took shows
what the link can do. Times come in as arguments.
"""

from __future__ import annotations

from collections import deque

from worker.transport import TUNED

MAX_BURSTS = 256  # remembered between two calls; a step of training has some dozens


class BusyTime:
    """Busy seconds since the last ``take``. Not thread-safe; the peer's lock guards it."""

    def __init__(self) -> None:
        self._settled_at_s = float("-inf")
        self._busy_s = 0.0
        self._burst: tuple[float, int] | None = None  # since when not idle, and the bytes of that time
        self._bursts: deque[tuple[float, int]] = deque(maxlen=MAX_BURSTS)  # (s, bytes)

    def sent(self, now_s: float, nbytes: int, *, idle: bool) -> None:
        """A chunk leaves; ``idle``: nothing was under way."""
        if idle:
            self._burst = (now_s, 0)
        if self._burst is not None:
            self._burst = (self._burst[0], self._burst[1] + nbytes)

    def acked(self, now_s: float, sent_s: float, rtt_s: float, share: float, *, idle: bool) -> None:
        """What left from ``sent_s`` on has arrived; ``rtt_s``: of the link without a load; ``share``: of the
        bytes, how much counts; ``idle``: nothing is under way any more."""
        now_s = max(now_s, sent_s, self._settled_at_s)
        begun_s = max(self._settled_at_s, sent_s + rtt_s)
        least_s = TUNED.least_busy_share * (now_s - max(sent_s, self._settled_at_s))
        self._busy_s += share * max(now_s - begun_s, least_s)
        self._settled_at_s = now_s
        if idle and self._burst is not None:
            lasted_s = now_s - self._burst[0]
            self._bursts.append((max(lasted_s - rtt_s, TUNED.least_busy_share * lasted_s), self._burst[1]))

    def broke(self, now_s: float) -> None:
        """What was under way will not all arrive: the time until now tells nothing."""
        self._burst, self._settled_at_s = None, now_s

    def take_quickest(self) -> float:
        """Bytes/s of the quickest bursts since the last call, a burst being all between two times at which
        nothing was under way: those that together are a quarter of the bytes; 0 where there were none."""
        bursts = sorted(self._bursts, key=lambda burst: burst[0] / max(1, burst[1]))
        wanted = TUNED.quickest_quantile * sum(nbytes for _, nbytes in bursts)
        self._bursts.clear()
        taken_s, taken = 0.0, 0
        for seconds, nbytes in bursts:
            if taken and taken >= wanted:
                break
            taken_s, taken = taken_s + seconds, taken + nbytes
        return taken / taken_s if taken_s > 0.0 else 0.0

    def take(self) -> float:
        """Busy seconds since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s
