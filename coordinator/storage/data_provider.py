"""Serves a job's micro-batches: which samples a pure function of (seed, step, micro), which bytes
from content-addressed blobs, memory-mapped.

Training data of step s, micro m is ``sample_indices(spec, n_micro, s, m)``; evaluation always
uses the first ``eval_batches`` micro-batches of the held-out data, so its losses compare; the last may have
fewer rows.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.arrays import BFLOAT16
from atoll.data import MAX_STEPS_A_REQUEST, held_out_indices, sample_indices, take
from atoll.errors import StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import DTypeLike, NDArray

    from atoll.dataset_spec import DataSpec
    from atoll.job import JobSpec
    from coordinator.storage.blob_store import BlobStore

    Array = NDArray[np.generic]

MAX_HEADER_BYTES = 100 << 20
_DTYPES: dict[str, DTypeLike] = {
    "BF16": BFLOAT16, "F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """An input of one micro-batch, stacked: [batch, ...]."""

    step: int
    micro: int
    input: str
    array: Array


class DataProvider:
    """Micro-batches of the jobs whose blobs are in ``store``."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    def batches(
        self,
        spec: JobSpec,
        evaluation: bool,
        inputs: Sequence[str],
        first_step: int,
        count: int,
        micros: range | None = None,
    ) -> Iterator[MicroBatch]:
        """The named inputs of ``count`` steps in (step, micro, input) order; ``micros``: of each step, all
        without.

        UsageError for an unknown input or impossible figures.
        """
        data, n_micro = _split(spec, evaluation)
        by_name = {f.input: f for f in data.fields}
        unknown = [name for name in inputs if name not in by_name]
        if unknown or not 1 <= count <= MAX_STEPS_A_REQUEST or first_step < 0:
            raise UsageError(
                f"asked for inputs {list(inputs)[:8]} of {count} steps from {first_step}; there are "
                f"{sorted(by_name)}, at most {MAX_STEPS_A_REQUEST} steps at once"
            )
        wanted = range(n_micro) if micros is None else micros
        if not 0 <= wanted.start < wanted.stop <= n_micro:
            raise UsageError(f"asked for micro-batches {wanted} of steps of {n_micro}")
        # For this request alone: a map that outlives it keeps a deleted blob's space.
        mapped = {name: map_value(self._store.path(by_name[name].blob)) for name in set(inputs)}
        for step in range(first_step, first_step + count):
            for micro in wanted:
                if evaluation:
                    samples = held_out_indices(data, micro)
                else:
                    samples = sample_indices(data, n_micro, step, micro)
                for name in inputs:
                    yield MicroBatch(step, micro, name, take(mapped[name], by_name[name], samples))


def map_value(path: Path, *, private: bool = False) -> Array:
    """The tensor "value" of a safetensors file, memory-mapped read-only; ``private``: writable, while the
    file stays as it is.

    StorageError when the file is not of that form.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise StorageError(f"{path.name} has a header of {length} bytes")
            entry = json.loads(file.read(length))["value"]
        begin, end = entry["data_offsets"]
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        shape = tuple(int(n) for n in entry["shape"])
        if end - begin != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
            raise StorageError(f"{path.name}: {end - begin} bytes do not hold {shape} of {dtype}")
        if not all(shape):
            return np.empty(shape, dtype)
        return np.memmap(path, dtype, "c" if private else "r", 8 + length + begin, shape)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise StorageError(
            f"data blob {path.name[:12]} cannot be read: {error}; submit the job again"
        ) from error


def _split(spec: JobSpec, evaluation: bool) -> tuple[DataSpec, int]:
    if not evaluation:
        return spec.data, spec.training.n_micro
    if spec.eval_data is None or not spec.training.eval_batches:
        raise UsageError(f"job {spec.name} has no held-out data")
    return spec.eval_data, spec.training.eval_batches
