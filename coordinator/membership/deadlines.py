"""Names by the time at which each is to be looked at: a heap, so that a look costs nothing for all others.

Pure.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class Deadlines:
    """At most one time a name; replaced and dropped ones stay in the heap until their time has come."""

    _due_s: dict[str, float] = field(default_factory=dict)
    _heap: list[tuple[float, str]] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self._due_s

    def at(self, name: str, due_s: float) -> None:
        """Look at ``name`` at ``due_s``; an earlier time that is known already stays."""
        if due_s < self._due_s.get(name, float("inf")):
            self._due_s[name] = due_s
            heapq.heappush(self._heap, (due_s, name))

    def drop(self, name: str) -> None:
        """Look at ``name`` no more."""
        self._due_s.pop(name, None)

    def take(self, now_s: float) -> list[str]:
        """Remove and return the names whose time has come."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            due_s, name = heapq.heappop(self._heap)
            if self._due_s.get(name) == due_s:
                del self._due_s[name]
                found.append(name)
        return found
