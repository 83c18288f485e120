"""Scalars for TensorBoard, written without torch: event files in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from coordinator.loggers.plugin import RunFacts


class TensorBoard:
    """A logger: one scalar for each metric."""

    def __init__(self, run: RunFacts) -> None:
        self._writer = EventFileWriter(str(run.folder))

    def add(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=found)))

    def close(self, state: str) -> None:
        self._writer.close()
