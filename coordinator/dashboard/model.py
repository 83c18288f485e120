"""What viewers share: a view of facts, tables and curves, and the change from one to the next. Pure.

A view's content is JSON-ready: ``{"facts": {...}, "tables": {TABLE: {ID: ROW}}, "curves": {NAME: [steps,
values]}}``.
``static/live.js`` applies changes as ``applied`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from coordinator.dashboard.curves import Seen

Row = Mapping[str, Any]
Content = dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """One moment of a topic. Rows of a table have the same keys."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Row]] = field(default_factory=dict)
    curves: Mapping[str, Seen] = field(default_factory=dict)


def content(view: View) -> Content:
    """Return all of a view."""
    return {
        "facts": dict(view.facts),
        "tables": {name: {key: dict(row) for key, row in rows.items()} for name, rows in view.tables.items()},
        "curves": {
            name: [seen.steps[: seen.length], numbers(seen.values[: seen.length])]
            for name, seen in view.curves.items()
        },
    }


def changes(before: View, after: View) -> Content:
    """Return what of a view is other than before; empty where nothing is.

    ``facts``: new values; ``rows``: by table and id the fields that differ; ``gone``: by table the ids that
    are no more; ``more``: points to append; ``curves``: whole ones, where points went.
    """
    found: Content = {}
    facts = {key: value for key, value in after.facts.items() if before.facts.get(key) != value}
    facts |= {key: None for key in before.facts.keys() - after.facts.keys() if before.facts[key] is not None}
    if facts:
        found["facts"] = facts
    for name, rows in after.tables.items():
        old = before.tables.get(name, {})
        changed = {key: fields for key, row in rows.items() if (fields := _fields(old.get(key), row))}
        gone = [key for key in old if key not in rows]
        if changed or name not in before.tables:
            found.setdefault("rows", {})[name] = changed
        if gone:
            found.setdefault("gone", {})[name] = gone
    for name, seen in after.curves.items():
        known = before.curves.get(name)
        if known is not None and known.generation == seen.generation:
            if known.length < seen.length:
                span = slice(known.length, seen.length)
                found.setdefault("more", {})[name] = [seen.steps[span], numbers(seen.values[span])]
        else:
            whole = [seen.steps[: seen.length], numbers(seen.values[: seen.length])]
            found.setdefault("curves", {})[name] = whole
    return found


def _fields(old: Row | None, new: Row) -> Row:
    if old is None:
        return new
    return (
        {}
        if old is new or old == new
        else {key: value for key, value in new.items() if old.get(key) != value}
    )


def applied(before: Content, change: Content) -> Content:
    """Return the content after a change. The page's own way to do it is in ``static/live.js``."""
    facts = {**before["facts"], **change.get("facts", {})}
    tables = {name: dict(rows) for name, rows in before["tables"].items()}
    for name, rows in change.get("rows", {}).items():
        table = tables.setdefault(name, {})
        for key, row in rows.items():
            table[key] = {**table.get(key, {}), **row}
    for name, keys in change.get("gone", {}).items():
        for key in keys:
            del tables[name][key]
    curves = {**before["curves"], **change.get("curves", {})}
    for name, (steps, values) in change.get("more", {}).items():
        curves[name] = [curves[name][0] + steps, curves[name][1] + values]
    return {"facts": facts, "tables": tables, "curves": curves}


def numbers(values: list[float]) -> list[float | str]:
    """Return numbers as JSON has them: what is not finite is a text."""
    return [number(value) for value in values]


def number(value: float) -> float | str:
    """Return a number as JSON has it: nan, inf and -inf are texts."""
    return value if isfinite(value) else str(value)
