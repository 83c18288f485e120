"""Options of strategies and selectors: names and types, checked as they are given, and bounds, as one is
built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from math import isfinite
from typing import Any

from atoll.errors import UsageError

Option = float | int | bool | str


def within(rule: str, option: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """UsageError unless low <= value <= high (low < value with ``open_low``)."""
    if not isfinite(value) or not low <= value <= high or (open_low and value == low):
        above = "more than " if open_low else ""
        raise UsageError(f"{rule}: {option} = {value:g}; give a number from {above}{low:g} to {high:g}")


def bounded(default: Option, low: float, high: float, *, open_low: bool = False) -> Any:
    """Return a dataclass field for an option that ``check_bounds`` holds to these bounds."""
    return field(default=default, metadata={"low": low, "high": high, "open_low": open_low})


def check_bounds(rule: Any) -> None:
    """Raise UsageError for an option of a strategy or selector that is out of its ``bounded`` range."""
    for option in fields(rule):
        if option.metadata:
            within(rule.name, option.name, getattr(rule, option.name), **option.metadata)


def typed(kind: type[Any], given: Mapping[str, Option]) -> dict[str, Option]:
    """``given`` for the fields of ``kind``, a whole number as a float where that is meant. UsageError for an
    unknown option or another type."""
    known = {field.name: type(field.default) for field in fields(kind)}
    found = dict(given)
    for option, value in given.items():
        if option not in known:
            names = ", ".join(known) or "none"
            raise UsageError(f"{kind.name} has no option {option[:64]!r}; it has {names}")
        if known[option] is float and type(value) is int:
            found[option] = float(value)
        elif type(value) is not known[option]:
            raise UsageError(f"{kind.name}: {option} = {value!r}; give a {known[option].__name__}")
    return found


def parsed(what: str, text: str) -> dict[str, Option]:
    """The options in a text such as "mu=0.1, nesterov=true". UsageError for anything else."""
    found: dict[str, Option] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not (option and equals and value) or option in found:
            raise UsageError(f"{what} {part[:64]!r}; write each option once, as in 'mu=0.1, nesterov=true'")
        found[option] = _value(value)
    return found


def _value(text: str) -> Option:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
