"""Samples of a map-style data set, stacked by the model's inputs.

A data set is anything with ``len()`` and samples by number: of torch, of torchvision, of Hugging Face's
``datasets``, of people's own. The last are known by their methods, so that nothing here imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.arrays import array_of
from atoll.errors import UsageError
from atoll.fields import described, is_a
from atoll.job_checks import DATA_LOADER, data_words
from atoll.spooled import Spool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.generic]

Collate = Callable[[list[Any]], Mapping[str, Any]]
COLUMNAR = "datasets.arrow_dataset.Dataset"
OWN_FORMAT = "custom"
"""A format of ``datasets`` in which a function of its owner's makes each sample."""
ROWS_A_READ = 1024
"""Of a columnar data set: a read costs about as much as one row, and its arrays are small, ..."""
READ_BYTES = 16 << 20  # ... as far as the rows themselves are


def columns(what: str, dataset: Any, inputs: Sequence[str]) -> dict[str, Array]:
    """Return the parts of a data set's samples, stacked by input: [samples, ...] each.

    Without ``inputs`` those of the first sample's names. UsageError, which begins with ``what``, for samples
    that have no such parts, that hold no numbers, or of different shapes.
    """
    check_map_style(what, dataset, inputs)
    inputs = inputs or _names(what, dataset)
    if _is_columnar(dataset):
        return _read_columns(what, dataset, inputs)
    parts = {name: Spool() for name in inputs}
    for at in range(len(dataset)):
        for name, value in _parts(what, dataset[at], inputs).items():
            row = _one_row(f"{what}: {name!r}", value)
            if (other := parts[name].add(row[np.newaxis])) is not None:
                raise UsageError(
                    f"{what}: {name!r} has rows of different shapes, {other} and {row.shape}; pad them to one"
                )
    return {name: rows.array() for name, rows in parts.items()}


def collated(
    what: str, datasets: Sequence[Any], inputs: Sequence[str], collate: Collate
) -> tuple[dict[str, Array], ...]:
    """Return for each data set what ``collate`` makes of its samples, by input.

    All go through one call, so that what is padded has one length. ``inputs`` choose among what comes out.
    """
    for dataset in datasets:
        check_map_style(what, dataset, inputs)
    samples = [sample for dataset in datasets for sample in samples_of(dataset)]
    made = collate(samples)
    if not isinstance(made, Mapping):
        raise UsageError(
            f"{what}: collate returned {described(made)}; return a dict with a tensor each input"
        )
    chosen = _parts(what, dict(made), inputs or tuple(made))
    arrays = {name: array_of(f"{what}: {name!r}", value) for name, value in chosen.items()}
    if odd := [name for name, array in arrays.items() if len(array) != len(samples)]:
        raise UsageError(
            f"{what}: collate made {len(arrays[odd[0]])} rows of {odd[0]!r} from {len(samples)} "
            "samples; make one of each, as DataCollatorWithPadding does"
        )
    found, first = [], 0
    for dataset in datasets:
        rows = slice(first, first + len(dataset))
        found.append({name: array[rows] for name, array in arrays.items()})
        first = rows.stop
    return tuple(found)


def check_map_style(what: str, dataset: Any, inputs: Sequence[str] = ()) -> None:
    """UsageError unless the data set has samples by number, at least one."""
    if not all(isinstance(name, str) for name in inputs):
        raise UsageError(f"{what}: names of inputs are words; write Rows.of(dataset, 'x', 'y')")
    if is_a(dataset, DATA_LOADER):
        raise UsageError(f"{what}: {described(dataset)}; {data_words(dataset, inputs)}")
    if isinstance(dataset, type) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"{what}: {described(dataset)} has no samples by number; make tensors of it and give "
            "Rows({...})"
        )
    if not len(dataset):
        raise UsageError(f"{what}: {described(dataset)} has no samples")


def samples_of(dataset: Any) -> Iterator[Any]:
    """Yield the samples of a map-style data set in their order."""
    return (dataset[at] for at in range(len(dataset)))


def _names(what: str, dataset: Any) -> tuple[str, ...]:
    first = dataset[0]
    if not isinstance(first, Mapping):
        raise UsageError(
            f"{what} names no inputs; name one for each part of a sample, Rows.of(dataset, 'x', 'y')"
        )
    return tuple(map(str, first))


def _is_columnar(dataset: Any) -> bool:
    return is_a(dataset, COLUMNAR) and dataset.format["type"] != OWN_FORMAT


def _read_columns(what: str, dataset: Any, inputs: Sequence[str]) -> dict[str, Array]:
    """Return columns as arrays of the types that the data set declares, read some rows at a time."""
    if missing := [name for name in inputs if name not in dataset.column_names]:
        raise UsageError(f"{what}: samples have {', '.join(dataset.column_names)}, not {', '.join(missing)}")
    plain = dataset.with_format("numpy", columns=list(inputs))
    parts = {name: Spool() for name in inputs}
    first, count = 0, 1
    while first < len(dataset):
        read = {name: _column(what, name, rows) for name, rows in plain[first : first + count].items()}
        for name in inputs:
            if (other := parts[name].add(read[name])) is not None:
                raise UsageError(_ragged(what, name, other, read[name].shape[1:]))
        first += count
        a_row = sum(rows.nbytes for rows in read.values()) // count
        count = min(ROWS_A_READ, max(1, READ_BYTES // max(1, a_row)))
    return {name: rows.array() for name, rows in parts.items()}


def _column(what: str, name: str, read: Any) -> Array:
    if read.dtype.kind == "O":
        shapes = list(dict.fromkeys(getattr(row, "shape", ()) for row in read))
        if len(shapes) > 1:
            raise UsageError(_ragged(what, name, shapes[0], shapes[1]))
    if read.dtype.kind in "OUS":
        first = described(read[0:1].tolist()[0])
        raise UsageError(
            f"{what}: {name!r} holds no numbers, first {first}; name the inputs to take, "
            "Rows.of(dataset, 'x', 'y')"
        )
    return array_of(f"{what}: {name!r}", read)


def _ragged(what: str, name: str, one: tuple[int, ...], other: tuple[int, ...]) -> str:
    return (
        f"{what}: {name!r} has rows of different shapes, {one} and {other}; pad them to one, or give "
        "collate=DataCollatorWithPadding(tokenizer)"
    )


def _parts(what: str, sample: Any, inputs: Sequence[str]) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        if missing := [name for name in inputs if name not in sample]:
            raise UsageError(f"{what}: samples have {', '.join(map(str, sample))}, not {', '.join(missing)}")
        return {name: sample[name] for name in inputs}
    parts = sample if isinstance(sample, tuple | list) else (sample,)
    if len(parts) != len(inputs):
        raise UsageError(
            f"{what}: a sample has {len(parts)} parts; name an input for each, not {len(inputs)}"
        )
    return dict(zip(inputs, parts, strict=True))


def _one_row(what: str, value: Any) -> Array:
    if isinstance(value, bool | int | float):
        return np.asarray(value)
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape) == 0:  # a label on its own
        return array_of(what, value.reshape(1))[0:1].reshape(())
    return array_of(what, value)
