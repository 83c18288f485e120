"""How far a run is: one update of the coordinator as a value with words and HTML. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from coordinator.notebook import html
from protos import atoll_control_pb2 as pb

ENDED = frozenset({"finished", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class Point:
    """Value of a metric after ``step`` committed steps, at Unix time ``time_s``."""

    step: int
    name: str
    value: float
    time_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A run at one moment. ``points``: what was measured since the update before; None: not known yet."""

    job: str
    name: str
    state: str
    reason: str
    step: int
    steps: int
    loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    checkpoint_step: int = 0
    points: tuple[Point, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.state in ENDED

    def __str__(self) -> str:
        words = [f"{self.job} {self.state}", f"step {self.step} of {self.steps}"]
        words += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        words += [f"held-out loss {self.eval_loss:.4f}"] if self.eval_loss is not None else []
        words += [f"{self.step_s:.3g} s a step"] if self.step_s is not None else []
        words += [f"{self.eta_s:.0f} s to go"] if self.eta_s is not None and not self.ended else []
        return ", ".join([*words, *filter(None, [self.reason])])

    def _repr_html_(self) -> str:
        return self.shown()

    def shown(self, losses: list[float] | None = None) -> str:
        """Return HTML: a bar, what is known, and the curve of ``losses``."""
        found = html.facts(
            f"{self.name} ({self.job})",
            [
                ("state", self.state),
                ("reason", self.reason),
                ("step", f"{self.step} of {self.steps}"),
                ("loss", _figure(self.loss, ".4f")),
                ("held-out loss", _figure(self.eval_loss, ".4f")),
                ("best held-out loss", _figure(self.best_eval_loss, ".4f")),
                ("s a step", _figure(self.step_s, ".3g")),
                ("samples a second", _figure(self.samples_per_s, ".4g")),
                ("s to go", "" if self.ended else _figure(self.eta_s, ".0f")),
            ],
        )
        return found + html.bar(self.step / self.steps if self.steps else 0.0) + html.curve(losses or [])


def progress_of(update: pb.JobUpdate) -> Progress:
    """Return an update of the coordinator as a Progress."""
    names = (field.name for field in fields(Progress) if field.name != "points")
    points = tuple(Point(p.step, p.name, p.value, p.time_s) for p in update.metrics)
    return Progress(**{name: _known(update, name) for name in names}, points=points)


def _known(update: pb.JobUpdate, name: Any) -> Any:
    absent = update.DESCRIPTOR.fields_by_name[name].has_presence and not update.HasField(name)
    return None if absent else getattr(update, name)


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
