"""Duty cycle: computing for a share of the time, by resting between ops.

A bucket of compute seconds fills with time at the rate of the share, up to ``BURST_S``; what is computed
empties it, and an op begins only when it is not below empty. So waiting for messages is rest, too, and the
share holds over any span much longer than one op.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

BURST_S = 0.1
PIECE_S = 0.1  # of a rest: then it looks whether it is to go on
LEAST_S = 1e-4  # a shorter rest waits until there is more of it


class Stop(Protocol):
    """Ends rests early."""

    @property
    def is_set(self) -> bool: ...


class DutyCycle:
    """``rest`` in the thread that computes, ``limit`` in any.

    ``used_s()``: seconds computed so far. ``rested(seconds)`` is called after each piece of a rest.
    """

    def __init__(
        self,
        used_s: Callable[[], float] = time.process_time,
        rested: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._used_s, self._rested, self._clock, self._sleep = used_s, rested, clock, sleep
        self._lock = threading.Lock()
        self._share = 1.0
        self._credit_s = 0.0  # below 0: computed in advance
        self._at_s = self._at_used_s = 0.0
        self.stop: Stop | None = None  # of what is computed now

    @property
    def limited(self) -> bool:
        return self._share < 1.0

    def limit(self, share: float) -> None:
        """Compute for ``share`` of the time from now on, in (0, 1]; what came before does not count."""
        with self._lock:
            self._share = min(1.0, max(0.001, share))
            self._credit_s, self._at_s, self._at_used_s = 0.0, self._clock(), self._used_s()

    def rest(self) -> None:
        """Wait until the next op may begin; no longer than ``stop`` lets it."""
        while (pause_s := self._pause_s()) > LEAST_S and not (self.stop is not None and self.stop.is_set):
            began_s = self._clock()
            self._sleep(min(pause_s, PIECE_S))
            self._rested(self._clock() - began_s)

    def _pause_s(self) -> float:
        """Seconds until the bucket is not below empty."""
        with self._lock:
            if not self.limited:
                return 0.0
            now_s, used_s = self._clock(), self._used_s()
            filled_s = self._share * (now_s - self._at_s)
            self._credit_s = min(BURST_S, self._credit_s + filled_s - (used_s - self._at_used_s))
            self._at_s, self._at_used_s = now_s, used_s
            return max(0.0, -self._credit_s / self._share)
