"""Bytes that this machine sends and receives for others: at most so many a second, counted by the day.

One queue for each direction, whatever sends: nothing bursts, so that the rate holds over any span longer than
one message.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import date

BITS = 8
MEGA = 1e6
PIECE_S = 0.05
"""At a limited rate a message's data takes about so long: what an urgent one waits behind."""


class ByteQueue:
    """A serial resource of ``bytes_per_s``; thread-safe, no clock of its own."""

    def __init__(self) -> None:
        self._rate = math.inf
        self._pending = 0.0  # bytes that are still leaving at ``_at_s``
        self._at_s = 0.0
        self._lock = threading.Lock()

    @property
    def rate(self) -> float:
        """Bytes a second; infinite: as fast as it goes."""
        return self._rate

    def limit(self, bytes_per_s: float, now_s: float) -> None:
        """Change the rate. What is queued was told when it leaves at the old one, and does."""
        with self._lock:
            if bytes_per_s != self._rate:
                self._rate, self._pending, self._at_s = bytes_per_s, 0.0, now_s

    def take(self, nbytes: int, now_s: float) -> float:
        """Queue ``nbytes``; returns the seconds until the last of them has left."""
        if math.isinf(self._rate):
            return 0.0
        with self._lock:
            self._pass(now_s)
            self._pending += nbytes
            return self._pending / self._rate

    def _pass(self, now_s: float) -> None:
        self._pending = max(0.0, self._pending - self._rate * max(0.0, now_s - self._at_s))
        self._at_s = now_s


class Traffic:
    """All that a worker sends and receives of jobs. Thread-safe."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, day: Callable[[], date] = date.today
    ) -> None:
        self._clock, self._day = clock, day
        self._up, self._down = ByteQueue(), ByteQueue()
        self._lock = threading.Lock()
        self._today = self._day()
        self._bytes = 0
        self._totals = [0, 0]

    def limit(self, upload_mbit: float, download_mbit: float) -> None:
        """Change the rates, Mbit/s; 0: unlimited."""
        for queue, mbit in ((self._up, upload_mbit), (self._down, download_mbit)):
            queue.limit(mbit * MEGA / BITS or math.inf, self._clock())

    def resume(self, day: str, nbytes: int) -> None:
        """Count on from ``nbytes`` if ``day`` is today, as an earlier process left it."""
        with self._lock:
            if day == self._today.isoformat():
                self._bytes += nbytes

    def sent(self, nbytes: int) -> float:
        """Count ``nbytes`` that leave; returns the seconds to wait before more may."""
        self._count(nbytes, 0)
        return self._up.take(nbytes, self._clock())

    def received(self, nbytes: int) -> float:
        """Count ``nbytes`` that came; returns the seconds to wait before more is taken in."""
        self._count(nbytes, 1)
        return self._down.take(nbytes, self._clock())

    @property
    def piece_bytes(self) -> float:
        """Bytes that are best sent at once."""
        return self._up.rate * PIECE_S

    @property
    def today(self) -> tuple[str, int]:
        """The day, ISO 8601, and the bytes of it so far."""
        self._count(0, 0)
        return self._today.isoformat(), self._bytes

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes sent and received since this process started."""
        with self._lock:
            return self._totals[0], self._totals[1]

    def _count(self, nbytes: int, way: int) -> None:
        with self._lock:
            day = self._day()
            if day != self._today:
                self._today, self._bytes = day, 0
            self._bytes += nbytes
            self._totals[way] += nbytes
