"""Messages on their way to one peer: cut into chunks, most urgent first, kept until confirmed.

A chunk that was handed to a connection which then broke comes back and leaves over another one;
the receiver recognises what it already has. Not thread-safe; the peer's lock guards it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from worker.transport.frames import URGENCY, MessageKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(slots=True)
class Outgoing:
    """One message; ``fresh`` is the first byte never handed out, ``again`` what came back."""

    number: int
    key: MessageKey
    meta: bytes
    payload: memoryview
    fresh: int = 0
    begun: bool = False
    again: list[tuple[int, int]] = field(default_factory=list)
    under_way: int = 0  # chunks handed out and not acknowledged

    @property
    def waiting(self) -> bool:
        return bool(self.again) or not self.begun or self.fresh < len(self.payload)


class Chunk(NamedTuple):
    """``message.payload[offset : offset + length]``."""

    message: Outgoing
    offset: int
    length: int


class Outbox:
    """Chunks by (urgency, age). ``held`` counts payload bytes of unconfirmed messages."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int]] = []
        self._messages: dict[int, Outgoing] = {}
        self._next = 0
        self.held = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def oldest(self) -> int:
        """Number of the oldest unconfirmed message; the next number when there is none."""
        return next(iter(self._messages), self._next)

    @property
    def span(self) -> int:
        """How far the next number is ahead of the oldest unconfirmed one."""
        return self._next - self.oldest

    @property
    def waiting(self) -> bool:
        return self._first() is not None

    def add(self, key: MessageKey, meta: bytes, payload: memoryview) -> Outgoing:
        message = Outgoing(self._next, key, meta, payload)
        self._next += 1
        self._messages[message.number] = message
        self.held += len(payload)
        heapq.heappush(self._queue, (URGENCY[key.direction], message.number))
        return message

    def take(self, chunk_bytes: int) -> Chunk | None:
        """The most urgent chunk of at most about ``chunk_bytes``; None when nothing waits."""
        message = self._first()
        if message is None:
            return None
        message.under_way += 1
        if message.again:
            offset, length = message.again.pop()
            return Chunk(message, offset, length)
        offset = message.fresh
        length = min(chunk_bytes, len(message.payload) - offset)
        message.fresh, message.begun = offset + length, True
        return Chunk(message, offset, length)

    def acknowledged(self, chunk: Chunk) -> None:
        chunk.message.under_way -= 1

    def give_back(self, chunks: Iterable[Chunk]) -> None:
        """Chunks whose connection broke before they were acknowledged."""
        for chunk in chunks:
            message = chunk.message
            message.under_way -= 1
            if message.number in self._messages:
                message.again.append((chunk.offset, chunk.length))
                heapq.heappush(self._queue, (URGENCY[message.key.direction], message.number))

    def ask_again(self, chunk_bytes: int) -> None:
        """Re-request lost confirmations after a connection broke: a message that may have arrived whole sends
        its first chunk again, which the receiver answers with the confirmation."""
        for message in self._messages.values():
            if not message.waiting and not message.under_way:
                message.again.append((0, min(chunk_bytes, len(message.payload))))
                heapq.heappush(self._queue, (URGENCY[message.key.direction], message.number))

    def confirmed(self, number: int) -> Outgoing | None:
        """The peer has the whole message; returns it the first time."""
        message = self._messages.pop(number, None)
        if message is not None:
            self.held -= len(message.payload)
        return message

    def drop(self, unwanted: Callable[[MessageKey], bool]) -> int:
        """Forget messages by key; returns how many."""
        numbers = [n for n, message in self._messages.items() if unwanted(message.key)]
        for number in numbers:
            self.confirmed(number)
        return len(numbers)

    def _first(self) -> Outgoing | None:
        """The most urgent message that waits; forgets those before it."""
        while self._queue:
            message = self._messages.get(self._queue[0][1])
            if message is not None and message.waiting:
                return message
            heapq.heappop(self._queue)
        return None
