"""How long the line to a peer was at work: what turns acknowledged bytes into the line's own rate.

A chunk sent at s on an idle line is acknowledged at s + size/rate + rtt; one sent while another is
still being carried waits for it. So the line was at work for a chunk from max(the acknowledgement
before it, s + rtt) to its own acknowledgement. Pauses of the sender, even those shorter than a
round trip, are no work of the line: bytes over these seconds is the line's rate whether it was
kept full or not. Where only some of the bytes count, they get their share of those seconds.

An end that is out of processor time, a quota's or a busy machine's, reads and acknowledges late, which
looks like a slow line. But it is not always out of it: what the quickest part of the bytes took shows
what the line can do. Times come in as arguments.
"""

from __future__ import annotations

from collections import deque

LEAST_SHARE = 0.1
"""Of the time from sending to acknowledgement: a round trip estimated too long must not leave
nothing. It also bounds what a message far shorter than the round trip can show."""
QUICKEST = 0.25
"""Of the bytes; fewer might be a quirk of the clocks."""
MAX_BURSTS = 256  # remembered between two calls; a step of training has some dozens


class LineTime:
    """Seconds at work since the last ``take``. Not thread-safe; the peer's lock guards it."""

    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque()  # (sent up to and with it, when)
        self._sent_bytes = 0
        self._settled_bytes = 0
        self._settled_at_s = float("-inf")
        self._busy_s = 0.0
        self._begun: tuple[float, int] | None = None  # when the line last was idle, bytes sent till then
        self._bursts: deque[tuple[float, int]] = deque(maxlen=MAX_BURSTS)  # (s, bytes)

    def sent(self, now_s: float, nbytes: int) -> None:
        """A chunk leaves."""
        if not self._sent:
            self._begun = (now_s, self._sent_bytes)
        self._sent_bytes += nbytes
        self._sent.append((self._sent_bytes, now_s))

    def settled(self, now_s: float, nbytes: int, rtt_s: float, counted: int | None = None) -> None:
        """The oldest ``nbytes`` are no longer under way; ``rtt_s``: of the line without a load;
        ``counted``: how many of them count, None for all."""
        if not self._sent:
            return
        first_s = self._sent[0][1]
        now_s = max(now_s, first_s, self._settled_at_s)
        self._settled_bytes += nbytes
        while self._sent and self._sent[0][0] <= self._settled_bytes:
            self._sent.popleft()
        begun_s = max(self._settled_at_s, first_s + rtt_s)
        least_s = LEAST_SHARE * max(0.0, now_s - max(first_s, self._settled_at_s))
        share = 1.0 if counted is None or not nbytes else counted / nbytes
        self._busy_s += share * max(now_s - begun_s, least_s)
        self._settled_at_s = now_s
        if self._begun is not None and not self._sent:
            begun_s, before = self._begun
            lasted_s = now_s - begun_s
            self._bursts.append((max(lasted_s - rtt_s, LEAST_SHARE * lasted_s), self._sent_bytes - before))

    def broke(self) -> None:
        """What is under way will not all arrive: the time until it is settled tells nothing."""
        self._begun = None

    def take_quickest(self) -> float:
        """Bytes/s of the quickest bursts since the last call, a burst being all between two times at which
        nothing was under way: those that together are a quarter of the bytes; 0 where there were none."""
        bursts = sorted(self._bursts, key=lambda burst: burst[0] / max(1, burst[1]))
        wanted = QUICKEST * sum(nbytes for _, nbytes in bursts)
        self._bursts.clear()
        taken_s, taken = 0.0, 0
        for seconds, nbytes in bursts:
            if taken and taken >= wanted:
                break
            taken_s, taken = taken_s + seconds, taken + nbytes
        return taken / taken_s if taken_s > 0.0 else 0.0

    def take(self) -> float:
        """Seconds at work since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s
