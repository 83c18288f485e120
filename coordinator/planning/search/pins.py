"""Pins: ops that only the worker may run that has a job's data, since they read what must not leave it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import UsageError
from atoll.exchange import EXACT
from atoll.raw_values import reads_inputs

if TYPE_CHECKING:
    from atoll.job import TrainingSpec
    from atoll.opdag import OpDag


def pinned_ops(dag: OpDag) -> tuple[int, ...]:
    """Return the positions of ops that read inputs, or values that follow from inputs alone, and of the last
    op: the loss follows from the targets."""
    return tuple(sorted({*reads_inputs(enumerate(dag.ops)), len(dag.ops) - 1}))


def check_pinned(training: TrainingSpec) -> None:
    """UsageError for a training that one worker's data cannot be used in."""
    if training.replicas != "1" or training.exchange != EXACT:
        raise UsageError(
            f"replicas = {training.replicas}, exchange = {training.exchange}: pinned data are one worker's, "
            "so there is one pipeline around it; leave both at their defaults"
        )
