"""Models of the tests as they are captured: once a process, whichever files ask for them.

A capture takes a second and is the same for every TrainingSpec of one precision that freezes nothing. Nobody
may change what is found here: stages and pipelines copy what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from atoll.job import Precision, TrainingSpec
from coordinator.capture.capture import Captured, capture
from tests.coordinator.capture.architectures import ARCHITECTURES
from tests.models import MODELS, Example

ALL: Mapping[str, Callable[..., Example]] = {**MODELS, **ARCHITECTURES}


@dataclass(frozen=True)
class CapturedModel:
    """A module with batches for it, and its graphs."""

    example: Example
    captured: Captured


@cache
def captured_model(name: str, dropout: float = 0.0, precision: Precision = Precision.FP32) -> CapturedModel:
    """Return a model of ``ALL`` with its graphs."""
    example = ALL[name](dropout=dropout)
    training = TrainingSpec(1, 1, precision=precision)
    return CapturedModel(example, capture(example.module, example.example_inputs, training))
