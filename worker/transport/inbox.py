"""Reassembly of messages from one peer: chunks arrive in any order, over any connection; each counts once.

Payloads are written only where ``expect`` returns a buffer for the key and size; everything else is counted,
dropped and confirmed, so that the sender stops. Not thread-safe; the peer's lock guards it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.errors import BadFrame
from worker.transport.frames import Buffer, Data, MessageKey

Expect = Callable[[str, MessageKey, int], memoryview | None]
"""``expect(peer, key, total bytes)`` -> where the payload goes, or None: not wanted."""


@dataclass(slots=True)
class Incoming:
    """A message being assembled; ``buffer`` None: unwanted, only counted."""

    number: int
    key: MessageKey
    total: int
    buffer: memoryview | None
    meta: bytes = b""
    begins: list[int] = field(default_factory=list)  # ascending, with ``ends``: ranges claimed
    ends: list[int] = field(default_factory=list)
    arrived: int = 0
    opened: bool = False  # the chunk at offset 0 is in

    @property
    def complete(self) -> bool:
        return self.opened and self.arrived == self.total


class Inbox:
    """Assembly of one peer's messages; ``refused`` counts what was dropped, by reason."""

    def __init__(self, peer: str, expect: Expect, max_message_bytes: int, max_messages: int) -> None:
        self._peer, self._expect = peer, expect
        self._max_bytes, self._max_messages = max_message_bytes, max_messages
        self._open: dict[int, Incoming] = {}
        self._done: set[int] = set()
        self._floor = 0
        self.refused: Counter[str] = Counter()

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
            self.refused["duplicate"] += 1
            return None
        incoming = self._open.get(number)
        if incoming is None:
            incoming = self._begin(frame)
        elif incoming.total != frame.total or incoming.key != frame.key:
            raise BadFrame(f"message {number} changed its key or size between chunks")
        if not self._claim(incoming, offset, nbytes):
            self.refused["duplicate"] += 1
            return None
        if not offset:
            incoming.meta, incoming.opened = frame.meta, True
        if incoming.buffer is not None:
            incoming.buffer[offset : offset + nbytes] = payload
        incoming.arrived += nbytes
        if not incoming.complete:
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
        buffer = self._expect(self._peer, frame.key, frame.total)
        if buffer is None:
            self.refused["unexpected"] += 1
        elif len(buffer) != frame.total or buffer.readonly:
            raise ValueError(f"expect() gave {len(buffer)} bytes for a message of {frame.total}")
        incoming = Incoming(frame.number, frame.key, frame.total, buffer)
        self._open[frame.number] = incoming
        return incoming

    @staticmethod
    def _claim(incoming: Incoming, offset: int, length: int) -> bool:
        """Whether the range is new. Raises BadFrame when it overlaps without being the same."""
        end = offset + length
        if not incoming.ends or offset >= incoming.ends[-1]:  # as nearly all do
            incoming.begins.append(offset)
            incoming.ends.append(end)
            return True
        at = bisect_left(incoming.begins, offset)
        if at < len(incoming.begins) and incoming.begins[at] == offset:
            if incoming.ends[at] == end:
                return False
            raise BadFrame(f"chunk [{offset}, {end}) came before with another length")
        if (at and incoming.ends[at - 1] > offset) or (
            at < len(incoming.begins) and incoming.begins[at] < end
        ):
            raise BadFrame(f"chunk [{offset}, {end}) overlaps another")
        incoming.begins.insert(at, offset)
        incoming.ends.insert(at, end)
        return True

    def _forget_below(self, oldest: int) -> None:
        """The sender keeps nothing older than ``oldest``, so neither do we."""
        self._floor = oldest
        self._done = {number for number in self._done if number >= oldest}
        for number in [number for number in self._open if number < oldest]:
            del self._open[number]
