"""Limit of a rate: a token bucket."""

from __future__ import annotations

REFUSALS, REFUSALS_PER_S = 100, 0.1
"""Lines of a log about callers that are turned away: who knocks for ever must not fill it."""


class Budget:
    """Token bucket: ``burst`` at once, ``per_s`` each second after that; refusals are counted."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at_s = burst, 0.0
        self._refused = 0

    def take(self, now_s: float, cost: float = 1.0) -> bool:
        """Spend ``cost`` at ``now_s``, on a clock that never goes back; False when it is refused."""
        self._left = min(self._burst, self._left + self._per_s * max(0.0, now_s - self._at_s))
        self._at_s = max(self._at_s, now_s)
        if cost > self._left:
            self._refused += 1
            return False
        self._left -= cost
        return True

    def refused(self) -> int:
        """Refusals since the last call."""
        found, self._refused = self._refused, 0
        return found
