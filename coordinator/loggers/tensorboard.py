"""Scalars for TensorBoard, written without torch: event files in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from coordinator.loggers.plugin import RunFacts

REOPEN_S = 10.0  # between two tries on a disk that refuses: each leaves a file without scalars


class TensorBoard:
    """A logger: one scalar for each metric. A disk that refuses raises OSError once, and is tried again."""

    def __init__(self, run: RunFacts) -> None:
        self._folder, self._next_s = str(run.folder), 0.0
        self._writer: EventFileWriter | None = None

    def add(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        if self._writer is None:
            if time.monotonic() < self._next_s:
                return
            self._next_s = time.monotonic() + REOPEN_S
            self._writer = EventFileWriter(self._folder)
        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        try:
            self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=found)))
        except OSError:
            # Its thread has ended, and it would answer with this error for ever. TensorBoard reads each file
            # of a folder: another one goes on where the disk has space again.
            self._writer, self._next_s = None, time.monotonic() + REOPEN_S
            raise

    def close(self, state: str) -> None:
        if self._writer is not None:
            self._writer.close()
