"""A box that waits for a slow reader holds so many messages and bytes, and no more."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from atoll.errors import UsageError
from coordinator.apps.mailbox import Mailbox
from protos import atoll_apps_pb2 as pb


def reply(size: int, name: str = "") -> pb.AppReply:
    return pb.AppReply(message=name, content=b"x" * size)


async def drained(box: Mailbox) -> list[Any]:
    box.close()
    found = []
    while (message := await box.get()) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize("seed", range(20))
async def test_bytes_and_messages_are_counted_right_whatever_happens(seed: int) -> None:
    draw, box = random.Random(seed), Mailbox(20, 10_000)
    expected: list[tuple[str, int]] = []
    for number in range(400):
        if draw.random() < 0.6:
            kind, message = draw.choice(["", "", "a", "b"]), reply(draw.randrange(2000), str(number))
            places = [n for n, entry in enumerate(expected) if entry[0] == kind and kind]
            if box.put(message, kind) and not places:
                expected.append((kind, message.ByteSize()))
            elif places:
                expected[places[0]] = kind, message.ByteSize()
        elif expected:
            assert (await box.get()).ByteSize() == expected.pop(0)[1]
        assert box.bytes == sum(size for _, size in expected)
        assert len(box) == len(expected) <= 20
        assert box.bytes <= 10_000 + 2 * 2000  # the newest of a kind replaces the one before


async def test_what_can_wait_has_half_of_the_room_and_a_message_alone_always_fits() -> None:
    box = Mailbox(100, 1000)
    assert box.fits(10_000)
    assert box.put(reply(10_000))
    assert not box.fits(1)
    assert not box.put(reply(1))
    await box.get()
    box.put(reply(300))
    assert (box.fits(150), box.fits(250)) == (True, False)
    assert box.put(reply(500))


async def test_who_waits_for_room_is_woken_by_the_reader_and_by_the_end() -> None:
    box = Mailbox(100, 1000)
    box.put(reply(900))
    for wake in (box.get, drained):
        waiter = asyncio.create_task(box.changed())
        await asyncio.sleep(0)
        await wake(*([box] if wake is drained else []))
        await waiter


async def test_a_new_stream_gets_what_waited_and_the_old_one_its_reason() -> None:
    box = Mailbox(100, 10_000)
    box.put(pb.ToApp(), "fleet")
    box.put(reply(5))
    reader = asyncio.create_task(box.get())
    await reader
    moved = box.moved(UsageError("taken over"))
    assert await box.get() is None
    assert isinstance(box.error, UsageError)
    assert box.put(reply(5))  # nobody reads it any more
    assert [m.ByteSize() for m in await drained(moved)] == [reply(5).ByteSize()]
