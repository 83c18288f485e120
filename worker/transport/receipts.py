"""What arrived on one stream and is not acknowledged yet.

An acknowledgement by itself costs either side as much as a message of data (``bundle``). What
a sender does not wait for therefore travels with the next data that goes the other way, which in a
pipeline is hardly ever far off; every arrival is noted with its time, so that the sender's estimates
are those of an answer at once. No socket, clock or thread here: times come in as arguments.
"""

from __future__ import annotations

from worker.transport.frames import MAX_AGE_US, MAX_MARKS, Ack, Flag

PATIENCE_S = 0.05
"""So long an arrival waits for company, to which the watch adds up to its tick."""
SAME_S = 0.0005
"""Arrivals so close together are one: frames of one message are handled one after the other."""


class Receipts:
    """Not thread-safe; the peer's lock guards it."""

    def __init__(self) -> None:
        self.due = False  # the sender waits for it
        self._received = 0
        self._marks: list[tuple[int, float]] = []

    @property
    def pending(self) -> bool:
        """Something may be told when anything leaves."""
        return self.due or bool(self._marks)

    def arrived(self, now_s: float, nbytes: int, flags: int) -> None:
        """Payload of one frame, with the acknowledgement that it asks for."""
        self._received += nbytes
        if flags & Flag.ACK_NOW:
            self.due = True
        elif flags & Flag.ACK_SOON:
            last = self._marks[-1] if self._marks else (-1, float("-inf"))
            if last[0] == self._received:
                return
            full = len(self._marks) == MAX_MARKS - 1  # one more is for what comes until it leaves
            if full or now_s - last[1] < SAME_S:
                self._marks.pop()
            self._marks.append((self._received, now_s))
            self.due = self.due or full

    def overdue(self, now_s: float) -> bool:
        """Nothing has taken the oldest arrival along for too long."""
        return bool(self._marks) and now_s - self._marks[0][1] >= PATIENCE_S

    def take(self, now_s: float, confirmed: tuple[int, ...]) -> Ack:
        """The acknowledgement of everything, as of now."""
        marks = [(at, min(MAX_AGE_US, int(1e6 * (now_s - when_s)))) for at, when_s in self._marks]
        if not marks or marks[-1][0] < self._received:
            marks.append((self._received, 0))
        self.due, self._marks = False, []
        return Ack(tuple(marks), int(1e9 * now_s), confirmed)
