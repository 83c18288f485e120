"""Names the op that runs far beyond what its rehearsal said that it costs.

A kernel may loop as long as a value says, or never end. The bound is no judgement of the machine: a
hundred times what a slow core takes for the same bytes and products, and a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atoll.execute import BACKWARD

if TYPE_CHECKING:
    from atoll.program import StageProgram
    from atoll.rehearse import OpCost

FLOOR_S = 60.0
SLOWEST_BYTES_PER_S = 1e8
SLOWEST_FLOPS_PER_S = 1e8
BACKWARD_SHARE = 3.0  # of the forward's cost


class Running(Protocol):
    """An executor, as another thread sees it."""

    at: int | None
    begun: int


@dataclass(slots=True)
class OpWatch:
    """Watches one executor; ``overdue`` is asked now and then, by one thread."""

    program: StageProgram
    costs: Mapping[int, OpCost]
    running: Running
    _begun: int = -1
    _since_s: float = 0.0
    _said: int = -1

    def overdue(self, now_s: float) -> str | None:
        """The op that should have ended long ago, in words; once for each."""
        at, begun = self.running.at, self.running.begun
        if begun != self._begun:
            self._begun, self._since_s = begun, now_s
        took_s = now_s - self._since_s
        if at is None or begun == self._said or took_s <= self.allowed_s(at):
            return None
        self._said = begun
        return (
            f"{self._name(at)} has run for {took_s:.0f} s; by its shapes it ends within "
            f"{self.allowed_s(at):.0f} s on any machine"
        )

    def allowed_s(self, at: int) -> float:
        """Seconds that nothing honest takes."""
        if at != BACKWARD:
            return FLOOR_S + _slowest_s(self.costs.get(at))
        return FLOOR_S + BACKWARD_SHARE * sum(map(_slowest_s, self.costs.values()))

    def _name(self, at: int) -> str:
        node = dict(self.program.ops).get(at)
        if node is None:
            return f"a backward of stage {self.program.stage}"
        return f"op {node.target!r} ({node.name[:80]})"


def _slowest_s(cost: OpCost | None) -> float:
    if cost is None:
        return 0.0
    return cost.bytes / SLOWEST_BYTES_PER_S + cost.flops / SLOWEST_FLOPS_PER_S
