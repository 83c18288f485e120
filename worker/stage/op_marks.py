"""Shows each op that begins on the status page, with the seconds that nothing honest takes for it.

A kernel may loop as long as a value says, or never end; only the daemon can end it. The bound is no
judgement of the machine: a hundred times what a slow core takes for the same bytes and products, and a
minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.execute import BACKWARD
from worker.manners.duty import DutyCycle
from worker.pipe.status import ComputeStatus, Mark

if TYPE_CHECKING:
    from atoll.program import StageProgram
    from atoll.rehearse import OpCost

FLOOR_S = 60.0
SLOWEST_BYTES_PER_S = 1e8
SLOWEST_FLOPS_PER_S = 1e8
BACKWARD_SHARE = 3.0  # of the forward's cost


class OpMarks:
    """``Executor.watch`` of one program; ``costs`` as its rehearsal found them. ``duty`` rests before ops."""

    def __init__(
        self,
        status: ComputeStatus,
        program: StageProgram,
        costs: Mapping[int, OpCost],
        duty: DutyCycle | None = None,
    ) -> None:
        self._status, self._duty = status, duty or DutyCycle()
        self._marks = {
            at: status.encoded(Mark(f"op {node.target!r} ({node.name[:80]})", _allowed_s(costs.get(at))))
            for at, node in program.ops
        }
        backward_s = FLOOR_S + BACKWARD_SHARE * sum(map(_slowest_s, costs.values()))
        self._marks[BACKWARD] = status.encoded(Mark(f"a backward of stage {program.stage}", backward_s))

    def __call__(self, at: int | None) -> None:
        if at is None:
            self._status.end()
            return
        if self._duty.limited:
            self._status.end()  # no op runs while it rests
            self._duty.rest()
        self._status.begin(self._marks[at])


def allowed_for(n_bytes: int) -> float:
    """Return the seconds that nothing honest takes to move so many bytes."""
    return FLOOR_S + n_bytes / SLOWEST_BYTES_PER_S


def _allowed_s(cost: OpCost | None) -> float:
    return FLOOR_S + _slowest_s(cost)


def _slowest_s(cost: OpCost | None) -> float:
    return 0.0 if cost is None else cost.bytes / SLOWEST_BYTES_PER_S + cost.flops / SLOWEST_FLOPS_PER_S
