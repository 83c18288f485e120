"""Held-out losses of a job as its evaluations give them: the best, and how many came since. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_BESTS = 16  # remembered, for steps that are taken back


@dataclass(frozen=True, slots=True)
class Best:
    """A held-out loss that was lower than all before it, after ``step`` steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The fold over a job's evaluations."""

    bests: tuple[Best, ...] = ()  # by rising step and falling loss
    newest: int = 0  # step of the newest evaluation
    since: int = 0  # evaluations after the best

    @property
    def best(self) -> Best | None:
        """The lowest loss yet; of two as low the first."""
        return self.bests[-1] if self.bests else None

    def after(self, step: int, loss: float) -> HeldOut:
        """Return what is known after one more evaluation; one that is not finite is no better than any.

        One that is repeated, as the steps before it are, counts only where it is better.
        """
        if loss < (self.best.loss if self.best is not None else float("inf")):
            kept = tuple(best for best in self.bests if best.step < step)
            bests = (*kept, Best(step, loss))[-MOST_BESTS:]
            return HeldOut(bests, max(step, self.newest), 0)
        if step <= self.newest:
            return self
        return replace(self, newest=step, since=self.since + 1)

    def until(self, step: int) -> HeldOut:
        """Return what is known where the steps beyond ``step`` turned out to be wrong."""
        if self.newest <= step:
            return self
        return HeldOut(tuple(best for best in self.bests if best.step <= step), step, 0)
