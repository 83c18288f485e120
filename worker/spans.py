"""A stage's timeline: what ran when, bounded.

Times are of the machine's steady clock, which its processes share and nobody sets. Heartbeats have it too, so
the coordinator knows what to add.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_SPANS = 8192


@dataclass(frozen=True, slots=True)
class Span:
    """``kind``: F | B | I | W | send | recv | opt | wait | eval | load | save; steady clock's seconds."""

    kind: str
    step: int
    micro: int
    start_s: float
    end_s: float
    peer: str = ""
    bytes: int = 0


class Spans:
    """Collects spans in one thread, gives them away in batches; the oldest go when full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now_s = clock
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def add(self, span: Span) -> None:
        self._spans.append(span)

    @contextmanager
    def timed(self, kind: str, step: int, micro: int = 0, peer: str = "", nbytes: int = 0) -> Iterator[None]:
        """Record the block, also when it raises."""
        start_s = self.now_s()
        try:
            yield
        finally:
            self.add(Span(kind, step, micro, start_s, self.now_s(), peer, nbytes))

    def take(self) -> list[Span]:
        """Take the spans since the last call."""
        taken = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken
