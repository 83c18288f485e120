"""Figures for Weights & Biases; ``WANDB_PROJECT``, ``WANDB_MODE`` and its other variables hold."""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb

from coordinator.loggers.plugin import RunFacts

PROJECT = "atoll"


class WandB:
    """A logger: a run of wandb, taken up again where one of this job is there."""

    def __init__(self, run: RunFacts) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.job,
            name=run.name,
            dir=str(run.folder),
            resume="allow",
            reinit="create_new",
        )

    def add(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)
