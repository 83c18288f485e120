"""When an op has run for longer than anything honest does.

Before a stage has trained, what its rehearsal measured bounds an op; afterwards three times its longest step
does. A machine that is busy with other work is no hang: the process must have computed for half of that
time itself, or be twelve times over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from worker.pipe.status import Running

LEAST_S = 5.0
SEEN_S = 1.0  # shorter ones cost no look at the process
UNKNOWN_S = 60.0
MOST_S = 6 * 3600.0
STEPS_KNOWN = 2  # afterwards every op has run
LONGEST_STEPS = 3.0
WORKED_SHARE, PATIENCE = 0.5, 12.0


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
        if running.mark is None or took_s < SEEN_S:
            return None
        if self._since_cpu_s is None:
            self._since_cpu_s = cpu_s()
        allowed_s = self._allowed_s(running.mark.allowed_s)
        if took_s <= allowed_s:
            return None
        worked = cpu_s() - self._since_cpu_s > WORKED_SHARE * allowed_s
        if not (worked or took_s > PATIENCE * allowed_s):
            return None
        return f"{running.mark.name} has run for {took_s:.0f} s; what is honest ends within {allowed_s:.0f} s"

    def _allowed_s(self, rehearsed_s: float) -> float:
        if self._steps >= STEPS_KNOWN:
            return max(LEAST_S, LONGEST_STEPS * self._step_s)
        return min(MOST_S, rehearsed_s) if math.isfinite(rehearsed_s) and rehearsed_s > 0 else UNKNOWN_S
