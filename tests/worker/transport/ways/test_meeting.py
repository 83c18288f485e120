"""Peers that meet: what comes and goes while both ends dial."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.errors import ConnectionFailed
from worker.transport.contract import Paths, TransportConfig
from worker.transport.ways.meeting import Meetings

HERE = Paths((("127.0.0.1", 1),))


class Unreachable:
    """A dialler that never gets through, and a peer that may come by itself."""

    def __init__(self) -> None:
        self.config = TransportConfig()
        self.peer: Any = SimpleNamespace(
            name="w-b", connections=[], way=None, relayed=False, gone=False, wait_for_moved=lambda: None
        )
        self.meetings = Meetings(self, None, lambda _: None, lambda *_: None)  # type: ignore[arg-type]

    def known(self, peer: str) -> Any:
        return self.peer

    async def first(self, *_: Any) -> Any:
        await asyncio.sleep(60.0)

    async def comes(self, *, stays: bool) -> None:
        self.peer.connections.append("a connection")
        self.meetings.attached(self.peer)
        if not stays:
            self.peer.connections.clear()
        await asyncio.sleep(0.02)


async def test_a_connection_that_is_gone_at_once_is_not_the_last_chance() -> None:
    """Where both ends dial, one may forget the other as the second connection comes."""
    dialler = Unreachable()
    meeting = asyncio.create_task(dialler.meetings.meet("w-b", HERE, 60.0))
    await asyncio.sleep(0.02)
    for _ in range(3):
        await dialler.comes(stays=False)
        assert not meeting.done()
    await dialler.comes(stays=True)
    await meeting


async def test_who_connects_and_never_stays_is_said_to() -> None:
    dialler = Unreachable()
    meeting = asyncio.create_task(dialler.meetings.meet("w-b", HERE, 0.3))
    while not meeting.done():
        await asyncio.sleep(0.005)
        await dialler.comes(stays=False)
    with pytest.raises(ConnectionFailed, match=r"w-b (did not connect|connected) within 0\.\d* s"):
        await meeting
