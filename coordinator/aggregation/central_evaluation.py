"""The global model on the owner's held-out data: mean loss and metrics over its rows. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from atoll.arrays import tensor_of
from atoll.data import held_out_indices, take
from atoll.errors import UsageError
from atoll.execute import Executor
from atoll.held_out import HeldOutMeans
from atoll.program import stage_programs
from atoll.rows import at_rows
from compressors.layout import ALIGNMENT
from coordinator.storage.data_provider import map_value

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from atoll.opdag import OpDag
    from atoll.program import StageProgram
    from coordinator.storage.blob_store import BlobStore
    from strategies.layout import Array


@dataclass(frozen=True)
class Measured:
    """Means over ``n_samples``."""

    loss: float
    metrics: Mapping[str, float]
    n_samples: int


class CentralEvaluation:
    """The evaluation graph as one stage."""

    def __init__(self, spec: JobSpec, dag: OpDag | None, blobs: BlobStore) -> None:
        """UsageError for a job without an evaluation graph or held-out data."""
        if dag is None or spec.eval_data is None or not spec.training.eval_batches:
            raise UsageError("the job has nothing to evaluate centrally")
        (program,) = stage_programs(dag, [0])
        self._spec, self._dag, self._data = spec, dag, spec.eval_data
        names = (*program.parameters, *program.buffers, *program.constants)
        self._program = program
        self._initial = {n: map_value(blobs.path(spec.tensors[n]), private=True) for n in names}
        self._arrays = {f.blob: map_value(blobs.path(f.blob)) for f in self._data.fields}

    def run(self, weights: Mapping[str, Array], tick: Callable[[], None] = lambda: None) -> Measured:
        """The model with ``weights``; every other tensor as the job gave it. ``tick``: a batch begins."""
        means, n_samples = HeldOutMeans(self._program), 0
        executor = self._loaded(self._program, weights)
        for micro in range(self._spec.training.eval_batches):
            tick()
            samples = held_out_indices(self._data, micro)
            if len(samples) < self._data.batch:  # the last
                executor = self._loaded(at_rows(self._program, len(samples)), weights)
            means.add(executor.forward(0, micro, self._batch(samples), {}), len(samples))
            n_samples += len(samples)
        del executor  # and with it the views of the weights
        found = means.take()
        assert found is not None  # noqa: S101 - there is a micro-batch
        return Measured(found.loss, found.metrics, n_samples)

    def _loaded(self, program: StageProgram, weights: Mapping[str, Array]) -> Executor:
        """On the arrays themselves; what the ops write is a copy."""
        training = self._spec.training
        executor = Executor(program, "cpu", training.precision, training.seed, differentiate=False)
        values = {name: _tensor(weights.get(name, mapped)) for name, mapped in self._initial.items()}
        executor.load(values | {name: values[name].clone() for name in executor.mutated_buffers})
        executor.refresh()
        return executor

    def _batch(self, samples: Array) -> dict[str, torch.Tensor]:
        return {
            f.input: tensor_of(take(self._arrays[f.blob], f, samples)).to(
                getattr(torch, self._dag.inputs[f.input].dtype)
            )
            for f in self._data.fields
        }


def _tensor(array: Array) -> torch.Tensor:
    """Shares memory where that lies as torch's own would: kernels look at alignment."""
    shareable = array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    if shareable:
        return tensor_of(array)
    tensor = torch.empty(array.shape, dtype=tensor_of(np.empty(0, array.dtype)).dtype)
    return tensor.copy_(tensor_of(array))
