"""Data sources: what a job file names, materialised at submit into tensors and a seeded order.

Arrays are numpy, so that neither the coordinator nor this module needs torch. The order is a
pure function of (seed, epoch); a micro-batch is a pure function of (spec, step, micro).
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from atoll.dataset_spec import DataField, DataSpec, Layout
from atoll.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from numpy.typing import NDArray

    Array = NDArray[np.generic]
    ArrayOrTensor = Array | torch.Tensor


@dataclass(frozen=True)
class Materialised:
    """A DataSpec whose ``blob`` fields are keys of ``arrays`` until they are stored."""

    spec: DataSpec
    arrays: Mapping[str, Array]

    def stored(self, hash_of: Mapping[str, str]) -> DataSpec:
        """The spec with every array's key replaced by its blob's hash."""
        fields = tuple(
            DataField(f.input, hash_of[f.blob], f.layout, f.length, f.stride, f.offset)
            for f in self.spec.fields
        )
        return DataSpec(fields, self.spec.n_samples, self.spec.batch, self.spec.shuffle_seed)


class DataSource(Protocol):
    """Anything that can become tensors once, on the owner's machine."""

    def materialise(self, batch: int) -> tuple[Materialised, Materialised | None]:
        """Training data and, where there is any, held-out data."""
        ...


@dataclass(frozen=True)
class Rows:
    """Samples along the first axis of arrays (or tensors), one per input of the model."""

    arrays: Mapping[str, ArrayOrTensor]
    held_out: Mapping[str, ArrayOrTensor] | None = None
    seed: int | None = 0  # of the order of samples; None: as stored

    def materialise(self, batch: int) -> tuple[Materialised, Materialised | None]:
        train = _rows(self.arrays, batch, self.seed)
        held_out = _rows(self.held_out, batch, None) if self.held_out is not None else None
        return train, held_out


@dataclass(frozen=True)
class ByteText:
    """Windows of ``length`` bytes over a text; ``input`` receives ids 0..255.

    ``text`` None: the ``.py`` files of the running Python's standard library (DESIGN section 8).
    The last ``held_out`` share of the text is kept for evaluation.
    """

    length: int
    input: str = "tokens"
    text: bytes | None = None
    max_bytes: int = 16_000_000
    held_out: float = 0.05
    seed: int = 0
    inputs_too: Mapping[str, str] = field(default_factory=dict)  # further inputs given the same ids

    def materialise(self, batch: int) -> tuple[Materialised, Materialised | None]:
        text = self.text if self.text is not None else standard_library_text(self.max_bytes)
        data = np.frombuffer(text, dtype=np.uint8)
        split = int(len(data) * (1.0 - self.held_out))
        train = self._windows(data[:split], batch, self.seed)
        held = self._windows(data[split:], batch, None) if self.held_out > 0 else None
        return train, held

    def _windows(self, data: Array, batch: int, seed: int | None) -> Materialised:
        n_samples = (len(data) - self.length) // self.length + 1 if len(data) >= self.length else 0
        if n_samples < batch:
            raise UsageError(
                f"text of {len(data)} bytes gives {n_samples} windows of {self.length}, "
                f"a micro-batch needs {batch}; give more text"
            )
        names = (self.input, *self.inputs_too)
        fields = tuple(DataField(n, "text", Layout.WINDOWS, self.length, self.length, 0) for n in names)
        return Materialised(DataSpec(fields, n_samples, batch, seed), {"text": np.ascontiguousarray(data)})


def standard_library_text(max_bytes: int = 16_000_000) -> bytes:
    """Sources of the running Python's standard library in a fixed (shuffled) file order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        p
        for p in root.rglob("*.py")
        if "site-packages" not in p.parts and "test" not in p.parts and p.is_file()
    )
    # Neighbouring files are alike; a fixed shuffle makes the held-out tail representative.
    order = np.random.default_rng(4711).permutation(len(files))
    parts: list[bytes] = []
    size = 0
    for index in order:
        if size >= max_bytes:
            break
        text = files[index].read_bytes()
        parts.append(text)
        size += len(text)
    return b"".join(parts)[:max_bytes]


def sample_indices(spec: DataSpec, n_micro: int, step: int, micro: int) -> NDArray[np.int64]:
    """Sample numbers [batch] of micro-batch ``micro`` of ``step``; each epoch in its own order."""
    first = (step * n_micro + micro) * spec.batch
    positions = np.arange(first, first + spec.batch, dtype=np.int64)
    epochs, within = np.divmod(positions, spec.n_samples)
    if spec.shuffle_seed is None:
        return within
    found = np.empty_like(within)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        found[mask] = _permutation(spec.shuffle_seed, int(epoch), spec.n_samples)[within[mask]]
    return found


def take(array: Array, source: DataField, samples: NDArray[np.int64]) -> Array:
    """Stack the given samples of a field: [batch, ...]."""
    if source.layout is Layout.ROWS:
        return array[samples]
    starts = samples * source.stride + source.offset
    windows: Array = array[starts[:, None] + np.arange(source.length)[None, :]]
    return windows


@lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(n)


def _rows(arrays: Mapping[str, ArrayOrTensor], batch: int, seed: int | None) -> Materialised:
    as_numpy = {name: _to_numpy(value) for name, value in arrays.items()}
    sizes = {name: len(value) for name, value in as_numpy.items()}
    if not sizes or len(set(sizes.values())) != 1:
        raise UsageError(f"data arrays must have one common length, not {sizes}")
    n_samples = next(iter(sizes.values()))
    if n_samples < batch:
        raise UsageError(f"{n_samples} samples are fewer than a micro-batch of {batch}; give more data")
    fields = tuple(DataField(name, name, Layout.ROWS) for name in as_numpy)
    return Materialised(DataSpec(fields, n_samples, batch, seed), as_numpy)


def _to_numpy(value: object) -> Array:
    convert: Callable[[], Array] | None = getattr(value, "numpy", None)
    return np.ascontiguousarray(convert() if convert is not None else np.asarray(value))
