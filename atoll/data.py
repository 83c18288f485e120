"""Data sources: what a job file names, materialised at submit into tensors and a seeded order.

Arrays are numpy, so that neither the coordinator nor this module needs torch. The order is a
pure function of (seed, epoch); a micro-batch is a pure function of (spec, step, micro).
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from atoll.arrays import array_of
from atoll.dataset_spec import DataField, DataSpec, Layout
from atoll.errors import UsageError
from atoll.fields import check_fields, described
from atoll.job_checks import data_words
from atoll.samples import Collate, Repeated, collated, columns, drawn_anew

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Array = NDArray[np.generic]
    ArrayOrTensor = Array | torch.Tensor

MAX_STEPS_A_REQUEST = 1024
"""Of micro-batches that a worker asks for."""


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
        return replace(self.spec, fields=fields)


class DataSource(Protocol):
    """Anything that can become tensors once, on the owner's machine."""

    def materialise(self, batch: int) -> tuple[Materialised, Materialised | None]:
        """Training data and, where there is any, held-out data."""
        ...


@dataclass(frozen=True)
class Rows:
    """Samples along the first axis of arrays (or tensors), one per input of the model.

    UsageError for what are no arrays of numbers with as many rows each.
    """

    arrays: Mapping[str, ArrayOrTensor]
    held_out: Mapping[str, ArrayOrTensor] | None = None
    seed: int | None = 0  # of the order of samples; None: as stored

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", _named_arrays("Rows", self.arrays))
        if self.held_out is not None:
            object.__setattr__(self, "held_out", _named_arrays("Rows(held_out)", self.held_out))
        check_seed(self.seed)

    @classmethod
    def of(
        cls,
        dataset: Any,
        *inputs: str,
        held_out: Any | None = None,
        seed: int | None = 0,
        collate: Collate | None = None,
        reads: int | None = None,
    ) -> Rows:
        """Return the samples of a map-style data set of torch or ``datasets``, read once and stacked.

        ``inputs`` name the model's input for each part of a sample, or the keys of samples that are
        mappings: all of them where none is named. ``held_out`` is such a data set too. ``collate``, such as a
        collator of transformers, makes a dict of tensors from samples of both, all padded to one length.
        ``reads``: of samples that are drawn anew at each read, as augmented images are, so many draws of each
        training sample become rows. UsageError for such samples without it, and for samples that have not so
        many parts.
        """
        if reads is None:
            _check_steady(dataset, held_out, inputs, collate)
        elif type(reads) is not int or reads < 1:
            raise UsageError(f"Rows.of: reads = {described(reads)}; give a number of draws from 1")
        elif reads > 1:
            dataset = Repeated(dataset, reads)
        sets = [dataset] if held_out is None else [dataset, held_out]
        if collate is not None:
            train, *held = collated("Rows.of", sets, inputs, collate)
        else:
            names = ("Rows.of", "Rows.of(held_out)")
            train, *held = (columns(name, one, inputs) for name, one in zip(names, sets, strict=False))
        return cls(train, held[0] if held else None, seed)

    def materialise(self, batch: int) -> tuple[Materialised, Materialised | None]:
        train = _rows(self.arrays, batch, self.seed)
        held_out = _rows(self.held_out, batch, None, least=1) if self.held_out is not None else None
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _text(self.text))
        check_fields(self)
        if self.length < 1 or self.max_bytes < 1 or not 0.0 <= self.held_out < 1.0:
            raise UsageError(
                f"ByteText: length = {self.length}, max_bytes = {self.max_bytes}, held_out = "
                f"{self.held_out}; give the first two from 1, held_out from 0 to below 1"
            )
        check_seed(self.seed)

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


def held_out_indices(spec: DataSpec, micro: int) -> NDArray[np.int64]:
    """Sample numbers of a micro-batch of held-out data; the last may have fewer than ``batch``."""
    rows = max(0, min(spec.batch, spec.n_samples - micro * spec.batch))
    return sample_indices(spec, 1, micro, 0)[:rows]


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


def _check_steady(dataset: Any, held_out: Any, inputs: Sequence[str], collate: Collate | None) -> None:
    """UsageError for samples that are other ones at the next read: a loop would see new draws each epoch."""
    for what, one in (("Rows.of", dataset), ("Rows.of(held_out)", held_out)):
        if one is not None and (name := drawn_anew(what, one, inputs, collate)):
            raise UsageError(
                f"{what}: {name!r} of the same samples differs from read to read, and Atoll reads them once, "
                "at submit; give reads=N for N draws of each, as many as epochs, or draw in forward() by "
                "torch (torch.rand)"
            )


def _rows(arrays: Mapping[str, Any], batch: int, seed: int | None, least: int = 0) -> Materialised:
    n_samples = len(next(iter(arrays.values())))
    if n_samples < (least or batch):
        raise UsageError(f"{n_samples} samples are fewer than a micro-batch of {batch}; give more data")
    fields = tuple(DataField(name, name, Layout.ROWS) for name in arrays)
    return Materialised(DataSpec(fields, n_samples, batch, seed), arrays)


def _named_arrays(what: str, given: Any) -> dict[str, Array]:
    """Return arrays by input; UsageError unless all have as many rows, at least one."""
    if not isinstance(given, Mapping) or not given:
        raise UsageError(f"{what}: {described(given)}; {data_words(given, ('x', 'y'))}")
    found = {name: array_of(f"{what}: {name!r}", value) for name, value in given.items()}
    sizes = {name: len(value) for name, value in found.items()}
    if len(set(sizes.values())) != 1:
        raise UsageError(f"data arrays must have one common length, not {sizes}")
    if 0 in sizes.values():
        raise UsageError(f"{what} has no rows; give one for each sample")
    return found


def _text(given: Any) -> bytes | None:
    if isinstance(given, str):
        return given.encode()
    if given is not None and not isinstance(given, bytes):
        words = "give bytes, as Path('text.txt').read_bytes()"
        raise UsageError(f"ByteText: text = {described(given)}; {words}")
    return given


def check_seed(seed: Any) -> None:
    """UsageError unless ``seed`` is one of an order of samples, or None."""
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**64):
        raise UsageError(f"seed = {described(seed)}; give a number from 0 to 2**64 - 1, or None: as stored")
