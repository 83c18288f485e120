"""Reassembly of messages from one peer: chunks arrive in any order, over any connection; each counts once.

Payloads are written only where ``expect`` returns a buffer for the key and size; everything else is counted,
dropped and confirmed, so that the sender stops. Not thread-safe; the peer's lock guards it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.errors import BadFrame
from worker.transport.frames import Buffer, Data, MessageKey

Expect = Callable[[MessageKey, int], memoryview | None]
"""``expect(key, total bytes)`` -> where the payload goes, or None: not wanted."""


@dataclass(slots=True)
class Incoming:
    """A message being assembled; ``buffer`` None: unwanted, only counted."""

    key: MessageKey
    total: int
    buffer: memoryview | None
    meta: bytes = b""
    ranges: list[tuple[int, int]] = field(default_factory=list)  # claimed: begin and end, ascending
    arrived: int = 0


class Inbox:
    """Assembly of one peer's messages."""

    def __init__(self, expect: Expect, max_message_bytes: int, max_messages: int) -> None:
        self._expect = expect
        self._max_bytes, self._max_messages = max_message_bytes, max_messages
        self._open: dict[int, Incoming] = {}
        self._done: set[int] = set()
        self._floor = 0

    def __len__(self) -> int:
        return len(self._open)

    def take(self, frame: Data, payload: Buffer) -> Incoming | None:
        """Put a chunk in its place; returns the message when that completes it.

        Raises BadFrame for a chunk that contradicts what came before or breaks a bound.
        """
        if frame.oldest > self._floor:
            self._forget_below(frame.oldest)
        number, offset, nbytes = frame.number, frame.offset, len(payload)
        if self.is_done(number):
            return None
        incoming = self._open.get(number)
        if incoming is None:
            incoming = self._begin(frame)
        elif incoming.total != frame.total or incoming.key != frame.key:
            raise BadFrame(f"message {number} changed its key or size between chunks")
        if not self._claim(incoming, offset, nbytes):
            return None
        if not offset:
            incoming.meta = frame.meta
        if incoming.buffer is not None:
            incoming.buffer[offset : offset + nbytes] = payload
        incoming.arrived += nbytes
        if incoming.arrived < incoming.total:
            return None
        del self._open[number]
        self._done.add(number)
        return incoming

    def is_done(self, number: int) -> bool:
        return number < self._floor or number in self._done

    def drop(self, unwanted: Callable[[MessageKey], bool]) -> None:
        """Stop filling buffers of these keys; their chunks are still counted and confirmed."""
        for incoming in self._open.values():
            if unwanted(incoming.key):
                incoming.buffer = None

    def _begin(self, frame: Data) -> Incoming:
        if frame.total > self._max_bytes:
            raise BadFrame(f"message of {frame.total} bytes declared; at most {self._max_bytes}")
        if len(self._open) >= self._max_messages:
            raise BadFrame(f"more than {self._max_messages} messages begun and not finished")
        buffer = self._expect(frame.key, frame.total)
        if buffer is not None and (len(buffer) != frame.total or buffer.readonly):
            raise ValueError(f"expect() gave {len(buffer)} bytes for a message of {frame.total}")
        incoming = Incoming(frame.key, frame.total, buffer)
        self._open[frame.number] = incoming
        return incoming

    @staticmethod
    def _claim(incoming: Incoming, offset: int, length: int) -> bool:
        """Whether the range is new. Raises BadFrame when it overlaps without being the same."""
        ranges, new = incoming.ranges, (offset, offset + length)
        at = bisect_right(ranges, new)
        if at and ranges[at - 1] == new:
            return False
        if (at and ranges[at - 1][1] > offset) or (at < len(ranges) and ranges[at][0] < new[1]):
            raise BadFrame(f"chunk [{new[0]}, {new[1]}) overlaps another")
        ranges.insert(at, new)
        return True

    def _forget_below(self, oldest: int) -> None:
        """The sender keeps nothing older than ``oldest``, so neither do we."""
        self._floor = oldest
        self._done = {number for number in self._done if number >= oldest}
        for number in [number for number in self._open if number < oldest]:
            del self._open[number]
