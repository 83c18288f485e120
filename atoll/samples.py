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
from atoll.job_checks import DATA_LOADER, computed, data_words, is_data_frame
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
READ_TWICE = 16
"""Samples that are read twice to find out whether they are drawn anew: of sets of so many images, each
mirrored at random, one in 65,536 comes out alike."""


class Repeated:
    """A data set's samples, read several times: all of them once, then all of them once more, ..."""

    def __init__(self, dataset: Any, reads: int) -> None:
        self._dataset, self._reads = dataset, reads

    def __len__(self) -> int:
        return self._reads * len(self._dataset)

    def __getitem__(self, at: int) -> Any:
        return self._dataset[at % len(self._dataset)]


def drawn_anew(what: str, dataset: Any, inputs: Sequence[str], collate: Collate | None = None) -> str:
    """Return an input whose values differ between two reads of the same samples, "" where none does.

    So are samples of random augmentation, and tokens that a collator masks at random.
    """
    check_map_style(what, dataset, inputs)
    if collate is None and _is_columnar(dataset):
        return ""
    count = min(READ_TWICE, ROWS_A_READ, len(dataset))
    if collate is None:
        inputs = inputs or _names(what, dataset)
        for at in np.linspace(0, len(dataset) - 1, count).astype(int).tolist():
            one, other = (_parts(what, dataset[at], inputs) for _ in range(2))
            for name in inputs:
                if _differ(*(_one_row(f"{what}: {name!r}", read[name]) for read in (one, other))):
                    return name
        return ""
    calls = _Collating(what, [dataset], inputs, collate)
    first, second = (calls.made((0, 0, count), ()) for _ in range(2))
    return next((name for name, rows in first.items() if name in second and _differ(rows, second[name])), "")


def _differ(one: Array, other: Array) -> bool:
    """Return whether values differ where the shapes do not: a NaN is equal to itself."""
    return one.shape == other.shape and one.tobytes() != other.tobytes()


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

    It gets some samples at a time. Where they come out of different shapes, the largest ones are found and go
    along with all others, so that what is padded has one length. ``inputs`` choose among what comes out.
    """
    for dataset in datasets:
        check_map_style(what, dataset, inputs)
    calls = _Collating(what, datasets, inputs, collate)
    found = calls.spooled(())
    if found is None:
        found = calls.spooled(calls.largest())
    if found is None:
        raise UsageError(
            f"{what}: collate makes rows of other shapes each time; pad all to one length, as "
            "padding='max_length' of a tokenizer does"
        )
    return found


class _Collating:
    """Calls of a collator with a bounded number of the samples of data sets that are read in turn."""

    def __init__(self, what: str, datasets: Sequence[Any], inputs: Sequence[str], collate: Collate) -> None:
        self._what, self._datasets, self._inputs, self._collate = what, datasets, tuple(inputs), collate
        self._spans: list[tuple[int, int, int]] = []  # of each call: data set, first sample, samples
        self._shapes: list[dict[str, tuple[int, ...]]] = []  # of a row, by input, that it made

    def spooled(self, along: Sequence[tuple[int, int]]) -> tuple[dict[str, Array], ...] | None:
        """Return the rows by data set; None, with the shapes noted, where they differ. ``along``: samples,
        by data set and number, that are in every call and whose rows are dropped."""
        found = [dict[str, Spool]() for _ in self._datasets]
        longer = [self._datasets[which][at] for which, at in along]
        alike, count = True, 1
        self._spans, self._shapes = [], []
        for which, dataset in enumerate(self._datasets):
            first = 0
            while first < len(dataset):
                span = which, first, min(count, len(dataset) - first)
                made = self.made(span, longer)
                self._spans.append(span)
                self._shapes.append({name: rows.shape[1:] for name, rows in made.items()})
                alike = alike and self._shapes[-1] == self._shapes[0]
                for name, rows in made.items() if alike else ():
                    found[which].setdefault(name, Spool()).add(rows)
                if not alike:
                    found.clear()  # what waits in memory and on the disk
                first += span[2]
                a_row = sum(rows.nbytes for rows in made.values()) // span[2]
                count = min(ROWS_A_READ, max(1, READ_BYTES // max(1, a_row)))
        return tuple({name: rows.array() for name, rows in one.items()} for one in found) if alike else None

    def largest(self) -> list[tuple[int, int]]:
        """Return the samples, by data set and number, that made each dimension of each input as large as it
        is at most: found by halves within the call that had it."""
        found = dict[tuple[int, int], None]()
        for name, shape in self._shapes[0].items():
            for dim in range(len(shape)):
                size, call = max((shapes[name][dim], -at) for at, shapes in enumerate(self._shapes))
                which, first, count = self._spans[-call]
                while count > 1:
                    half = count // 2
                    has = self.made((which, first, half), ())[name].shape[1 + dim] == size
                    first, count = (first, half) if has else (first + half, count - half)
                found[which, first] = None
        return list(found)

    def made(self, span: tuple[int, int, int], along: Sequence[Any]) -> dict[str, Array]:
        """Return what the collator makes of some samples, [samples, ...] by input."""
        which, first, count = span
        samples = [self._datasets[which][at] for at in range(first, first + count)]
        made = self._collate([*samples, *along])
        if not isinstance(made, Mapping):
            raise UsageError(
                f"{self._what}: collate returned {described(made)}; return a dict with a tensor each input"
            )
        self._inputs = self._inputs or tuple(made)
        chosen = _parts(self._what, dict(made), self._inputs)
        arrays = {name: array_of(f"{self._what}: {name!r}", value) for name, value in chosen.items()}
        asked = count + len(along)
        for name, array in arrays.items():
            if len(array) != asked:
                raise UsageError(
                    f"{self._what}: collate made {len(array)} rows of {name!r} from {asked} samples; make "
                    "one of each, as DataCollatorWithPadding does"
                )
            if self._shapes and array.ndim != 1 + len(self._shapes[0][name]):
                raise UsageError(
                    f"{self._what}: {name!r} has rows of {array.ndim - 1} and of other dimensions"
                )
        return {name: array[:count] for name, array in arrays.items()}


def check_map_style(what: str, dataset: Any, inputs: Sequence[str] = ()) -> None:
    """UsageError unless the data set has samples by number, at least one."""
    if not all(isinstance(name, str) for name in inputs):
        raise UsageError(f"{what}: names of inputs are words; write Rows.of(dataset, 'x', 'y')")
    if is_a(dataset, DATA_LOADER):
        raise UsageError(f"{what}: {described(dataset)}; {data_words(dataset, inputs)}")
    if isinstance(dataset, Mapping) or is_data_frame(dataset):
        values = f"dataset{computed(dataset)}['x']"
        raise UsageError(
            f"{what}: {described(dataset)} has columns or parts by name, and no samples by number; give one "
            f"part of it (dataset['train']), or its columns, Rows({{'x': {values}, ...}})"
        )
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
