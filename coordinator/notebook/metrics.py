"""A run's figures as a table: every loss, step time and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import StorageError, UsageError
from coordinator.client.metrics_csv import marked
from coordinator.notebook import html

if TYPE_CHECKING:
    import pandas

LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Row:
    """One value; ``rolled_back``: its step was done again later, so it does not count."""

    step: int
    name: str
    value: float
    time_s: float
    rolled_back: bool


@dataclass(frozen=True)
class Metrics:
    """Every value of a run, oldest first."""

    job: str
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, job: str, lines: Iterable[str]) -> Metrics:
        """Read the lines of a metrics.csv. StorageError for one that is not as it was written."""
        found = []
        try:
            for line in list(marked(lines))[1:]:
                step, name, value, time_s, back = line.split(",")
                found.append(Row(int(step), name, float(value), float(time_s), back == "1"))
        except ValueError as error:
            raise StorageError(f"{job}: metrics.csv is damaged at the coordinator: {error}") from None
        return cls(job, tuple(found))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def names(self) -> list[str]:
        """Names of what was measured, in the order of their first values."""
        return list(dict.fromkeys(row.name for row in self.rows))

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of one metric without what was rolled back. UsageError where there is none."""
        if name not in self.names:
            raise UsageError(
                f"{self.job} has no metric {name!r}; it has {', '.join(self.names) or 'none yet'}"
            )
        counted = {row.step: row.value for row in self.rows if row.name == name and not row.rolled_back}
        return sorted(counted.items())

    def to_pandas(self, *, every_row: bool = False) -> pandas.DataFrame:
        """Return a DataFrame: a row for each step, a column for each metric, without what was rolled back.

        ``every_row``: a row for each value instead, rolled back or not. UsageError without pandas.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise UsageError("to_pandas needs pandas; pip install 'atoll[notebook]'") from None
        if every_row:
            columns = ["step", "name", "value", "time_s", "rolled_back"]
            rows = [(row.step, row.name, row.value, row.time_s, row.rolled_back) for row in self.rows]
            return pandas.DataFrame(rows, columns=columns)
        found = {name: pandas.Series(dict(self.series(name)), dtype="float64") for name in self.names}
        frame = pandas.DataFrame(found).sort_index()
        frame.index.name = "step"
        return frame

    def _repr_html_(self) -> str:
        losses = [value for _, value in self.series(LOSS)] if LOSS in self.names else []
        rows = []
        for name in self.names:
            series = self.series(name)
            rows.append(
                [name, len(series), *([series[-1][0], f"{series[-1][1]:.6g}"] if series else ["", ""])]
            )
        return html.curve(losses) + html.table(("metric", "values", "last step", "last value"), rows)
