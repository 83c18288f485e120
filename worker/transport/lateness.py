"""How much later than it could an acknowledgement comes, by the clock of the peer that sent it.

Acknowledgements go back on the connections on which the peer's own data goes, behind what it has under
way. A sender that takes the delay of that other direction for its own line's sees a slow line, makes
its window smaller, and stays there, while the other end has the line to itself (docs/decisions/017). An
acknowledgement tells when it left by the peer's clock. What that lies before now, less the least of
the last half minute, is what it waited for on its way. Times come in as arguments.
"""

from __future__ import annotations

HORIZON_S = 30.0
MOST_LATE_S = 0.5
"""A peer's clock is its own affair: what it says widens a window by so much of the line at most."""


class Least:
    """Smallest value of the last half minute, or of a quarter at least."""

    def __init__(self) -> None:
        self._newest = self._older = float("inf")
        self._since_s = 0.0

    def note(self, now_s: float, value: float) -> float:
        """Take ``value`` in; returns the smallest."""
        if now_s - self._since_s > HORIZON_S / 2:
            self._older, self._newest = self._newest, float("inf")
            self._since_s = now_s
        self._newest = min(self._newest, value)
        return min(self._newest, self._older)


class Lateness:
    """Of one peer's acknowledgements. Not thread-safe; the peer's lock guards it."""

    def __init__(self) -> None:
        self._apart = Least()

    def note(self, now_s: float, clock_s: float) -> float:
        """Seconds by which an acknowledgement that arrives at ``now_s`` and left at ``clock_s``, by the
        peer's clock, took longer than the quickest of late."""
        apart_s = now_s - clock_s
        return min(MOST_LATE_S, apart_s - self._apart.note(now_s, apart_s))
