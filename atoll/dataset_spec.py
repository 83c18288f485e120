"""DataSpec: materialised data as a job declares it; how samples are cut from stored tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from atoll.bounded import MAX_ARGS, Blob, Most, Name, Plain, Sorted, Within

MAX_SAMPLES = 2**48  # keeps every index within 64 bits


class Layout(StrEnum):
    """Format of the samples in a field's stored tensor."""

    ROWS = "rows"  # stored [N, ...]; sample i is row i
    WINDOWS = "windows"  # stored [L]; sample i is [i*stride + offset, ... + length)


@dataclass(frozen=True, slots=True)
class DataField:
    """Input of the DAG: its stored tensor and the layout of its samples."""

    input: Name
    blob: Blob  # safetensors, key "value"; may be of a narrower dtype than the input
    layout: Layout
    length: Annotated[int, Within(0, 2**32)] = 0  # windows only
    stride: Annotated[int, Within(0, MAX_SAMPLES)] = 0
    offset: Annotated[int, Within(0, MAX_SAMPLES)] = 0


@dataclass(frozen=True, slots=True)
class PinnedData:
    """Samples of a data set that one worker has registered, which reads them from its own disk.

    ``worker``: its id; until the job is accepted as its owner named it, "" the only one that has the set.
    ``inputs``: the field of the data for each input of the model.
    """

    worker: Annotated[str, Plain(empty=True)]
    data: Name
    inputs: Annotated[Mapping[Name, Name], Sorted(), Most(MAX_ARGS)]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Data of a job: ``n_samples`` in a seeded order, ``batch`` of them a micro-batch. ``pinned``: where they
    stay, instead of ``fields`` that the coordinator serves."""

    fields: Annotated[tuple[DataField, ...], Most(MAX_ARGS)]
    n_samples: Annotated[int, Within(0, MAX_SAMPLES)]
    batch: Annotated[int, Within(1, 2**24)]
    shuffle_seed: int | None = 0  # None: in stored order
    pinned: PinnedData | None = None
