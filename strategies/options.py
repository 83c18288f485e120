"""Bounds of a rule's options, checked when the rule is built."""

from __future__ import annotations

from math import isfinite

from atoll.errors import UsageError


def within(rule: str, option: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """UsageError unless low <= value <= high (low < value with ``open_low``)."""
    if not isfinite(value) or not low <= value <= high or (open_low and value == low):
        above = "more than " if open_low else ""
        raise UsageError(f"{rule}: {option} = {value:g}; give a number from {above}{low:g} to {high:g}")
