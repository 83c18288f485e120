"""Micro-batches as the data provider sends them, before they are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrived:
    """One input of one micro-batch, as the data provider sent it."""

    step: int
    micro: int
    input: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


Fetch = Callable[[bool, tuple[str, ...], int, int], Iterable[Arrived]]
"""(evaluation, inputs, first step, count) -> micro-batches; ConnectionFailed may be tried again."""
