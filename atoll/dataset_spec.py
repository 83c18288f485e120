"""DataSpec: materialised data as a job declares it; how samples are cut from stored tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from atoll.bounded import MAX_ARGS, Blob, Most, Name, Within

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
class DataSpec:
    """Materialised data: ``n_samples`` in a seeded order, ``batch`` of them a micro-batch."""

    fields: Annotated[tuple[DataField, ...], Most(MAX_ARGS)]
    n_samples: Annotated[int, Within(0, MAX_SAMPLES)]
    batch: Annotated[int, Within(1, 2**24)]
    shuffle_seed: int | None = 0  # None: in stored order
