"""Connections over pipes in memory: what leaves together, in which order, and what a broken one costs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from tests.patience import HUNG_S
from worker.transport import TUNED
from worker.transport.contract import PeerLost, TransportConfig
from worker.transport.frames import (
    Ack,
    Close,
    Data,
    Direction,
    Frame,
    MessageKey,
    Ping,
    Pong,
    decode_all,
    encode,
)
from worker.transport.peers.connection import MAX_PINGS, MAX_PONGS, Connection
from worker.transport.peers.peer import Peer

SMALL = b"x" * 300
CONFIG = TransportConfig(ping_s=0.5, silence_s=1.5, idle_s=30.0)
Work = Callable[[], Coroutine[Any, Any, None]]


def key(micro: int, direction: Direction = Direction.FORWARD) -> MessageKey:
    return MessageKey("job", 1, 0, micro, 7, direction)


def frames(message: bytes) -> list[Frame]:
    return [frame for frame, _ in decode_all(message)]


def kinds(message: bytes) -> list[str]:
    return [type(frame).__name__ for frame in frames(message)]


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(10):
        await asyncio.sleep(0)


class HeldPipe:
    """A pipe in memory: a message is written when the test says so."""

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.came: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.finished = self.closed = False
        self._written = asyncio.Event()

    async def send(self, message: bytes) -> None:
        assert not self.held, "one at a time"
        self.held.append(message)
        self._written.clear()
        await self._written.wait()

    async def receive(self) -> bytes | None:
        return await self.came.get()

    async def finish(self) -> None:
        self.finished = True

    async def close(self) -> None:
        self.closed = True

    async def out(self) -> list[bytes]:
        """Everything that leaves now, one after the other."""
        found: list[bytes] = []
        await settle()
        while self.held:
            found.append(self.held.pop())
            self._written.set()
            await settle()
        return found


class Taker:
    """A job's receiver."""

    def __init__(self) -> None:
        self.got: list[tuple[MessageKey, bytes]] = []

    def expect(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        return memoryview(bytearray(total))

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        self.got.append((key, bytes(payload)))

    def lost(self, peer: str, reason: str) -> None: ...


class End:
    """One side: a peer and its connections."""

    def __init__(self, other: str) -> None:
        self.taker = Taker()
        self.peer = Peer(other, 1, CONFIG, {"job": self.taker}, asyncio.get_running_loop())
        self.tasks: list[asyncio.Task[None]] = []
        self.pipe = HeldPipe()
        self.connection = self.open(self.pipe)

    def open(self, pipe: HeldPipe) -> Connection:
        connection = Connection(pipe, self.peer, outbound=True, summed=False)
        self.tasks.append(asyncio.create_task(connection.run()))
        return connection

    def queue(self, *messages: tuple[MessageKey, bytes]) -> None:
        for at, payload in messages:
            self.peer.submit(at, b"header", memoryview(payload), 0, more=False)

    async def take(self, *messages: bytes) -> None:
        for message in messages:
            self.pipe.came.put_nowait(message)
        await settle()

    @property
    def got(self) -> list[tuple[MessageKey, bytes]]:
        return self.taker.got


def ends(test: Callable[[End, End], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on two ends; nothing moves between them but by the test's hand."""

    async def run() -> None:
        a, b = End("b"), End("a")
        await settle()
        try:
            async with asyncio.timeout(HUNG_S):
                await test(a, b)
        finally:
            for task in (*a.tasks, *b.tasks):
                task.cancel()
            await asyncio.gather(*a.tasks, *b.tasks, return_exceptions=True)

    def wrapped() -> None:
        asyncio.run(run())

    wrapped.__name__ = wrapped.__qualname__ = test.__name__
    wrapped.__doc__ = test.__doc__
    return wrapped


# ---------------------------------------------------------------- what leaves, and with what


@ends
async def test_sixteen_small_messages_leave_as_one_and_are_acknowledged_as_one(a: End, b: End) -> None:
    a.queue(*((key(micro), SMALL) for micro in range(16)))
    (message,) = await a.pipe.out()
    assert kinds(message) == ["Data"] * 16
    await b.take(message)
    assert b.got == [(key(micro), SMALL) for micro in range(16)]
    (answer,) = await b.pipe.out()
    assert kinds(answer) == ["Ack"]
    await a.take(answer)
    assert a.peer.flush(0)


@ends
async def test_a_message_that_more_follow_does_not_leave_before_the_last(a: End, b: End) -> None:
    for micro, more in ((0, True), (1, True), (2, False)):
        await settle()
        assert not a.pipe.held
        a.peer.submit(key(micro), b"header", memoryview(SMALL), 0, more=more)
    (message,) = await a.pipe.out()
    assert kinds(message) == ["Data"] * 3


@ends
async def test_others_gather_while_a_message_is_written(a: End, b: End) -> None:
    a.queue((key(0), SMALL))
    await settle()
    a.queue((key(1), SMALL), (key(2), SMALL))
    assert [kinds(message) for message in await a.pipe.out()] == [["Data"], ["Data"] * 2]


@ends
async def test_a_full_queue_lets_out_what_waited_for_company(a: End, b: End) -> None:
    for micro in range(CONFIG.max_messages):
        a.peer.submit(key(micro), b"", memoryview(b""), 0, more=True)
    await settle()
    assert not a.pipe.held
    with pytest.raises(TimeoutError):
        a.peer.submit(key(0), b"", memoryview(b""), 0, more=True)
    await settle()
    assert a.pipe.held


@ends
async def test_backward_leaves_before_forward_within_a_message(a: End, b: End) -> None:
    a.queue((key(0), SMALL), (key(1), SMALL), (key(0, Direction.BACKWARD), SMALL))
    await b.take(*await a.pipe.out())
    assert [at.direction for at, _ in b.got] == [Direction.BACKWARD, Direction.FORWARD, Direction.FORWARD]


@ends
async def test_a_gradient_waits_for_one_message_of_activations_at_most(a: End, b: End) -> None:
    a.queue(*((key(micro), b"y" * 4000) for micro in range(60)))
    await settle()
    a.queue((key(0, Direction.BACKWARD), SMALL))
    messages = await a.pipe.out()
    assert all(len(message) <= TUNED.together_bytes + 8000 for message in messages)
    second = frames(messages[1])[0]
    assert isinstance(second, Data)
    assert second.key.direction is Direction.BACKWARD


@ends
async def test_an_acknowledgement_and_an_echo_share_a_message_with_data(a: End, b: End) -> None:
    a.connection.ping(0.0)
    a.queue((key(0), SMALL))
    (message,) = await a.pipe.out()
    assert kinds(message) == ["Ping", "Data"]
    b.queue((key(0, Direction.BACKWARD), SMALL))
    await settle()
    await b.take(message)
    alone, answer = await b.pipe.out()
    assert kinds(alone) == ["Data"]
    assert kinds(answer) == ["Pong", "Ack"]


# ---------------------------------------------------------------- ends of connections


@ends
async def test_a_message_delivered_on_a_connection_that_broke_is_confirmed_on_another(a: End, b: End) -> None:
    pipes = HeldPipe(), HeldPipe()
    a.open(pipes[0])
    b.open(pipes[1])
    a.queue((key(0), SMALL))
    await b.take(*await a.pipe.out())
    a.connection.fail("cable pulled")
    b.connection.fail("cable pulled")
    for message in await pipes[0].out():
        pipes[1].came.put_nowait(message)
    for message in await pipes[1].out():
        pipes[0].came.put_nowait(message)
    await settle()
    assert b.got == [(key(0), SMALL)]
    assert a.peer.flush(0)


@ends
async def test_frames_after_a_close_are_not_looked_at(a: End, b: End) -> None:
    data = encode(Data(0, key(0), 0, len(SMALL)), SMALL)
    await b.take(encode(Close(True, "going home")) + data)
    assert b.got == []
    assert b.connection.reason == "left: going home"
    assert b.connection.leaving
    assert b.pipe.closed


@ends
async def test_a_bad_frame_ends_its_connection_and_what_came_before_it_counts(a: End, b: End) -> None:
    await b.take(encode(Data(0, key(0), 0, len(SMALL)), SMALL) + b"nothing like a frame, though as long")
    assert len(b.got) == 1
    (last,) = await b.pipe.out()
    assert kinds(last)[-1] == "Close"
    assert b.pipe.finished


@pytest.mark.parametrize("received", [301, 100])
def test_an_acknowledgement_of_what_was_not_sent_or_of_less_than_before_is_refused(received: int) -> None:
    @ends
    async def refused(a: End, b: End) -> None:
        a.queue((key(0), SMALL))
        await a.pipe.out()
        await a.take(encode(Ack(200, 7)), encode(Ack(received, 8)))
        (last,) = await a.pipe.out()
        assert kinds(last) == ["Close"]

    refused()


@ends
async def test_nothing_leaves_after_a_close(a: End, b: End) -> None:
    a.connection.close("done", leaving=True)
    a.connection.ping(0.0)
    a.queue((key(0), SMALL))
    await a.take(encode(Ping(1)))
    assert [kinds(message) for message in await a.pipe.out()] == [["Close"]]
    assert a.pipe.finished


@ends
async def test_a_frame_that_cannot_be_sent_ends_its_connection_and_leaves_the_lock_free(
    a: End, b: End
) -> None:
    a.queue((MessageKey("job", 1, 0, 0, -1, Direction.FORWARD), SMALL))
    await settle()
    assert a.pipe.closed
    assert "here" in a.connection.reason
    free = threading.Thread(target=lambda: a.peer.forget(lambda _: True))
    free.start()
    free.join(HUNG_S)
    assert not free.is_alive()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_breaks_every_message_is_delivered_once_and_whole(seed: int) -> None:
    """Pipes break with what they carry, in both directions, and others take their place."""

    @ends
    async def delivered(a: End, b: End) -> None:
        rng = Random(seed)
        sent: dict[Direction, dict[int, bytes]] = {Direction.FORWARD: {}, Direction.BACKWARD: {}}
        for end, direction in ((a, Direction.FORWARD), (b, Direction.BACKWARD)):
            for micro in range(12):
                sent[direction][micro] = rng.randbytes(rng.randrange(200_000))
                end.queue((key(micro, direction), sent[direction][micro]))
        pairs = [(a.connection, a.pipe, b.connection, b.pipe)]
        for _ in range(2000):
            if not len(a.peer.outbox) and not len(b.peer.outbox):
                break
            if len(pairs) < 3:
                pipes = HeldPipe(), HeldPipe()
                pairs.append((a.open(pipes[0]), pipes[0], b.open(pipes[1]), pipes[1]))
            await settle()
            ours, one, theirs, other = pair = rng.choice(pairs)
            if rng.random() < 0.05:
                ours.fail("cut")
                theirs.fail("cut")
                pairs.remove(pair)
                continue
            for source, target in ((one, other), (other, one)):
                if source.held:
                    target.came.put_nowait(source.held.pop())
                    source._written.set()
        for end, direction in ((b, Direction.FORWARD), (a, Direction.BACKWARD)):
            assert len(end.got) == 12
            assert {at.micro: payload for at, payload in end.got} == sent[direction]
        assert not len(a.peer.outbox)
        assert not len(b.peer.outbox)

    delivered()


@ends
async def test_a_lost_peer_takes_nothing_more(a: End, b: End) -> None:
    a.queue((key(0), SMALL))
    assert a.peer.lose("silent")
    assert not a.peer.lose("again")
    with pytest.raises(PeerLost, match="silent"):
        a.queue((key(1), SMALL))
    await a.take(encode(Data(0, key(0), 0, len(SMALL)), SMALL))
    assert a.got == []


# ---------------------------------------------------------------- who still lives


@ends
async def test_silence_counts_from_the_first_question_that_nothing_answered(a: End, b: End) -> None:
    a.peer.used_s = now_s = a.connection.heard_s + 100.0
    a.connection.watch(now_s, asleep=False)
    assert not a.connection.reason, "nothing was asked"
    a.connection.watch(now_s + 1.2, asleep=False)
    await b.take(*await a.pipe.out())
    await a.take(*await b.pipe.out())  # the answer, late as it is
    a.connection.heard_s = now_s + 1.2
    a.connection.watch(now_s + 1.8, asleep=False)
    a.connection.watch(now_s + 2.9, asleep=False)
    assert not a.connection.reason
    a.connection.watch(now_s + 3.2, asleep=False)
    assert a.connection.reason.startswith("silent for ")
    await settle()
    assert a.connection.reason.startswith("silent for 2.0 s")
    assert a.peer.down_reason.startswith("silent for ")


@ends
async def test_who_was_asleep_asks_before_it_judges(a: End, b: End) -> None:
    a.peer.used_s = now_s = a.connection.heard_s + 1.0
    a.connection.watch(now_s, asleep=False)
    a.connection.watch(now_s + 60.0, asleep=True)
    assert not a.connection.reason


def pings(connection: Connection, seconds: float) -> int:
    """How often it asks in a while in which nothing is heard, sent or answered."""
    before, begun_s = connection._pinged_s, connection.heard_s
    asked = 0
    for tick in range(int(seconds * 10)):
        connection.heard_s = begun_s + tick / 10 - TUNED.spare_ping_s
        connection.asked_s = None
        connection.watch(begun_s + tick / 10, asleep=False)
        asked += connection._pinged_s != before
        before = connection._pinged_s
    return asked


@ends
async def test_a_spare_connection_is_hardly_pinged_and_not_judged_by_its_silence(a: End, b: End) -> None:
    spare = a.open(HeldPipe())
    await settle()
    a.peer.used_s = a.connection.heard_s + 60.0
    assert pings(a.connection, 60.0) == pytest.approx(60.0 / CONFIG.ping_s, abs=2)
    assert pings(spare, 60.0) == pytest.approx(60.0 / TUNED.spare_ping_s, abs=1)
    spare.asked_s = spare.heard_s + 1.0
    spare.watch(spare.heard_s + 60.0, asleep=False)
    assert not spare.reason
    spare.in_flight = 1  # it carries something: now it counts
    spare.asked_s = spare.heard_s + 1.0
    spare.watch(spare.heard_s + 60.0, asleep=False)
    assert spare.reason.startswith("silent for ")


@ends
async def test_a_peer_that_nothing_was_sent_to_for_long_is_hardly_pinged_until_it_is_used(
    a: End, b: End
) -> None:
    a.peer.used_s = a.connection.heard_s - CONFIG.idle_s - 1.0
    assert pings(a.connection, 60.0) <= 60.0 / TUNED.spare_ping_s + 1
    a.peer.note_sent(a.connection.heard_s + 60.0, key(0), 0)
    assert pings(a.connection, 10.0) >= 10.0 / CONFIG.ping_s - 1


@ends
async def test_questions_and_answers_that_do_not_leave_are_bounded(a: End, b: End) -> None:
    a.queue((key(0), SMALL))
    await settle()
    for number in range(200):
        a.connection.ping(float(number))
        await a.take(encode(Ping(number)))
    assert len(a.connection._pings) <= MAX_PINGS
    answers = [frame for message in await a.pipe.out() for frame in frames(message)]
    assert sum(isinstance(frame, Pong) for frame in answers) <= MAX_PONGS
