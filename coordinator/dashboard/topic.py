"""What one page shows, shared by all who look at it: its newest view, and the change that led there.

Whoever has the version before gets the change, everybody else the whole; either is encoded once, however
many viewers there are.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from dataclasses import dataclass
from functools import cached_property

from coordinator.dashboard.model import Content, View, changes, content

GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # RFC 1952, of a stream without a name or time
_LEVEL = 6


class Pulse:
    """Wakes everybody who waits for any topic's next version."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def beat(self) -> None:
        """Wake them."""
        self._next.set()
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """The event that the next beat sets."""
        return self._next


@dataclass(frozen=True)
class Frame:
    """One server-sent event."""

    topic: str
    kind: str  # whole | change
    data: Content

    @cached_property
    def plain(self) -> bytes:
        """Its bytes."""
        words = json.dumps({"topic": self.topic, **self.data}, separators=(",", ":"), allow_nan=False)
        return f"event: {self.kind}\ndata: {words}\n\n".encode()

    @cached_property
    def deflated(self) -> bytes:
        """The same as blocks of a deflate stream that refer to nothing before them: every viewer's stream may
        hold them at any place."""
        return deflated(self.plain)


def deflated(data: bytes) -> bytes:
    """Return bytes as blocks of any deflate stream."""
    press = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return press.compress(data) + press.flush(zlib.Z_FULL_FLUSH)


class Topic:
    """One page's content: of the fleet, of the events, or of one job."""

    def __init__(self, name: str, pulse: Pulse) -> None:
        self.name = name
        self.viewers = 0
        self.version = 0  # 0: nothing is known yet
        self.view = View()
        self._pulse = pulse
        self._change: Frame | None = None
        self._whole: Frame | None = None

    def publish(self, view: View) -> None:
        """Make this the newest view; nobody is woken for one that is as before."""
        change = changes(self.view, view)
        if not change and self.version:
            return
        self.view = view
        self.version += 1
        self._change, self._whole = Frame(self.name, "change", change), None
        self._pulse.beat()

    def since(self, version: int) -> Frame | None:
        """Return what brings who has ``version`` (0: nothing) to the newest one, None where that is it."""
        if version == self.version:
            return None
        if version and version == self.version - 1:
            return self._change
        if self._whole is None:
            self._whole = Frame(self.name, "whole", content(self.view))
        return self._whole
