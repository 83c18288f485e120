"""Small frames that wait for one peer leave as one message, in their order and within bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame
from worker.transport.bundle import MAX_BUNDLE_BYTES, MAX_FRAMES, join, room_for, split
from worker.transport.connection import Connection
from worker.transport.contract import TransportConfig
from worker.transport.frames import (
    MAX_CONFIRMED,
    MAX_FRAME_BYTES,
    MAX_MARKS,
    Ack,
    Close,
    Data,
    Direction,
    Frame,
    Hello,
    MessageKey,
    Ping,
    Pong,
    Probe,
    decode,
    encode,
)
from worker.transport.line_time import LineTime
from worker.transport.peer import Peer

SMALL = b"x" * 300


def key(micro: int, direction: Direction = Direction.FORWARD) -> MessageKey:
    return MessageKey("job", 1, 0, micro, 7, direction)


# ---------------------------------------------------------------- the format


FRAMES = st.one_of(
    st.builds(Ping, st.integers(0, 2**32)),
    st.builds(Pong, st.integers(0, 2**32)),
    st.builds(Probe, st.just(0)),
    st.builds(Ack, st.just(((5, 7), (2**40, 0))), st.integers(0, 2**40), st.just((1, 2, 3))),
    st.builds(Close, st.booleans(), st.text(max_size=20)),
)


@given(st.lists(FRAMES, min_size=1, max_size=MAX_FRAMES))
@settings(derandomize=True, deadline=None)
def test_frames_come_out_as_they_went_in(frames: list[Frame]) -> None:
    encoded = [encode(frame) for frame in frames]
    assert [bytes(part) for part in split(join(encoded))] == encoded
    assert all(room_for(frame, b"") >= len(data) for frame, data in zip(frames, encoded, strict=True))


def test_room_is_counted_for_the_largest_of_each_kind() -> None:
    longest = "n" * 64
    data = Data(
        2**63, MessageKey(longest, 2**32 - 1, 2**63, 1, 1, Direction.FORWARD), 0, 9, b"h" * 40, 2, 2**63
    )
    for frame, payload in (
        (data, b"payload!!"),
        (Ack(tuple((n, 9) for n in range(MAX_MARKS)), 2**63, tuple(range(MAX_CONFIRMED))), b""),
        (Close(True, "r" * 5000), b""),
        (Hello(1, 2**63, longest, longest, longest), b""),
    ):
        assert room_for(frame, payload) >= len(encode(frame, payload))


def test_a_single_frame_is_no_bundle() -> None:
    one = encode(Ping(3))
    assert join([one]) is one
    assert split(one) == (one,)


def test_more_or_larger_than_the_bounds_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="65 frames"):
        join([encode(Ping(3))] * (MAX_FRAMES + 1))
    with pytest.raises(ValueError, match="bundle of 3"):
        join([b"x" * MAX_BUNDLE_BYTES, b"x", b"y"])
    with pytest.raises(ValueError, match="bundle of 2"):
        join([b"x", b"x" * (MAX_FRAME_BYTES + 1)])


def test_a_bundle_in_a_bundle_is_refused() -> None:
    inner = join([encode(Ping(1)), encode(Ping(2))])
    for part in split(join([inner, inner])):
        with pytest.raises(BadFrame, match="type"):
            decode(part)


def test_damaged_bundles_are_refused_or_their_frames_are() -> None:
    source = random.Random(4711)
    whole = join([encode(Data(n, key(n), 0, len(SMALL), b"head"), SMALL) for n in range(5)])
    refused = 0
    for _ in range(10_000):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        if source.random() < 0.3:
            del damaged[source.randrange(len(damaged)) :]
        try:
            for part in split(damaged):
                decode(part)
        except BadFrame:
            refused += 1
    assert refused > 2000  # payloads are not summed here, all else is


# ---------------------------------------------------------------- two ends without a network


class HeldWire:
    """A wire on which a message is written when the test says so."""

    def __init__(self) -> None:
        self.held: list[tuple[bytes, Callable[[], None]]] = []

    def open(self) -> None:
        pass

    def send(self, message: bytes, sent: Callable[[], None]) -> bool:
        assert not self.held, "one at a time"
        self.held.append((message, sent))
        return True

    def end(self) -> None:
        pass

    def out(self) -> Iterator[bytes]:
        """Everything that leaves now, one after the other."""
        while self.held:
            message, sent = self.held.pop()
            sent()
            yield message


class End:
    """One side of a stream: a peer and its only connection, whose HELLO is being written."""

    def __init__(self, name: str, other: str) -> None:
        self.got: list[tuple[MessageKey, bytes]] = []
        self.peer = Peer(other, 1, TransportConfig(), self.expect, self.deliver)
        self.hello = Hello(1, 1, name, other)
        self.wire = HeldWire()
        self.connection = Connection(self.hello, dialled=True, checksum=False, on_end=lambda _: None)
        self.connection.begin(self.wire)

    def expect(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        return memoryview(bytearray(total))

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        self.got.append((key, bytes(payload)))

    def queue(self, *messages: tuple[MessageKey, bytes]) -> None:
        for at, payload in messages:
            self.peer.submit(at, b"header", memoryview(payload), 0)

    def out(self) -> Iterator[bytes]:
        """Everything that leaves now but the HELLO."""
        for message in self.wire.out():
            if kinds(message) != ["Hello"]:
                yield message


def ends() -> tuple[End, End]:
    a, b = End("a", "b"), End("b", "a")
    a.connection.open(b.hello, a.peer, lambda wire: wire)
    b.connection.open(a.hello, b.peer, lambda wire: wire)
    return a, b


def kinds(message: bytes) -> list[str]:
    return [type(decode(part)[0]).__name__ for part in split(message)]


def acknowledges_all(b: End, a: End) -> None:
    """``b`` has one message for ``a``, which then waits for nothing more."""
    (answer,) = b.out()
    assert kinds(answer) == ["Ack"]
    a.connection.receive(answer)
    assert a.peer.idle


def test_sixteen_small_messages_leave_as_one_and_are_acknowledged_as_one() -> None:
    a, b = ends()
    a.queue(*((key(micro), SMALL) for micro in range(16)))
    (message,) = a.out()
    assert kinds(message) == ["Data"] * 16
    b.connection.receive(message)
    assert b.got == [(key(micro), SMALL) for micro in range(16)]
    b.peer.settle_receipts(b.connection.heard_s + 1)
    acknowledges_all(b, a)


def test_a_message_that_more_follow_does_not_leave_before_the_last() -> None:
    a, _ = ends()
    assert list(a.out()) == []
    for micro, more in ((0, True), (1, True), (2, False)):
        assert not a.wire.held
        a.peer.submit(key(micro), b"header", memoryview(SMALL), 0, more)
    (message,) = a.out()
    assert kinds(message) == ["Data"] * 3


def test_a_message_leaves_in_the_thread_that_has_it_and_others_gather_while_it_is_written() -> None:
    a, _ = ends()
    assert list(a.out()) == []
    a.queue((key(0), SMALL))
    ((message, _),) = a.wire.held
    assert kinds(message) == ["Data"]
    a.queue((key(1), SMALL), (key(2), SMALL))
    assert [kinds(message) for message in a.out()] == [["Data"], ["Data"] * 2]


def test_a_full_queue_lets_out_what_waited_for_company() -> None:
    a, _ = ends()
    assert list(a.out()) == []
    for micro in range(1024):
        a.peer.submit(key(micro), b"", memoryview(b""), 0, more=True)
    assert not a.wire.held
    with pytest.raises(TimeoutError):
        a.peer.submit(key(1024), b"", memoryview(b""), 0, more=True)
    assert a.wire.held


def test_what_nobody_waits_for_is_acknowledged_with_the_data_that_goes_back() -> None:
    a, b = ends()
    a.queue((key(0), SMALL))
    (message,) = a.out()
    b.connection.receive(message)
    assert list(b.out()) == []
    assert not a.peer.idle
    b.queue((key(0, Direction.BACKWARD), bytes(200_000)))
    first, *rest = b.out()
    assert kinds(first) == ["Ack", "Data"]
    assert {kind for message in rest for kind in kinds(message)} <= {"Data"}
    a.connection.receive(first)
    assert a.peer.idle


def test_what_finds_no_company_is_acknowledged_by_itself_after_a_while() -> None:
    a, b = ends()
    a.queue((key(0), SMALL))
    (message,) = a.out()
    b.connection.receive(message)
    b.peer.settle_receipts(b.connection.heard_s + 0.01)
    assert list(b.out()) == []
    b.peer.settle_receipts(b.connection.heard_s + 0.06)
    acknowledges_all(b, a)


def test_who_waits_for_an_acknowledgement_asks_for_it() -> None:
    a, b = ends()
    a.queue((key(0), SMALL))
    (message,) = a.out()
    b.connection.receive(message)
    a.peer.press()
    a.peer.press()
    (question,) = a.out()
    assert kinds(question) == ["Probe"]
    b.connection.receive(question)
    acknowledges_all(b, a)


def test_a_message_delivered_on_a_connection_that_broke_is_confirmed_on_another() -> None:
    a, b = ends()
    wire = HeldWire()
    other = Connection(b.hello, dialled=True, checksum=False, on_end=lambda _: None)
    other.begin(wire)
    other.open(a.hello, b.peer, lambda wire: wire)
    a.queue((key(0), SMALL))
    (message,) = a.out()
    b.connection.receive(message)
    b.connection.fail("cable pulled")
    b.peer.settle_receipts(b.connection.heard_s)
    _, answer = wire.out()
    ack = decode(answer)[0]
    assert isinstance(ack, Ack)
    assert ack.confirmed == (0,)


def test_the_line_is_timed_as_if_each_arrival_had_been_told_at_once() -> None:
    told, waited = LineTime(), LineTime()
    for line in (told, waited):
        line.sent(1.0, 1000)
    told.settled(1.3, 1000, 0.1)
    for line in (told, waited):
        line.sent(5.0, 1000)
    waited.settled(1.3, 1000, 0.1)
    for line in (told, waited):
        line.settled(5.3, 1000, 0.1)
    assert told.take() == waited.take() == pytest.approx(0.4)


def test_backward_leaves_before_forward_within_a_bundle() -> None:
    a, b = ends()
    a.queue((key(0), SMALL), (key(1), SMALL), (key(0, Direction.BACKWARD), SMALL))
    (message,) = a.out()
    b.connection.receive(message)
    assert [at.direction for at, _ in b.got] == [Direction.BACKWARD, Direction.FORWARD, Direction.FORWARD]


def test_a_large_chunk_travels_alone_and_small_ones_behind_it_wait_their_turn() -> None:
    a, _ = ends()
    large = bytes(200_000)
    a.queue((key(0), SMALL), (key(1), large), (key(2), SMALL))
    messages = [split(message) for message in a.out()]
    numbers = [[decode(part)[0].number for part in parts] for parts in messages]  # type: ignore[union-attr]
    assert numbers[0] == [0]
    assert all(len(parts) == 1 for parts in messages[:-1])
    assert sorted({n for each in numbers for n in each}) == [0, 1, 2] or numbers[-1][0] == 1
    assert [n for each in numbers for n in each] == sorted(n for each in numbers for n in each)


def test_a_bundle_is_no_longer_than_a_chunk_of_the_line_nor_its_bound() -> None:
    a, _ = ends()
    a.queue(*((key(micro), b"y" * 4000) for micro in range(60)))
    messages = list(a.out())
    most = min(a.connection.window.chunk, MAX_BUNDLE_BYTES)
    assert len(messages) < 60
    assert all(len(message) <= most + 300 for message in messages)


def test_an_acknowledgement_and_an_echo_share_a_message_with_data() -> None:
    a, b = ends()
    a.queue((key(0), SMALL))
    b.queue((key(0, Direction.BACKWARD), SMALL))
    a.connection.ping(0.0)
    (message,) = a.out()
    assert kinds(message) == ["Ping", "Data"]
    b.connection.receive(message)
    (answer,) = b.out()
    assert kinds(answer) == ["Pong", "Ack", "Data"]


def test_frames_after_a_close_are_not_looked_at() -> None:
    a, b = ends()
    bundle = join([encode(Close(True, "leaving")), encode(Data(0, key(0), 0, len(SMALL)), SMALL)])
    b.connection.receive(bundle)
    assert b.got == []
    assert a.got == []


def test_a_bad_frame_in_a_bundle_is_refused_and_what_came_before_it_counts() -> None:
    _, b = ends()
    good = encode(Data(0, key(0), 0, len(SMALL)), SMALL)
    with pytest.raises(BadFrame):
        b.connection.receive(join([good, b"nothing like a frame"]))
    assert len(b.got) == 1
    b.peer.settle_receipts(b.connection.heard_s + 1)
    (answer,) = b.out()
    assert kinds(answer) == ["Ack"]


def test_nothing_leaves_after_a_close() -> None:
    a, _ = ends()
    assert list(a.out()) == []
    a.connection.close("done", leaving=True)
    a.connection.ping(0.0)
    a.connection.receive(encode(Ping(1)))
    assert [kinds(message) for message in a.out()] == [["Close"]]
    a.connection.press(again=True)
    a.connection.ping(1.0)
    assert list(a.out()) == []


def test_a_frame_that_cannot_be_sent_ends_its_stream_and_leaves_the_lock_free() -> None:
    a, _ = ends()
    assert list(a.out()) == []
    a.peer.submit(MessageKey("job", 1, 0, 0, -1, Direction.FORWARD), b"", memoryview(SMALL), 0)
    assert a.connection.gone.is_set()
    assert not a.peer.lock._depth
