"""How many bytes may be under way to a peer: one window over all its connections.

window = rate * (rtt + 50 ms + late). Rate: the largest delivery rate of late, by the peer's clock, which
its acknowledgements carry; at most the rate at which the same bytes were sent (Cardwell 2016, section 4.1).
The 50 ms keep a link busy, find one that grew, and bound what a gradient waits behind. Late: how much
longer than the quickest an acknowledgement takes back, behind what the other direction has queued by its own
window. Without it one end of a link that both fill yields to the other and stays there.

What can wait may keep the link busy too, with a quarter of the slack: what is urgent again waits behind that.

In one round trip of eight the slack is twice as long (Cardwell 2016, section 4.1): who handles what
arrived only when the processor is its own delivers little of a small window, and more of a larger.
No clock here: times come in as arguments.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.transport import TUNED
from worker.transport.frames import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES

PROBE_SLACK_S = 2 * TUNED.slack_s
MOST_LATE_S = 2 * TUNED.slack_s
"""What is later was lost and sent again. A peer that lies about its clock widens no more than this."""


class Recent:
    """Largest value of the last ``horizon_s``, or of the half of it at least."""

    def __init__(self, horizon_s: float) -> None:
        self.horizon_s = horizon_s
        self._newest = self._older = float("-inf")
        self._since_s = 0.0

    def note(self, now_s: float, value: float) -> float:
        """Take ``value`` in; returns the largest."""
        if now_s - self._since_s > self.horizon_s / 2:
            self._older, self._newest = self._newest, float("-inf")
            self._since_s = now_s
        self._newest = max(self._newest, value)
        return max(self._newest, self._older)


class Sent(NamedTuple):
    """A chunk that left, and how things stood then."""

    nbytes: int
    at_s: float
    delivered: int  # bytes, of all
    clock_s: float | None  # the peer's, at that; None: nothing was under way
    last_left_s: float  # when the chunk left that was acknowledged last before
    backlogged: bool


class Window:
    """Bytes in flight to one peer. Not thread-safe; the peer's lock guards it."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._rates, self._rtts = Recent(TUNED.rate_horizon_s), Recent(TUNED.rtt_horizon_s)
        self._quickest = Recent(TUNED.clock_horizon_s)
        self._late_s = 0.0
        self._delivered = 0
        self._clock_s: float | None = None
        self._last_left_s = 0.0
        self.in_flight = 0
        self.rate: float | None = None  # bytes/s
        self.rtt_s: float | None = None
        self.size = self._steady_size = TUNED.first_window_bytes
        self._quiet_size = TUNED.quiet_share * TUNED.first_window_bytes
        self._rounds = 0
        self._round_ends = 0  # once so many bytes have been delivered

    @property
    def open(self) -> bool:
        return self.in_flight < self.size

    @property
    def quiet(self) -> bool:
        """Whether so little is under way that what can wait may leave."""
        return self.in_flight < self._quiet_size

    @property
    def likely_rate(self) -> float:
        """Bytes a second; as long as nothing was measured those of the first window."""
        return self.rate or TUNED.first_window_bytes / ((self.rtt_s or 0.0) + TUNED.slack_s)

    @property
    def chunk(self) -> int:
        """Bytes of the next chunk, a multiple of 4 KiB."""
        return (
            max(4 * MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, self._steady_size // TUNED.chunks_a_window))
            & -MIN_CHUNK_BYTES
        )

    def sent(self, now_s: float, nbytes: int, *, backlogged: bool) -> Sent:
        """A chunk leaves; ``backlogged``: more waits."""
        if not self.in_flight:
            self._clock_s, self._last_left_s = None, now_s
        self.in_flight += nbytes
        return Sent(nbytes, now_s, self._delivered, self._clock_s, self._last_left_s, backlogged)

    def acked(self, now_s: float, clock_s: float, nbytes: int, newest: Sent | None) -> None:
        """``nbytes`` more arrived, with ``newest`` at the latest, which the peer sent at ``clock_s`` by its
        clock."""
        self.in_flight -= nbytes
        self._delivered += nbytes
        if self._delivered >= self._round_ends:
            self._rounds += 1
            self._round_ends = self._delivered + self.in_flight
        apart_s = now_s - clock_s
        late_s = min(MOST_LATE_S, apart_s + self._quickest.note(now_s, -apart_s))
        self._late_s += (late_s - self._late_s) / TUNED.late_acks
        # Those of another connection may have come first.
        self._clock_s = clock_s if self._clock_s is None else max(clock_s, self._clock_s)
        if newest is None:
            return
        taken_s = now_s - newest.at_s if newest.clock_s is None else self._clock_s - newest.clock_s
        rate = (self._delivered - newest.delivered) / max(1e-6, taken_s, newest.at_s - newest.last_left_s)
        self._last_left_s = max(self._last_left_s, newest.at_s)
        self.note_rtt(now_s, now_s - late_s - newest.at_s)
        # Without a backlog the sender was the limit: such a sample only counts when it is more.
        if newest.backlogged or rate > self.likely_rate:
            self._rates.horizon_s = max(TUNED.rate_horizon_s, 10 * (self.rtt_s or 0.0))
            self.rate = self._rates.note(now_s, rate)
        self._resize()

    def broke(self, nbytes: int) -> None:
        """``nbytes`` are no longer under way, as their connection broke."""
        self.in_flight -= nbytes

    def note_rtt(self, now_s: float, rtt_s: float) -> None:
        """An echo took ``rtt_s``."""
        self.rtt_s = -self._rtts.note(now_s, -rtt_s)
        self._resize()

    def _resize(self) -> None:
        if self.rate is not None and self.rtt_s is not None:
            unqueued_s = self.rtt_s + self._late_s
            self._quiet_size = min(
                self._maximum, self.rate * (unqueued_s + TUNED.quiet_share * TUNED.slack_s)
            )
            probes = self._rounds % TUNED.probe_rounds == 0
            self._steady_size = self._within(self.rate * (unqueued_s + TUNED.slack_s))
            self.size = self._within(self.rate * (unqueued_s + (PROBE_SLACK_S if probes else TUNED.slack_s)))

    def _within(self, nbytes: float) -> int:
        return max(TUNED.least_window_bytes, min(self._maximum, int(nbytes)))
