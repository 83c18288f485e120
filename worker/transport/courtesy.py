"""What background messages make way for: everything else that this worker has under way, to whomever.

Peers are reached over one uplink as a rule, so a standby's messages to one peer would hold up gradients to
another. They leave while nothing else is unconfirmed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Courtesy:
    """Count of unconfirmed messages that are no background, of all peers; thread-safe."""

    def __init__(self, idle: Callable[[], None] = lambda: None) -> None:
        """``idle`` is called whenever there are none any more; it must not wait."""
        self._idle = idle
        self._lock = threading.Lock()
        self._urgent = 0

    @property
    def gives_way(self) -> bool:
        """Whether background messages have to wait."""
        return self._urgent > 0

    def count(self, more: int) -> None:
        """Note that by so many there are more."""
        with self._lock:
            self._urgent += more
            idle = more < 0 and not self._urgent
        if idle:
            self._idle()
