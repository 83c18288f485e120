"""Figures for MLflow; ``MLFLOW_TRACKING_URI`` and its other variables hold."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric

from coordinator.loggers.plugin import RunFacts

EXPERIMENT = "atoll"
STATUS = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MLflow:
    """A logger: a run of an experiment, ``MLFLOW_EXPERIMENT_NAME`` or "atoll"."""

    def __init__(self, run: RunFacts) -> None:
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        made = self._client.create_run(experiment, run_name=run.name, tags={"atoll.job": run.job})
        self._run = made.info.run_id

    def add(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        at_ms = int(time_s * 1000)
        self._client.log_batch(self._run, [Metric(name, v, at_ms, step) for name, v in values.items()])

    def close(self, state: str) -> None:
        self._client.set_terminated(self._run, STATUS.get(state, "FINISHED"))
