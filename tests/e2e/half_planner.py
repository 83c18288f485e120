"""``atoll``, with a planner that is told half of what stages take of memory.

python -m tests.e2e.half_planner serve ...
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.cli.main import main
from coordinator.planning import planner
from coordinator.planning.problem import Problem

price, predict = Problem._price, planner._stage_predictions


def half(self: Problem) -> None:
    """Have half of every figure fit a limit: the whole fits twice of it."""
    price(self)
    self.limits = 2.0 * self.limits


def halves(*arguments: Any) -> Any:
    return tuple(replace(told, memory_bytes=told.memory_bytes // 2) for told in predict(*arguments))


if __name__ == "__main__":
    Problem._price = half  # type: ignore[method-assign]
    planner._stage_predictions = halves
    main()
