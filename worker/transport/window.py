"""How many bytes may be under way on one connection, from what its acknowledgements tell.

window = rate * (gain * (rtt + slack) + late), two short chunks at least; rate = largest delivery rate
of the last second or ten round trips, or what one of the last sixteen short bursts had on the whole;
rtt = smallest of the last half minute; late = what acknowledgements waited for behind the other
direction's data (``lateness``). A gain above one keeps the pipe full and finds a link that grew;
all the rest stays out of socket buffers, where a late gradient could not overtake it. The delivery rate,
no larger than the rate at which the same bytes were sent, after BBR (Cardwell 2016, section 4.1; the
bound: draft-cheng-iccrg-delivery-rate-estimation). Times come in as arguments.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from worker.transport.frames import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Flag
from worker.transport.lateness import Least

GAIN = 1.6
SLACK_S = 0.010
CHUNK_S = 0.032
"""A chunk lasts about this long on the link: what a backward message waits at most behind one."""
SLOW_CHUNK_S = 0.064
"""The same on a line that carries little, where a tensor is many chunks and each costs both ends more time
than its bytes. On fast lines the two directions would be in each other's way (docs/decisions/012)."""
LEAST_CHUNKS = 2  # of CHUNK_S, a window holds ...
MOST_OF_LEAST = 1 << 20
"""... up to this many bytes, however short the round trip. An end that is out of processor time takes perhaps
10 Mbit/s over 3 ms, which by the round trip alone gives chunks of 16 KiB: twice as much of that time."""
SMALLEST_CHUNK = 16 << 10
LARGEST_SHARED_CHUNK = 64 << 10
SLOW_RATE = 5e6  # bytes/s
"""Of several connections to a peer each shows only its part of the line's rate. Where all together carry no
more than this, chunks fit the line up to 64 KiB, since each costs both ends some hundred microseconds: half
a second of CPU time a step, on a fifth of a core behind 60 ms, went for chunks of 16 KiB on six connections.
On faster lines each has its own: one that has lost a packet should hold little."""
LEAST_SHARE = 256 << 10
"""Of the line's window a connection takes what two of them would if all were used alike, and this at least.
With all of it in one, the line's rate, and so its window, followed every loss of that one down, while the
others stood idle: 35 % of a line of 100 Mbit/s behind 40 ms that loses one packet in a thousand."""
RATE_HORIZON_S = 1.0
BURSTS = 16
"""A burst lies between two times at which nothing was under way. An end that is out of processor time reads
late: a second may pass without a message that shows what the line can do. With the window of such a rate
the same bytes cost four times as many chunks, so the end has even less time to read. A burst counts with
its bytes over all its time, the round trip too, since single acknowledgements may come in a heap; one of a
second and more is the line's own doing, and ends what was known."""
LEAST_BURST_S = 1e-3
LATE_ACKS = 12
"""Late is the mean of so many. With their largest both ends take turns to send a whole window at once, behind
which the other's acknowledgements wait for so long that it has nothing left to send."""
MOST_LATE_RTTS = 1
MOST_LATE_CHUNKS = 2
"""Of round trips and of chunks' times, how late counts at most: as much as the other direction has queued by
its own window. What is later was lost and sent again, and more bytes under way would only lose more."""
ASKING = 8
"""After so small a part of a window an acknowledgement is asked for. With a quarter, what came late by that
alone and by a chunk's own time took all that the gain gives on a line of 80 ms."""


def on_line(rate: float, rtt_s: float) -> float:
    """Bytes that a line of ``rate`` bytes/s itself holds, and some to spare."""
    return GAIN * rate * (rtt_s + SLACK_S)


class _Sent(NamedTuple):
    end: int
    at_s: float
    delivered: int
    delivered_at_s: float
    acked_left_at_s: float  # when what was acknowledged last before had been sent
    backlogged: bool


class Window:
    """Bytes in flight on one connection. Not thread-safe; the peer's lock guards it."""

    def __init__(self, initial: int = 256 << 10, maximum: int = 64 << 20) -> None:
        self._initial, self._maximum = initial, maximum
        self._sent: deque[_Sent] = deque()
        self._rates: deque[tuple[float, float]] = deque()  # (when, bytes/s), falling
        self._bursts: deque[float] = deque(maxlen=BURSTS)  # bytes/s
        self._burst: tuple[float, int] | None = None  # this one: since when, acknowledged before
        self._rtts = Least()
        self._lates_s: deque[float] = deque(maxlen=LATE_ACKS)
        self._late_s = 0.0  # their mean
        self.sent_bytes = 0
        self.acked_bytes = 0
        self._acked_at_s = 0.0
        self._acked_left_at_s = 0.0
        self._least_chunk = SMALLEST_CHUNK
        self._share = maximum
        self._line_slow: bool | None = None  # None: this connection is all there is
        self._asked_at = 0  # sent when an acknowledgement was last asked for, however soon
        self._pressed_at = 0  # ... at once
        self._rested_at = 0  # ... when last nothing else waited
        # What follows from all this, asked several times a chunk.
        self.rtt_s: float | None = None
        """Smallest round trip of the last half minute; None before the first."""
        self.rate: float | None = None
        """Largest recent delivery rate, bytes/s; None before the first."""
        self.size = 0
        self.chunk = 0
        """Bytes of the next chunk, a multiple of 4 KiB."""
        self._derive()

    def _derive(self) -> None:
        rates = [*self._bursts, *([self._rates[0][1]] if self._rates else ())]
        self.rate = rate = max(rates, default=None)
        self.size = size = self.size_at(self.rtt_s)
        slow = self.slow if self._line_slow is None else self._line_slow
        wanted = self._initial / 4 if rate is None else rate * (SLOW_CHUNK_S if slow else CHUNK_S)
        part = max(size / 4, min(size, MOST_OF_LEAST) / LEAST_CHUNKS)
        fitting = int(min(MAX_CHUNK_BYTES, max(self._least_chunk, min(wanted, part))))
        self.chunk = fitting // MIN_CHUNK_BYTES * MIN_CHUNK_BYTES

    @property
    def in_flight(self) -> int:
        return self.sent_bytes - self.acked_bytes

    def size_at(self, rtt_s: float | None) -> int:
        """The window at a round trip that is known better elsewhere."""
        rate = self.rate
        if rate is None or rtt_s is None:
            return self._initial
        least = max(self._least, min(MOST_OF_LEAST, LEAST_CHUNKS * CHUNK_S * rate))
        late_s = min(self._late_s, MOST_LATE_RTTS * rtt_s + MOST_LATE_CHUNKS * CHUNK_S)
        return int(min(self._share, max(least, on_line(rate, rtt_s) + rate * late_s)))

    @property
    def _least(self) -> int:
        return 4 * self._least_chunk

    @property
    def slow(self) -> bool:
        """The line carries little."""
        return self.rate is not None and self.rate <= SLOW_RATE

    def fit(self, line: Window, connections: int) -> None:
        """This connection carries a part of what ``line``, all ``connections`` together, do; the only one
        has no other measure than itself."""
        before = self._least_chunk, self._share, self._line_slow
        if connections == 1:
            self._least_chunk, self._share, self._line_slow = SMALLEST_CHUNK, self._maximum, None
        else:
            self._line_slow = line.slow
            self._share = min(self._maximum, max(LEAST_SHARE, 2 * line.size // connections))
            shared = min(LARGEST_SHARED_CHUNK, line.chunk) if line.slow else 0
            self._least_chunk = max(SMALLEST_CHUNK, shared)
        if (self._least_chunk, self._share, self._line_slow) != before:
            self._derive()

    @property
    def open(self) -> bool:
        return self.sent_bytes - self.acked_bytes < self.size

    @property
    def unasked(self) -> bool:
        """True when bytes were sent after the last request for an acknowledgement."""
        return self.sent_bytes > self._asked_at

    @property
    def unpressed(self) -> bool:
        """Bytes under way whose acknowledgement was not asked for at once."""
        return self.unasked_bytes > 0

    @property
    def unasked_bytes(self) -> int:
        """Under way, without an acknowledgement asked for at once: they do not open the window."""
        return max(0, self.sent_bytes - max(self._pressed_at, self.acked_bytes))

    def pressed(self) -> None:
        """An acknowledgement of everything sent is asked for at once."""
        self._asked_at = self._pressed_at = self.sent_bytes

    def sent(self, now_s: float, nbytes: int, *, last: bool) -> int:
        """Note a chunk that leaves now; returns the acknowledgement it should ask for: 0,
        Flag.ACK_NOW, or Flag.ACK_SOON while the window is far from closing.

        ``last``: nothing else waits to be sent.
        """
        if not self.in_flight:
            self._acked_at_s = self._acked_left_at_s = now_s  # a pause is not a slow delivery
            self._burst = (now_s, self.acked_bytes)
        # While what was sent before a rest is unacknowledged, a sample spans that rest.
        backlogged = not last and self.acked_bytes >= self._rested_at
        self.sent_bytes += nbytes
        acked = self.acked_bytes, self._acked_at_s, self._acked_left_at_s
        self._sent.append(_Sent(self.sent_bytes, now_s, *acked, backlogged))
        if last:
            self._asked_at = self._rested_at = self.sent_bytes
            if self.in_flight < self.size / 2:
                return Flag.ACK_SOON
        elif self.unasked_bytes < self.size / ASKING:
            return 0
        self.pressed()
        return Flag.ACK_NOW

    def acked(self, now_s: float, received: int) -> int:
        """The peer had ``received`` bytes in all at ``now_s`` less the way back without a queue, of which
        the caller may learn later; returns how many of them are new."""
        new = received - self.acked_bytes
        if new <= 0:
            return 0
        newest = None
        while self._sent and self._sent[0].end <= received:
            newest = self._sent.popleft()
        # A peer cannot have waited longer than since the chunk left.
        now_s = max(now_s, self._acked_at_s, newest.at_s if newest is not None else now_s)
        self.acked_bytes, self._acked_at_s = received, now_s
        if newest is not None:
            sending_s = newest.at_s - newest.acked_left_at_s
            took_s = max(1e-6, now_s - newest.delivered_at_s, sending_s)
            self._acked_left_at_s = newest.at_s
            rate = (received - newest.delivered) / took_s
            # Without a backlog the sender was the limit: such a sample only counts when it is more.
            if newest.backlogged or self.rate is None or rate > self.rate:
                self._note_rate(now_s, rate)
            self._note_rtt(now_s, now_s - newest.at_s)
        self._note_burst(now_s)
        self._derive()
        return new

    def broke(self) -> None:
        """What is under way will not all arrive: the time until it is settled tells nothing."""
        self._burst = None

    def _note_burst(self, now_s: float) -> None:
        if self._burst is None:
            return
        since_s, before = self._burst
        lasted_s = max(now_s - since_s, self.rtt_s or 0.0, LEAST_BURST_S)
        rate = (self.acked_bytes - before) / lasted_s
        if lasted_s >= RATE_HORIZON_S:
            self._bursts.clear()
            if not self._rates:
                self._note_rate(now_s, rate)
        elif not self.in_flight:
            self._bursts.append(rate)
            if len(self._bursts) == BURSTS:
                # Messages of one chunk each give no samples by which older ones would end.
                self._forget_rates(now_s)

    def late(self, late_s: float) -> None:
        """An acknowledgement comes ``late_s`` later than it could: so long its bytes seem under way."""
        self._lates_s.append(late_s)
        self._late_s = sum(self._lates_s) / len(self._lates_s)

    def note_rtt(self, now_s: float, rtt_s: float) -> None:
        self._note_rtt(now_s, rtt_s)
        self._derive()

    def _note_rtt(self, now_s: float, rtt_s: float) -> None:
        self.rtt_s = self._rtts.note(now_s, rtt_s)

    def _note_rate(self, now_s: float, rate: float) -> None:
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now_s, rate))
        self._forget_rates(now_s)

    def _forget_rates(self, now_s: float) -> None:
        horizon_s = max(RATE_HORIZON_S, 10 * (self.rtt_s or 0.0))
        while self._rates and self._rates[0][0] < now_s - horizon_s:
            self._rates.popleft()
