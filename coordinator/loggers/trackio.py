"""Figures for trackio; ``TRACKIO_PROJECT``, ``TRACKIO_DIR`` and its other variables hold."""

from __future__ import annotations

import os
from collections.abc import Mapping

import trackio

from coordinator.loggers.plugin import RunFacts

PROJECT = "atoll"


class Trackio:
    """A logger: a run of trackio, taken up again where one of this job is there."""

    def __init__(self, run: RunFacts) -> None:
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(
            project=project, name=run.job, config={"job": run.name}, resume="allow", embed=False
        )

    def add(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self, state: str) -> None:
        self._run.finish()
