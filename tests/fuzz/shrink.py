"""Simpler neighbours of a case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from atoll.signatures import parameters
from tests.fuzz.case import Case, Tensorlike, Value


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one argument left out, made smaller or made plain."""
    optional = {p.name for p in parameters(case.target) if not p.required}
    for name, value in case.given.items():
        if name in optional:
            yield case.without(name)
        for plainer in _plainer(value):
            yield case.with_(name, plainer)


def _plainer(value: Value) -> Iterator[Value]:
    if isinstance(value, Tensorlike):
        if value.fill not in ("one", "extreme"):
            yield replace(value, fill="one")
        if value.grad:
            yield replace(value, grad=False)
        for at, size in enumerate(value.shape):
            if size > 1:
                yield replace(value, shape=(*value.shape[:at], size // 2, *value.shape[at + 1 :]))
    elif isinstance(value, tuple):
        for at, item in enumerate(value):
            for plainer in _plainer(item):
                yield (*value[:at], plainer, *value[at + 1 :])
