"""Curves of a job's metrics as the page draws them: appended to, cut back, thinned. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protos import atoll_control_pb2 as pb

ROLLED_BACK = "rolled_back"
MAX_POINTS = 10_000  # of a curve
CSV_DIGIT_S = 1e-3  # of a row's time
MAX_CURVES = 400  # of a job; a federated one has several a client


@dataclass(slots=True)
class Curve:
    """Points of one metric by step, ascending.

    ``generation`` changes whenever points that were there are not any more, so that within one, a longer
    curve begins with the shorter.
    """

    generation: int = 0
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Append a point; what stood at its step and later was done again, and goes."""
        if self.steps and step <= self.steps[-1]:
            self.cut(step - 1)
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > MAX_POINTS:
            self._replace(*thinned(self.steps, self.values, MAX_POINTS // 2))

    def cut(self, last: int) -> None:
        """Drop the points of steps after ``last``."""
        kept = bisect_left(self.steps, last + 1)
        if kept < len(self.steps):
            self._replace(self.steps[:kept], self.values[:kept])

    def _replace(self, steps: list[int], values: list[float]) -> None:
        # New lists: those before may be part of what viewers have yet to be sent.
        self.generation += 1
        self.steps, self.values = steps, values


@dataclass(frozen=True, slots=True)
class Seen:
    """A curve at one moment; its lists may have grown since, by points behind the first ``length``."""

    generation: int
    length: int
    steps: list[int]
    values: list[float]


class Curves:
    """Curves of one job by the names of its metrics."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._stored_s = float("-inf")  # time of the newest row of metrics.csv

    def add(self, points: Iterable[pb.MetricPoint]) -> None:
        """Take points in the order in which they were measured; those that rows held before are known."""
        for point in points:
            if point.time_s > self._stored_s + CSV_DIGIT_S:
                self.point(point.step, point.name, point.value)

    def point(self, step: int, name: str, value: float) -> None:
        """Take one point. Of more than ``MAX_CURVES`` metrics the first are kept."""
        if name == ROLLED_BACK:
            for curve in self._curves.values():
                curve.cut(step)
            return
        if name not in self._curves and len(self._curves) >= MAX_CURVES:
            return
        self._curves.setdefault(name, Curve()).add(step, value)

    def line(self, text: str) -> None:
        """Take one row of metrics.csv: step, name, value, time; what is none is left out."""
        cells = text.split(",")
        if len(cells) == 4 and cells[0].isdigit():
            try:
                self.point(int(cells[0]), cells[1], float(cells[2]))
                self._stored_s = max(self._stored_s, float(cells[3]))
            except ValueError:
                return

    def seen(self) -> dict[str, Seen]:
        """Return all curves as they are now."""
        return {
            name: Seen(curve.generation, len(curve.steps), curve.steps, curve.values)
            for name, curve in self._curves.items()
        }


def thinned(steps: Sequence[int], values: Sequence[float], most: int) -> tuple[list[int], list[float]]:
    """Return at most ``most`` >= 4 of the points: both ends, and the least and greatest of each stretch.

    What is not finite counts as greatest, so that it stays visible.
    """
    count = len(steps)
    if count <= most:
        return list(steps), list(values)
    stretches = (most - 2) // 2
    borders = [1 + (count - 2) * at // stretches for at in range(stretches + 1)]
    kept = {0, count - 1}
    for begin, end in pairwise(borders):
        inside = range(begin, end)
        if inside:
            kept.add(min(inside, key=lambda at: _height(values[at])))
            kept.add(max(inside, key=lambda at: _height(values[at])))
    order = sorted(kept)
    return [steps[at] for at in order], [values[at] for at in order]


def _height(value: float) -> float:
    return float("inf") if value != value else value
