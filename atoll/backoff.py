"""Pauses that double after each failure in a row, up to a bound: the only back-off."""

from __future__ import annotations

import math

MOST_DOUBLINGS = 16


def doubled_s(first_s: float, failures: int, most_s: float = math.inf) -> float:
    """Seconds to wait after so many failures in a row: ``first_s`` after one, then twice as long each."""
    return min(most_s, first_s * 2.0 ** min(max(0, failures - 1), MOST_DOUBLINGS))


class Backoff:
    """The pauses of one loop; any thread that holds the loop's own lock."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self.reset()

    def reset(self) -> None:
        """Something worked: the next failure counts as a first one."""
        self._failures = 0

    def next_s(self) -> float:
        """Count a failure; seconds to wait before the next attempt."""
        self._failures += 1
        return doubled_s(self._first_s, self._failures, self._most_s)
