"""The boxes of messages out and in: whatever breaks, each arrives once and whole."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame
from worker.transport.frames import (
    Data,
    Direction,
    MessageKey,
)
from worker.transport.peers.inbox import Inbox
from worker.transport.peers.outbox import OVERDUE_SPAN, Outbox

KEY = MessageKey("job-1", 3, 12, 4, 77, Direction.BACKWARD)


def key(direction: Direction, micro: int = 0) -> MessageKey:
    return MessageKey("job-1", 1, 0, micro, 5, direction)


def test_a_gradient_overtakes_queued_activations_between_two_chunks() -> None:
    box = Outbox()
    box.add(key(Direction.EVALUATION), b"", memoryview(bytes(10_000)))
    box.add(key(Direction.FORWARD), b"", memoryview(bytes(100_000)))
    box.add(key(Direction.FORWARD, 1), b"", memoryview(bytes(10_000)))
    first = box.take(40_000)
    box.add(key(Direction.TIED_TOTAL), b"", memoryview(bytes(10_000)))
    box.add(key(Direction.BACKWARD), b"", memoryview(bytes(50_000)))
    order = [first]
    while (chunk := box.take(40_000)) is not None:
        order.append(chunk)
    assert [(c.message.key.direction.name[:4], c.message.key.micro, c.length) for c in order if c] == [
        ("FORW", 0, 40_000),
        ("BACK", 0, 40_000),
        ("BACK", 0, 10_000),
        ("TIED", 0, 10_000),
        ("FORW", 0, 40_000),
        ("FORW", 0, 20_000),
        ("FORW", 1, 10_000),
        ("EVAL", 0, 10_000),
    ]


def test_a_message_without_payload_is_one_chunk() -> None:
    box = Outbox()
    box.add(key(Direction.BACKWARD), b"zero", memoryview(b""))
    assert box.waiting
    chunk = box.take(1000)
    assert chunk is not None
    assert (chunk.offset, chunk.length) == (0, 0)
    assert box.take(1000) is None
    assert box.confirmed(0) is not None
    assert box.confirmed(0) is None
    assert len(box) == 0


def test_a_message_whose_confirmation_may_be_lost_sends_its_first_chunk_again() -> None:
    box = Outbox()
    box.add(key(Direction.FORWARD), b"", memoryview(bytes(30_000)))
    for _ in range(2):
        chunk = box.take(20_000)
        assert chunk is not None
        box.acknowledged(chunk)
    box.ask_again(20_000)
    again = box.take(99_999)
    assert again is not None
    assert (again.offset, again.length) == (0, 20_000)
    assert box.take(20_000) is None


def test_dropping_a_job_leaves_the_others() -> None:
    box = Outbox()
    box.add(key(Direction.FORWARD), b"", memoryview(bytes(10)))
    box.add(MessageKey("other", 1, 0, 0, 0, Direction.FORWARD), b"", memoryview(bytes(20)))
    assert box.drop(lambda k: k.job == "job-1") == 1
    assert (len(box), box.held, box.oldest, box.span) == (1, 20, 1, 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(Direction), st.integers(0, 200_000)), min_size=1, max_size=8),
    st.integers(0, 2**32),
)
def test_whatever_breaks_every_message_arrives_once_and_whole(
    messages: list[tuple[Direction, int]], seed: int
) -> None:
    """Chunks take random connections, some of which break with what they carried."""
    rng = Random(seed)
    outbox, buffers = Outbox(), dict[MessageKey, bytearray]()

    def expect(k: MessageKey, total: int) -> memoryview:
        return memoryview(buffers.setdefault(k, bytearray(total)))

    inbox = Inbox(expect, 1 << 20, 64)
    sent = {}
    for micro, (direction, size) in enumerate(messages):
        payload = rng.randbytes(size)
        sent[key(direction, micro)] = payload
        outbox.add(key(direction, micro), b"", memoryview(payload))
    done: list[int] = []
    for _ in range(10_000):
        if not len(outbox):
            break
        chunk = outbox.take(rng.choice([16 << 10, 64 << 10]))
        if chunk is None:
            outbox.ask_again(16 << 10)
            continue
        fate = rng.random()
        if fate < 0.2:  # lost on the way
            outbox.give_back([chunk])
            continue
        m = chunk.message
        frame = Data(m.number, m.key, chunk.offset, len(m.payload), b"", min(outbox.oldest, m.number))
        if inbox.take(frame, m.payload[chunk.offset : chunk.offset + chunk.length]) is not None:
            done.append(m.number)
        if fate < 0.4:  # arrived, but its acknowledgement was lost
            outbox.give_back([chunk])
            continue
        outbox.acknowledged(chunk)
        if inbox.is_done(m.number):
            outbox.confirmed(m.number)
    assert len(outbox) == 0
    assert sorted(done) == list(range(len(messages)))
    assert {k: bytes(b) for k, b in buffers.items()} == sent


def accept(_: MessageKey, total: int) -> memoryview:
    return memoryview(bytearray(total))


def test_a_replayed_message_is_counted_and_not_assembled_again() -> None:
    inbox = Inbox(accept, 1000, 4)
    frame = Data(0, KEY, 0, 10)
    incoming = inbox.take(frame, b"0123456789")
    assert incoming is not None
    assert incoming.buffer == b"0123456789"
    assert inbox.take(frame, b"9876543210") is None
    assert incoming.buffer == b"0123456789"
    assert inbox.take(Data(5, KEY, 0, 1, oldest=5), b"x") is not None
    assert inbox.take(Data(3, KEY, 0, 1, oldest=3), b"x") is None
    assert len(inbox) == 0


def test_contradictions_between_chunks_are_refused() -> None:
    for first, length, second, second_length in (
        (Data(0, KEY, 0, 9000), 5000, Data(0, KEY, 0, 9001), 5000),
        (Data(0, KEY, 0, 9000), 5000, Data(0, key(Direction.FORWARD), 5000, 9000), 4000),
        (Data(0, KEY, 0, 9000), 5000, Data(0, KEY, 0, 9000), 6000),
        (Data(0, KEY, 0, 9000), 5000, Data(0, KEY, 4000, 9000), 5000),
        (Data(0, KEY, 4000, 9000), 5000, Data(0, KEY, 0, 9000), 5000),
    ):
        inbox = Inbox(accept, 10_000, 4)
        assert inbox.take(first, bytes(length)) is None
        with pytest.raises(BadFrame):
            inbox.take(second, bytes(second_length))


def test_oversized_and_too_many_messages_are_refused_before_any_memory_is_taken() -> None:
    taken: list[int] = []

    def expect(_: MessageKey, total: int) -> memoryview:
        taken.append(total)
        return memoryview(bytearray(total))

    inbox = Inbox(expect, 1000, 2)
    with pytest.raises(BadFrame, match="1001 bytes declared; at most 1000"):
        inbox.take(Data(0, KEY, 0, 1001), bytes(10))
    for number in (1, 2):
        inbox.take(Data(number, KEY, 500, 1000), bytes(500))
    with pytest.raises(BadFrame, match="more than 2 messages"):
        inbox.take(Data(3, KEY, 0, 1000), bytes(500))
    assert taken == [1000, 1000]


def test_an_unwanted_message_is_counted_and_confirmed_so_that_its_sender_stops() -> None:
    inbox = Inbox(lambda *_: None, 10_000, 4)
    assert inbox.take(Data(0, KEY, 0, 9000), bytes(5000)) is None
    complete = inbox.take(Data(0, KEY, 5000, 9000), bytes(4000))
    assert complete is not None
    assert complete.buffer is None


def test_the_receiver_forgets_what_the_sender_forgot() -> None:
    inbox = Inbox(accept, 10_000, 4)
    for number in range(3):
        inbox.take(Data(number, KEY, 0, 9000), bytes(5000))
    inbox.take(Data(9, KEY, 0, 9000, oldest=9), bytes(5000))
    assert len(inbox) == 1


def background(box: Outbox, micro: int, size: int = 10_000) -> None:
    box.add_background(key(Direction.FORWARD, micro), b"", memoryview(bytes(size)))


def test_background_messages_leave_one_by_one_where_nothing_else_waits_and_they_are_let() -> None:
    box = Outbox()
    background(box, 1, 50_000)
    background(box, 2)
    assert not box.waiting
    assert box.idles_for_background
    assert box.take(40_000) is None
    begun = box.take(40_000, background=True)
    box.add(key(Direction.EVALUATION), b"", memoryview(bytes(10)))
    order = [begun, *(box.take(40_000, background=True) for _ in range(4))]
    assert [(c.message.key.micro, c.length) for c in order if c] == [
        (1, 40_000),
        (0, 10),
        (1, 10_000),
        (2, 10_000),
    ]
    assert (box.held, box.background_held, box.urgent) == (10, 60_000, 1)
    for chunk in order[:2]:
        assert chunk is not None
        box.confirmed(chunk.message.number)
    assert (box.held, box.background_held, box.urgent) == (0, 10_000, 0)


def test_a_background_message_keeps_no_number_while_it_waits_and_goes_first_when_many_have_passed_it() -> (
    None
):
    box = Outbox()
    background(box, 1, 50_000)
    for _ in range(2 * OVERDUE_SPAN):
        box.confirmed(box.add(key(Direction.FORWARD), b"", memoryview(b"")).number)
    assert box.span == 0
    assert box.take(40_000, background=True) is not None
    for _ in range(OVERDUE_SPAN - 1):
        assert not box._overdue
        box.add(key(Direction.BACKWARD), b"", memoryview(b"x"))
    overdue = box.take(40_000)
    assert overdue is not None
    assert (overdue.message.background, overdue.length) == (True, 10_000)
    urgent = box.take(40_000)
    assert urgent is not None
    assert not urgent.message.background


def test_background_messages_of_older_versions_stay_and_all_go_with_the_job() -> None:
    box = Outbox()
    background(box, 1)
    background(box, 2)
    box.take(40_000, background=True)
    assert box.drop(lambda _: True, background=False) == 0
    assert len(box) == 2
    assert box.drop(lambda _: True) == 2
    assert (len(box), box.background_held) == (0, 0)
