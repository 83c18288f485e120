"""Messages on their way to one peer: cut into chunks, most urgent first, kept until confirmed.

Background messages are for who repeats steps beside the plan: they wait in a queue of their own, one after
the other, and are handed out only where nothing else waits and the caller lets them.

A chunk that was handed to a connection which then broke comes back and leaves over another one;
the receiver recognises what it already has. Not thread-safe; the peer's lock guards it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from worker.transport.frames import MAX_SPAN, OF_STEPS, URGENCY, MessageKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BACKGROUND = 1 + max(URGENCY)
"""Comes after every direction."""
OVERDUE_SPAN = MAX_SPAN // 4
"""A background message that was begun goes first when so many others have passed it: a message's number may
not fall far behind the newest."""


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
    background: bool = False

    @property
    def rank(self) -> int:
        """Urgency: the smaller value leaves first."""
        return BACKGROUND if self.background else URGENCY[self.key.direction]

    @property
    def waiting(self) -> bool:
        return bool(self.again) or not self.begun or self.fresh < len(self.payload)


class Chunk(NamedTuple):
    """``message.payload[offset : offset + length]``."""

    message: Outgoing
    offset: int
    length: int


class Outbox:
    """Chunks by (urgency, age). ``held`` counts payload bytes of unconfirmed messages, ``background_held``
    those of background ones, which ``held`` leaves out."""

    def __init__(self, counted: Callable[[int], None] = lambda _: None) -> None:
        """``counted`` hears by how many the unconfirmed messages of steps become more, without background."""
        self._queue: list[tuple[int, int]] = []
        self._messages: dict[int, Outgoing] = {}
        self._behind: deque[tuple[MessageKey, bytes, memoryview]] = deque()  # background, not numbered yet
        self._begun: Outgoing | None = None  # background, not all handed out
        self._next = 0
        self._counted = counted
        self.held = self.background_held = self.urgent = 0

    def __len__(self) -> int:
        return len(self._messages) + len(self._behind)

    @property
    def oldest(self) -> int:
        """Number of the oldest unconfirmed message; the next number when there is none."""
        return next(iter(self._messages), self._next)

    @property
    def span(self) -> int:
        """How far the next number is ahead of the oldest unconfirmed one."""
        return self._next - self.oldest

    @property
    def numbered(self) -> int:
        """Messages that the peer may have begun to receive."""
        return len(self._messages)

    @property
    def behind(self) -> int:
        """Background messages that are not begun."""
        return len(self._behind)

    @property
    def idles_for_background(self) -> bool:
        """Whether nothing but background messages waits, and some do."""
        first = self._first()
        return (first is None and bool(self._behind)) or (first is not None and first.background)

    @property
    def waiting(self) -> bool:
        """Whether anything waits that is no background message."""
        first = self._first()
        return first is not None and (not first.background or self._overdue)

    @property
    def _overdue(self) -> bool:
        begun = self._begun
        return begun is not None and begun.waiting and self._next - begun.number >= OVERDUE_SPAN

    def add(self, key: MessageKey, meta: bytes, payload: memoryview) -> Outgoing:
        message = Outgoing(self._next, key, meta, payload)
        self.held += len(payload)
        self.urgent += 1
        if key.direction in OF_STEPS:
            self._counted(1)
        return self._number(message)

    def add_background(self, key: MessageKey, meta: bytes, payload: memoryview) -> None:
        """Queue a message behind everything else."""
        self.background_held += len(payload)
        self._behind.append((key, meta, payload))

    def _number(self, message: Outgoing) -> Outgoing:
        self._next += 1
        self._messages[message.number] = message
        heapq.heappush(self._queue, (message.rank, message.number))
        return message

    def take(self, chunk_bytes: int, *, background: bool = False) -> Chunk | None:
        """The most urgent chunk of at most about ``chunk_bytes``; None when nothing waits. ``background``:
        one of a background message where nothing else does."""
        message = self._begun if self._overdue else self._first()
        if message is None and background and self._behind:
            key, meta, payload = self._behind.popleft()
            message = self._begun = self._number(Outgoing(self._next, key, meta, payload, background=True))
        if message is None or (message.background and not (background or self._overdue)):
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
                heapq.heappush(self._queue, (message.rank, message.number))

    def ask_again(self, chunk_bytes: int) -> None:
        """Re-request lost confirmations after a connection broke: a message that may have arrived whole sends
        its first chunk again, which the receiver answers with the confirmation."""
        for message in self._messages.values():
            if not message.waiting and not message.under_way:
                message.again.append((0, min(chunk_bytes, len(message.payload))))
                heapq.heappush(self._queue, (message.rank, message.number))

    def confirmed(self, number: int) -> Outgoing | None:
        """The peer has the whole message; returns it the first time."""
        message = self._messages.pop(number, None)
        if message is None:
            return None
        if message.background:
            self.background_held -= len(message.payload)
            self._begun = None if self._begun is message else self._begun
        else:
            self.held -= len(message.payload)
            self.urgent -= 1
            if message.key.direction in OF_STEPS:
                self._counted(-1)
        return message

    def drop(self, unwanted: Callable[[MessageKey], bool], *, background: bool = True) -> int:
        """Forget messages by key, with or without ``background`` ones; returns how many."""
        numbers = [
            n
            for n, message in self._messages.items()
            if unwanted(message.key) and (background or not message.background)
        ]
        for number in numbers:
            self.confirmed(number)
        left = deque(entry for entry in self._behind if not (background and unwanted(entry[0])))
        dropped, self._behind = len(self._behind) - len(left), left
        self.background_held = sum(len(payload) for _, _, payload in left) + sum(
            len(message.payload) for message in self._messages.values() if message.background
        )
        return len(numbers) + dropped

    def _first(self) -> Outgoing | None:
        """The most urgent message that waits; forgets those before it."""
        while self._queue:
            message = self._messages.get(self._queue[0][1])
            if message is not None and message.waiting:
                return message
            heapq.heappop(self._queue)
        return None
