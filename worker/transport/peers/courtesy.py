"""What background messages and copies make way for: everything else that this worker has under way.

Peers are reached over one uplink as a rule, so a standby's messages to one peer would hold up gradients to
another. They leave while nothing else is unconfirmed. Copies are no such messages: a link that training
never leaves alone has to carry them, too. So they may delay it, for ``DELAY_SHARE`` of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from atoll.spare import DELAY_SHARE


class Courtesy:
    """Count of unconfirmed messages of steps that are no background, of all peers, and of the seconds that
    copies delayed them by; thread-safe."""

    def __init__(
        self, idle: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``idle`` is called whenever there are none any more; it must not wait."""
        self._idle, self._clock = idle, clock
        self._lock = threading.Lock()
        self._urgent = 0
        self._delayed_s = 0.0  # by copies, not made up for at ``_at_s``
        self._at_s = self._copying_until_s = clock()

    @property
    def gives_way(self) -> bool:
        """Whether background messages have to wait."""
        return self._urgent > 0

    def count(self, more: int) -> None:
        """Note that by so many there are more."""
        with self._lock:
            self._urgent += more
            if more > 0:
                now_s = self._clock()
                self._delay(now_s, max(0.0, self._copying_until_s - now_s))
                self._copying_until_s = min(self._copying_until_s, now_s)  # the next one waits no longer
            idle = more < 0 and not self._urgent
        if idle:
            self._idle()

    def copy(self, seconds: float) -> float:
        """Return the seconds until a piece of a copy that takes its link for so many may leave; at 0.0 it
        does, and counts."""
        with self._lock:
            now_s = self._clock()
            self._delay(now_s, 0.0)
            wait_s = max(self._delayed_s / DELAY_SHARE, self._copying_until_s - now_s)
            if wait_s > 0.0:
                return wait_s
            if self._urgent:
                self._delay(now_s, seconds)
            self._copying_until_s = now_s + (0.0 if self._urgent else seconds)
            return 0.0

    def _delay(self, now_s: float, seconds: float) -> None:
        made_up_s = DELAY_SHARE * (now_s - self._at_s)
        self._delayed_s = max(0.0, self._delayed_s - made_up_s) + seconds
        self._at_s = now_s
