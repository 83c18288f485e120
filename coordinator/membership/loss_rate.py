"""How often workers are lost: counted since the coordinator's start, beside a prior. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.planning.costs.fleet import LOSS_HOURS

HOUR_S = 3600.0


@dataclass(slots=True)
class Losses:
    """Losses and hours of all workers; who went away, by whatever way, is lost to a plan."""

    count: int = 0
    past_s: float = 0.0  # that workers were here who are not any more
    _since_s: dict[str, float] = field(default_factory=dict)  # of those who are here

    def came(self, worker: str, now_s: float) -> None:
        """Count a worker's time from now on; one that was here as another process was lost."""
        self.went(worker, now_s)
        self._since_s[worker] = now_s

    def went(self, worker: str, now_s: float) -> None:
        """Count a loss, of who was here."""
        since_s = self._since_s.pop(worker, None)
        if since_s is not None:
            self.count, self.past_s = self.count + 1, self.past_s + max(0.0, now_s - since_s)

    def per_s(self, now_s: float) -> float:
        """Return a worker's losses a second: (1 + losses) / (LOSS_HOURS + worker-hours)."""
        here_s = sum(max(0.0, now_s - since_s) for since_s in self._since_s.values())
        return (1 + self.count) / (LOSS_HOURS * HOUR_S + self.past_s + here_s)
