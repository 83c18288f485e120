"""What waits for one stream of an app run: bounded in messages and bytes, for one reader.

What can wait on its way here (replies) is asked to while the reader is slow: ``fits`` and ``changed``.
What cannot has as much room again; beyond that ``put`` refuses, and who owns the box acts on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Self

from atoll.errors import AtollError


class Mailbox:
    """Belongs to the event loop's thread; ``get`` alone waits for messages."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._waiting: deque[list[Any]] = deque()  # [message, bytes, kind], changed in place
        self._newest: dict[str, list[Any]] = {}
        self._arrived, self._left = asyncio.Event(), asyncio.Event()
        self.bytes = 0
        self.closed = False
        self.error: AtollError | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def fits(self, size: int) -> bool:
        """Whether what can wait may come now: half of the room is for it, and one message always fits."""
        return self.closed or not self.bytes or self.bytes + size <= self._max_bytes // 2

    async def changed(self) -> None:
        """Wait until a message was taken, or the box was closed."""
        self._left.clear()
        await self._left.wait()

    def put(self, message: Any, kind: str = "") -> bool:
        """Leave a message; False when there is no room. Of a ``kind`` only the newest waits, where the
        first of them stood. A closed box takes everything and keeps nothing."""
        if self.closed:
            return True
        size, older = message.ByteSize(), self._newest.get(kind)
        if older is not None:
            self.bytes += size - older[1]
            older[:2] = message, size
            return self.bytes <= self._max_bytes
        if len(self) >= self._max_messages or (self.bytes and self.bytes + size > self._max_bytes):
            return False
        cell = [message, size, kind]
        self._waiting.append(cell)
        if kind:
            self._newest[kind] = cell
        self.bytes += size
        self._arrived.set()
        return True

    async def get(self) -> Any:
        """The next message; None once the box is closed and empty."""
        while not self._waiting:
            if self.closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        message, size, kind = self._waiting.popleft()
        self._newest.pop(kind, None)
        self.bytes -= size
        self._left.set()
        return message

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self._newest.clear()
        self.bytes = 0
        self._left.set()

    def close(self, error: AtollError | None = None) -> None:
        """Nothing more comes: the reader gets what waits, then the end, with ``error`` if there is one."""
        if not self.closed:
            self.closed, self.error = True, error
            self._arrived.set()
            self._left.set()

    def moved(self, error: AtollError | None = None) -> Self:
        """An open box with what waits here, for another stream; this one is closed and empty."""
        made = type(self)(self._max_messages, self._max_bytes)
        for message, _, kind in self._waiting:
            made.put(message, kind)
        self.clear()
        self.close(error)
        return made
