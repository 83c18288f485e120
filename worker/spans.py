"""A stage's timeline: what ran when, on the machine's wall clock, bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_SPANS = 8192


@dataclass(frozen=True, slots=True)
class Span:
    """``kind``: F | B | I | W | send | recv | opt | wait | eval | load | save; wall-clock seconds."""

    kind: str
    step: int
    micro: int
    start_s: float
    end_s: float
    peer: str = ""
    bytes: int = 0


class Spans:
    """Collects spans in one thread, gives them away in batches; the oldest go when full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall_s: float | None = None) -> None:
        """``clock`` counts seconds steadily; ``wall_s`` is the wall clock's time now."""
        self._clock = clock
        self._zero_s = (time.time() if wall_s is None else wall_s) - clock()
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def now_s(self) -> float:
        """Wall-clock seconds that never jump."""
        return self._zero_s + self._clock()

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
