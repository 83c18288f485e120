"""What nodes answer, before the owner's app, terminal or disk see it: names, errors, metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atoll.errors import BadFrame
from protos.text_limits import REASON_CHARS, clean, plain

if TYPE_CHECKING:
    from flwr.app import RecordDict

MAX_NAMES = 10_000  # of metrics and configs in one reply; of arrays there may be more
MAX_NAME_CHARS = 200  # of a metric, a config or a record
MAX_ARRAY_NAME_CHARS = 4000
SHOWN_METRICS, SHOWN_ITEMS, SHOWN_CHARS = 100, 16, 200  # of one event


def checked(records: RecordDict) -> RecordDict:
    """A reply's records when their names can be shown and logged; BadFrame otherwise.

    Strategies average what they find and log it under the names that nodes gave it.
    """
    arrays = set(records.array_records)
    count = len(records) + sum(len(record) for name, record in records.items() if name not in arrays)
    if count > MAX_NAMES:
        raise BadFrame(f"a reply of {count} metrics and configs; at most {MAX_NAMES} are accepted: use lists")
    for name, record in records.items():
        _check(name, MAX_NAME_CHARS)
        for key in record:
            _check(key, MAX_ARRAY_NAME_CHARS if name in arrays else MAX_NAME_CHARS)
    return records


def _check(name: str, most: int) -> None:
    if len(name) > most or not plain(name):
        raise BadFrame(
            f"a record is named {clean(name, 40)!r}, {len(name)} characters; at most {most} and no control "
            "characters are accepted"
        )


def reason_of(text: str) -> str:
    """An error's words as the app sees them: a traceback keeps its lines."""
    return clean(text, REASON_CHARS, lines=True)


def in_short(name: str, reason: str, code: int) -> str:
    """One line of an error for a person."""
    first = (reason.strip().splitlines() or [f"error {code}"])[0]
    return clean(f"{name}: {first}", SHOWN_CHARS)


def metrics_shown(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The first so many metrics, numbers as they are, the rest cut, for one line of events."""
    found = {}
    for key, value in list(metrics.items())[:SHOWN_METRICS]:
        if isinstance(value, list | tuple):
            value = [_short(item) for item in value[:SHOWN_ITEMS]]
        found[clean(str(key), SHOWN_CHARS)] = value if isinstance(value, list) else _short(value)
    if len(metrics) > SHOWN_METRICS:
        found[f"and {len(metrics) - SHOWN_METRICS} more"] = "not shown"
    return found


def _short(value: Any) -> Any:
    return value if isinstance(value, bool | int | float) else clean(str(value), SHOWN_CHARS)
