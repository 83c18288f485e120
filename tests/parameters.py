"""Parameters of which a sample runs by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(count: int, values: Iterable[Any]) -> list[Any]:
    """All of ``values``, of which ``count`` run by default, evenly spread and the first among them. The
    others are `slow`: `make test-all` runs them too."""
    known = list(values)
    chosen = {len(known) * at // count for at in range(count)}
    return [value if at in chosen else _slow(value) for at, value in enumerate(known)]


def each_once(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs, of which one for each of ``first`` runs by default, each with another of ``second``."""
    others = list(second)
    turned = ((one, others[at % len(others) :] + others[: at % len(others)]) for at, one in enumerate(first))
    pairs = [(one, other) for one, order in turned for other in order]
    return sampled(len(pairs) // len(others), pairs)


def _slow(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=(*value.marks, pytest.mark.slow), id=value.id)
    return pytest.param(*(value if type(value) is tuple else (value,)), marks=pytest.mark.slow)
