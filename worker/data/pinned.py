"""Micro-batches of a registered data set for a pipeline whose data stay here, as the coordinator would send
those of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from atoll.arrays import dtype_name
from atoll.data import MAX_STEPS_A_REQUEST, sample_indices
from atoll.errors import UsageError
from protos import atoll_control_pb2 as pb
from worker.data.registry import load_dataset, open_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from atoll.dataset_spec import DataSpec


class PinnedRows:
    """Samples of one job, mapped and read as they are asked for. UsageError where the set is another than the
    job was planned with, StorageError where it is damaged."""

    def __init__(self, state_dir: Path, data: DataSpec, n_micro: int) -> None:
        pinned = data.pinned
        assert pinned is not None  # noqa: S101 - the caller has looked
        there = load_dataset(state_dir, pinned.data)
        if there.n_samples != data.n_samples:
            raise UsageError(
                f"data set {pinned.data!r} has {there.n_samples} samples here, the job was submitted for "
                f"{data.n_samples}; submit it again"
            )
        held = open_dataset(state_dir, pinned.data)
        missing = sorted(set(pinned.inputs.values()) - held.keys())
        if missing:
            raise UsageError(f"data set {pinned.data!r} has no field {missing[0]!r}; submit the job again")
        self._fields = {name: held[field] for name, field in pinned.inputs.items()}
        self._data, self._n_micro = data, n_micro

    def batches(self, request: pb.BatchRequest) -> Iterator[pb.Batch]:
        """Yield the named inputs of training steps, in (step, micro, input) order. UsageError for others."""
        unknown = sorted(set(request.inputs) - self._fields.keys())
        first = request.first_micro
        micros = range(first, first + request.micros) if request.micros else range(self._n_micro)
        if unknown or not 1 <= request.count <= MAX_STEPS_A_REQUEST or micros.stop > self._n_micro:
            raise UsageError(
                f"asked for inputs {list(request.inputs)[:8]} of micro-batches {micros} of {request.count} "
                f"steps; there are {sorted(self._fields)}, {self._n_micro} micro-batches a step"
            )
        for step in range(request.first_step, request.first_step + request.count):
            for micro in micros:
                samples = sample_indices(self._data, self._n_micro, step, micro)
                for name in request.inputs:
                    rows = np.ascontiguousarray(self._fields[name][samples])
                    yield pb.Batch(
                        step=step, micro=micro, input=name, dtype=dtype_name(rows), shape=rows.shape,
                        data=rows.tobytes(),
                    )  # fmt: skip
