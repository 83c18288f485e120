"""The stream that a daemon's log goes to: a full disk costs lines, never the daemon."""

from __future__ import annotations

from contextlib import suppress
from typing import TextIO, cast


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
