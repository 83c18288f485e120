"""DataSpec: materialised data as a job declares it; how samples are cut from stored tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Layout(StrEnum):
    """Format of the samples in a field's stored tensor."""

    ROWS = "rows"  # stored [N, ...]; sample i is row i
    WINDOWS = "windows"  # stored [L]; sample i is [i*stride + offset, ... + length)


@dataclass(frozen=True, slots=True)
class DataField:
    """Input of the DAG: its stored tensor and the layout of its samples."""

    input: str
    blob: str  # safetensors, key "value"; may be of a narrower dtype than the input
    layout: Layout
    length: int = 0  # windows only
    stride: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Materialised data: ``n_samples`` in a seeded order, ``batch`` of them a micro-batch."""

    fields: tuple[DataField, ...]
    n_samples: int
    batch: int
    shuffle_seed: int | None = 0  # None: in stored order
