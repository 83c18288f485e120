"""What a daemon's log may take: a full disk costs lines, never the daemon, and no peer fills the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

from hostos.budget import Budget

LINES, LINES_PER_S = 10_000, 2.0  # of one event: at some 250 bytes 43 MB a day
MAX_EVENTS = 1000  # that are told apart; all others share one budget


class LogBudget:
    """structlog's processor that drops the lines of an event beyond so many, and says with the next one how
    many those were: whatever a peer does that is logged, it may do as often as it likes."""

    def __init__(
        self,
        lines: float = LINES,
        lines_per_s: float = LINES_PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines, self._per_s, self._clock = lines, lines_per_s, clock
        self._of: dict[str, Budget] = {}

    def __call__(self, _: object, level: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Raises structlog's DropEvent."""
        event = str(fields.get("event", ""))
        if event not in self._of and len(self._of) >= MAX_EVENTS:
            event = ""
        budget = self._of.setdefault(event, Budget(self._lines, self._per_s))
        if not budget.take(self._clock()):
            raise structlog.DropEvent
        if left_out := budget.refused():
            fields["lines_left_out_before"] = left_out
        return fields


def log_stream(stream: TextIO) -> TextIO:
    """Return ``stream`` for a logger: a line that cannot be written is dropped, later ones are tried."""
    return cast("TextIO", _Unfailing(stream))


class _Unfailing:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop."""
        with suppress(OSError, ValueError):  # no space, a pipe without a reader; a stream that is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be."""
        with suppress(OSError, ValueError):
            self._stream.flush()
