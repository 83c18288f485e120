"""Plug-ins that take a run's figures, by name: ours, and those of the entry points ``atoll.loggers``.

A plug-in is a function of a ``RunFacts`` that returns a ``Logger``:

    [project.entry-points."atoll.loggers"]
    my-logger = "my_package:MyLogger"
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from atoll.errors import UsageError

GROUP = "atoll.loggers"
OWN = {
    "mlflow": "coordinator.loggers.mlflow:MLflow",
    "tensorboard": "coordinator.loggers.tensorboard:TensorBoard",
    "trackio": "coordinator.loggers.trackio:Trackio",
    "wandb": "coordinator.loggers.wandb:WandB",
}
"""Ours, which are there in a checkout too, where no package's metadata is."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run that figures are of: the coordinator's name of it, its owner's, its folder for files."""

    job: str
    name: str
    folder: Path


class Logger(Protocol):
    """Takes figures of one run, in the order of its steps."""

    def add(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """Take what was measured after ``step`` steps, at ``time_s`` of Unix time."""

    def close(self, state: str) -> None:
        """End: ``finished``, ``failed``, ``cancelled``, or another state of a run that goes on unwatched."""


class Figure(Protocol):
    """One value of one metric."""

    @property
    def step(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def time_s(self) -> float: ...


def known_loggers() -> list[str]:
    """Return the names of our loggers and of the ones that installed packages declare."""
    return sorted({*OWN, *(point.name for point in entry_points(group=GROUP))})


def open_logger(name: str, run: RunFacts) -> Logger:
    """Return a logger for a run.

    UsageError for a name that nobody declares, and for one whose library is not installed.
    """
    found = next(iter(entry_points(group=GROUP, name=name)), None) if name not in OWN else None
    if name not in OWN and found is None:
        raise UsageError(f"no logger is called {name[:80]!r}; there are {', '.join(known_loggers())}")
    try:
        made = _own(OWN[name])(run) if found is None else found.load()(run)
    except ModuleNotFoundError as error:
        needs = error.name or name
        extra = f"'atoll[{name}]'" if name in OWN else needs
        raise UsageError(f"the logger {name} needs {needs}; install it with pip install {extra}") from None
    logger: Logger = made
    return logger


def _own(place: str) -> Callable[[RunFacts], Logger]:
    module, _, attribute = place.partition(":")
    found: Callable[[RunFacts], Logger] = getattr(importlib.import_module(module), attribute)
    return found


@dataclass
class Loggers:
    """Several loggers of one run, as one.

    A step that is done again after a loss is passed on once: services of this kind take no second value.
    """

    loggers: list[Logger] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)  # name of a metric -> last step passed on

    def add(self, figures: Iterable[Figure]) -> None:
        """Pass figures on, those of one step together."""
        steps: dict[int, dict[str, float]] = {}
        times: dict[int, float] = {}
        for figure in figures if self.loggers else ():
            if figure.step > self.newest.get(figure.name, -1):
                self.newest[figure.name] = figure.step
                steps.setdefault(figure.step, {})[figure.name] = figure.value
                times[figure.step] = figure.time_s
        for step, values in sorted(steps.items()):
            for logger in self.loggers:
                logger.add(step, values, times[step])

    def close(self, state: str) -> None:
        """End them all, also where one fails."""
        failed: Exception | None = None
        for logger in self.loggers:
            try:
                logger.close(state)
            except Exception as error:  # noqa: BLE001 - the others are closed first, then it goes on
                failed = error
        if failed is not None:
            raise failed
