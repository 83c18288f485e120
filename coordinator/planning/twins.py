"""Memory of one search among many: what was found for parts of a fleet, and what was asked before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Hashable

    from atoll.errors import NotEnoughMemory
    from coordinator.planning.inside.costs import Divisions
    from coordinator.planning.problem import Problem, Scored
    from coordinator.planning.search.op_fence import Effort

Workers = tuple[str, ...]
Answer = TypeVar("Answer")
Tell = Callable[[str], None]
"""Hears what is being planned."""
Found = tuple["Problem", "Scored", tuple[str, ...]]
"""The problem with what is kept decided, its best candidate, and why."""


@dataclass(slots=True)
class Twins:
    """Pipelines found for replicas and peers: machines that are alike but for their names are cut alike, so
    the sites of a fleet are searched once."""

    tell: Tell = lambda words: None
    brief: bool = False  # of a large fleet: the cut of the same machines for another share is taken again
    # By traits of the request: the request, its effort, and what came of it.
    found: dict[Hashable, list[tuple[Any, Effort, Found | NotEnoughMemory]]] = field(default_factory=dict)
    cuts: dict[Workers, list[Found]] = field(default_factory=dict)  # with all kept as it is
    # Peers that were planned, by copies that their rules keep.
    groupings: dict[int, dict[tuple[Workers, ...], None]] = field(default_factory=dict)
    answers: dict[Hashable, object] = field(default_factory=dict)
    divisions: Divisions = field(default_factory=dict)  # inside plans of the graph
    at: str = ""  # what is planned now, in words
    searches: int = 0

    def once(self, what: Hashable, find: Callable[[], Answer]) -> Answer:
        """Return what ``find`` returns, or has returned when the same was asked before."""
        if what not in self.answers:
            self.answers[what] = find()
        return cast("Answer", self.answers[what])
