"""When an op has run for longer than anything honest does.

Before a stage has trained, what its rehearsal measured bounds an op; afterwards three times its longest step
does. A machine that is busy with other work is no hang: the process must have computed for half of that
time itself, or be twelve times over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from worker.hosting import TUNED
from worker.pipe.status import Running


@dataclass(slots=True)
class OpWatch:
    """Watches one compute process; asked now and then. ``period``: steps that are ordered at once, as of a
    peer with steps of its own."""

    period: int = 1
    _begun: int = -1
    _since_s: float = 0.0
    _since_cpu_s: float | None = None
    _steps: int = 0
    _step_s: float = 0.0
    _step_since_s: float = 0.0

    def step_begins(self, now_s: float) -> None:
        """A step was ordered."""
        self._step_since_s = now_s

    def step_done(self, now_s: float) -> None:
        """It is computed."""
        self._steps += 1
        self._step_s = max(self._step_s, (now_s - self._step_since_s) / self.period)

    def forget(self) -> None:
        """Count from now on."""
        self._begun = -1

    def overdue(self, running: Running, now_s: float, cpu_s: Callable[[], float]) -> str | None:
        """Name the op that should have ended long ago. ``cpu_s()``: what the process has computed so far."""
        if running.begun != self._begun:
            self._begun, self._since_s, self._since_cpu_s = running.begun, now_s, None
        took_s = now_s - self._since_s
        if running.mark is None or took_s < TUNED.seen_s:
            return None
        if self._since_cpu_s is None:
            self._since_cpu_s = cpu_s()
        allowed_s = self._allowed_s(running.mark.allowed_s)
        if took_s <= allowed_s:
            return None
        worked = cpu_s() - self._since_cpu_s > TUNED.worked_share * allowed_s
        if not (worked or took_s > TUNED.patience * allowed_s):
            return None
        return f"{running.mark.name} has run for {took_s:.0f} s; what is honest ends within {allowed_s:.0f} s"

    def _allowed_s(self, rehearsed_s: float) -> float:
        if self._steps >= TUNED.steps_known:
            return max(TUNED.least_deadline_s, TUNED.longest_steps * self._step_s)
        return (
            min(TUNED.most_deadline_s, rehearsed_s)
            if math.isfinite(rehearsed_s) and rehearsed_s > 0
            else TUNED.unknown_deadline_s
        )
