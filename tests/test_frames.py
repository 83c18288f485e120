"""Frames, windows and the two message boxes: nothing a peer sends may break them."""

from __future__ import annotations

import struct
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame
from worker.frames import (
    ECHO_BYTES,
    MAX_AGE_US,
    MAX_CHUNK_BYTES,
    MAX_CONFIRMED,
    MAX_FRAME_BYTES,
    MAX_MARKS,
    MAX_SPAN,
    MIN_CHUNK_BYTES,
    Ack,
    Close,
    Data,
    Direction,
    Flag,
    Frame,
    Hello,
    MessageKey,
    Ping,
    Pong,
    Probe,
    decode,
    encode,
)
from worker.inbox import Inbox
from worker.outbox import Outbox
from worker.peer import Peer, TransportConfig
from worker.window import Window

KEY = MessageKey("job-1", 3, 12, 4, 77, Direction.BACKWARD)
u64 = st.integers(0, 2**64 - 1)
marks = st.lists(st.tuples(u64, st.integers(0, MAX_AGE_US)), min_size=1, max_size=MAX_MARKS).map(
    lambda found: tuple(sorted(dict(found).items()))
)
u32 = st.integers(0, 2**32 - 1)
names = st.text(st.characters(codec="ascii"), max_size=40)
keys = st.builds(
    MessageKey,
    job=names,
    plan_version=u32,
    step=u64,
    micro=u32,
    edge=u32,
    direction=st.sampled_from(Direction),
)


@st.composite
def data_frames(draw: st.DrawFn) -> tuple[Data, bytes]:
    payload = draw(st.binary(max_size=100))
    offset = draw(st.integers(0, 2**40)) if payload else 0
    number = draw(st.integers(0, 2**60))
    oldest = max(0, number - draw(st.integers(0, MAX_SPAN)))
    meta = b"" if offset else draw(st.binary(max_size=50))
    flags = draw(st.integers(0, 3))
    return Data(number, draw(keys), offset, offset + len(payload), meta, flags, oldest), payload


other_frames: st.SearchStrategy[tuple[Frame, bytes]] = st.one_of(
    st.builds(Ack, marks, u64, st.lists(u64, max_size=MAX_CONFIRMED).map(tuple)),
    st.builds(Ping, u64),
    st.builds(Pong, u64),
    st.builds(Close, st.booleans(), names.filter(str.isprintable)),
    st.builds(Hello, st.integers(0, 65535), u64, names, names, names, st.integers(0, 7), st.just(8)),
).map(lambda frame: (frame, b""))
frames = st.one_of(
    data_frames(), other_frames, st.builds(Probe, st.integers(0, 3)).map(lambda f: (f, b"x" * 9))
)


@settings(max_examples=300, deadline=None)
@given(frames)
def test_every_frame_survives_the_wire(framed: tuple[Frame, bytes]) -> None:
    frame, payload = framed
    back, carried = decode(encode(frame, payload))
    assert back == frame
    assert bytes(carried) == payload


@settings(max_examples=500, deadline=None)
@given(frames, st.data())
def test_no_mutation_of_a_head_goes_unnoticed_and_none_raises_anything_else(
    framed: tuple[Frame, bytes], data: st.DataObject
) -> None:
    frame, payload = framed
    wire = bytearray(encode(frame, payload))
    head = len(wire) - len(payload)
    at = data.draw(st.integers(0, head - 1))
    wire[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadFrame):
        decode(bytes(wire))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda b: b"AT\x01\x02" + b)))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(noise)


@settings(max_examples=200, deadline=None)
@given(frames, st.data())
def test_a_truncated_frame_is_refused(framed: tuple[Frame, bytes], data: st.DataObject) -> None:
    wire = encode(*framed)
    head = len(wire) - len(framed[1])
    with pytest.raises(BadFrame):
        decode(wire[: data.draw(st.integers(0, head - 1))])


def test_a_damaged_payload_is_noticed_where_the_link_has_no_tls() -> None:
    wire = bytearray(encode(Data(0, KEY, 0, 8, flags=Flag.CHECKSUM), b"12345678"))
    wire[-1] ^= 1
    with pytest.raises(BadFrame, match="checksum"):
        decode(bytes(wire))


@pytest.mark.parametrize(
    ("frame", "payload", "words"),
    [
        (Data(0, KEY, 0, 10), b"12345678901", "ends at byte 11 of a message of 10"),
        (Data(0, KEY, 8, 10, meta=b"x"), b"12", "header of 1 bytes at offset 8"),
        (Data(0, KEY, 0, MIN_CHUNK_BYTES), b"x" * (MIN_CHUNK_BYTES - 1), "inside a message"),
        (Data(0, KEY, 4, 4), b"", "empty chunk"),
        (Data(MAX_SPAN + 1, KEY, 0, 0, oldest=0), b"", "ahead"),
        (Ping(1), b"stray", "5 stray bytes"),
    ],
)
def test_a_well_formed_frame_that_breaks_a_bound_is_refused(frame: Frame, payload: bytes, words: str) -> None:
    with pytest.raises(BadFrame, match=words):
        decode(encode(frame, payload))


def test_a_frame_of_another_version_or_type_or_size_is_refused_with_numbers() -> None:
    wire = bytearray(encode(Ping(1)))
    for at, value, words in ((2, 9, "version 9"), (3, 200, "type 200"), (0, 0, "magic")):
        changed = wire[:]
        changed[at] = value
        with pytest.raises(BadFrame, match=words):
            decode(bytes(changed))
    with pytest.raises(BadFrame, match="at most"):
        decode(bytes(MAX_FRAME_BYTES + 1))


def test_our_own_oversized_frames_are_our_own_mistake() -> None:
    for frame, payload in (
        (Probe(), bytes(MAX_CHUNK_BYTES + 1)),
        (Data(0, KEY, 0, 1, meta=bytes(1 << 20)), b"x"),
        (Ack(((0, 0),), 0, tuple(range(MAX_CONFIRMED + 1))), b""),
        (Ack(tuple((n, 0) for n in range(MAX_MARKS + 1)), 0), b""),
        (Hello(1, 2, "x" * 65, "y"), b""),
    ):
        with pytest.raises(ValueError, match="at most"):
            encode(frame, payload)


def test_an_echo_is_64_bytes() -> None:
    assert len(encode(Ping(1))) == len(encode(Pong(1))) == ECHO_BYTES


def test_a_reason_from_a_peer_is_printable_and_bounded() -> None:
    frame, _ = decode(encode(Close(True, "bye\x1b[2J\n" + "ä" * 1000)))
    assert isinstance(frame, Close)
    assert frame.reason.startswith("bye?[2J?")
    assert len(frame.reason) < 600


# ---------------------------------------------------------------- outbox and inbox


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

    def expect(_: str, k: MessageKey, total: int) -> memoryview:
        return memoryview(buffers.setdefault(k, bytearray(total)))

    inbox = Inbox("w-a", expect, 1 << 20, 64)
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
        frame = Data(m.number, m.key, chunk.offset, len(m.payload), b"", 0, min(outbox.oldest, m.number))
        incoming = inbox.admit(frame, chunk.length)
        if incoming is not None:
            assert incoming.buffer is not None
            incoming.buffer[chunk.offset : chunk.offset + chunk.length] = m.payload[
                chunk.offset : chunk.offset + chunk.length
            ]
            if inbox.arrived(incoming, chunk.length):
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


def accept(_: str, __: MessageKey, total: int) -> memoryview:
    return memoryview(bytearray(total))


def test_a_replayed_message_is_counted_and_not_assembled_again() -> None:
    inbox = Inbox("w-a", accept, 1000, 4)
    frame = Data(0, KEY, 0, 10)
    incoming = inbox.admit(frame, 10)
    assert incoming is not None
    assert inbox.arrived(incoming, 10)
    assert inbox.admit(frame, 10) is None
    assert inbox.admit(Data(5, KEY, 0, 1, oldest=5), 1) is not None
    assert inbox.admit(Data(3, KEY, 0, 1, oldest=3), 1) is None
    assert inbox.refused == {"duplicate": 2}


def test_contradictions_between_chunks_are_refused() -> None:
    for first, length, second, second_length in (
        (Data(0, KEY, 0, 9000), 5000, Data(0, KEY, 0, 9001), 5000),
        (Data(0, KEY, 0, 9000), 5000, Data(0, key(Direction.FORWARD), 5000, 9000), 4000),
        (Data(0, KEY, 0, 9000), 5000, Data(0, KEY, 0, 9000), 6000),
        (Data(0, KEY, 0, 9000), 5000, Data(0, KEY, 4000, 9000), 5000),
        (Data(0, KEY, 4000, 9000), 5000, Data(0, KEY, 0, 9000), 5000),
    ):
        inbox = Inbox("w-a", accept, 10_000, 4)
        assert inbox.admit(first, length) is not None
        with pytest.raises(BadFrame):
            inbox.admit(second, second_length)


def test_oversized_and_too_many_messages_are_refused_before_any_memory_is_taken() -> None:
    taken: list[int] = []

    def expect(_: str, __: MessageKey, total: int) -> memoryview:
        taken.append(total)
        return memoryview(bytearray(total))

    inbox = Inbox("w-a", expect, 1000, 2)
    with pytest.raises(BadFrame, match="1001 bytes declared; at most 1000"):
        inbox.admit(Data(0, KEY, 0, 1001), 10)
    for number in (1, 2):
        inbox.admit(Data(number, KEY, 500, 1000), 500)
    with pytest.raises(BadFrame, match="more than 2 messages"):
        inbox.admit(Data(3, KEY, 0, 1000), 500)
    assert taken == [1000, 1000]


def test_an_unwanted_message_is_counted_and_confirmed_so_that_its_sender_stops() -> None:
    inbox = Inbox("w-a", lambda *_: None, 10_000, 4)
    incoming = inbox.admit(Data(0, KEY, 0, 9000), 5000)
    assert incoming is not None
    assert incoming.buffer is None
    assert not inbox.arrived(incoming, 5000)
    rest = inbox.admit(Data(0, KEY, 5000, 9000), 4000)
    assert rest is not None
    assert inbox.arrived(rest, 4000)
    assert inbox.refused == {"unexpected": 1}


def test_the_receiver_forgets_what_the_sender_forgot() -> None:
    inbox = Inbox("w-a", accept, 10_000, 4)
    for number in range(3):
        inbox.admit(Data(number, KEY, 0, 9000), 5000)
    inbox.admit(Data(9, KEY, 0, 9000, oldest=9), 5000)
    assert len(inbox) == 1


# ---------------------------------------------------------------- window


def drive(window: Window, rate: float, rtt_s: float, seconds: float) -> tuple[float, int]:
    """A link of ``rate`` bytes/s and ``rtt_s``: returns its used share and the largest queue."""
    now_s, free_s, delivered, worst = 0.0, 0.0, 0, 0
    acks: list[tuple[float, int]] = []
    while now_s < seconds:
        while window.open:
            size = window.chunk
            window.sent(now_s, size, last=False)
            free_s = max(now_s, free_s) + size / rate
            acks.append((free_s + rtt_s, window.sent_bytes))
        worst = max(worst, int((free_s - now_s) * rate))
        now_s, delivered = acks.pop(0)
        window.acked(now_s, delivered)
    return delivered / (rate * now_s), worst


@pytest.mark.parametrize(("mbit", "rtt_s"), [(8, 0.08), (100, 0.08), (1000, 0.01), (100, 0.001), (20, 0.2)])
def test_the_window_fills_a_link_and_keeps_its_queue_short(mbit: int, rtt_s: float) -> None:
    share, worst = drive(Window(), mbit * 125_000, rtt_s, 20.0)
    assert share > 0.97
    # What a gradient waits at most behind what is already under way.
    assert worst / (mbit * 125_000) < max(0.3, rtt_s)


def test_a_chunk_lasts_a_few_hundredths_of_a_second_on_the_link_whatever_its_rate() -> None:
    for mbit, least, most in (
        (8, 16 << 10, 32 << 10),
        (100, 64 << 10, 512 << 10),
        (10_000, 1 << 20, 1 << 20),
    ):
        window = Window()
        drive(window, mbit * 125_000, 0.02, 5.0)
        assert least <= window.chunk <= most


def test_connections_to_one_peer_cut_chunks_for_the_line_that_they_share() -> None:
    for mbit, least, most in (
        (1, 16 << 10, 16 << 10),
        (8, 28 << 10, 32 << 10),
        (20, 60 << 10, 64 << 10),
        (100, 36 << 10, 52 << 10),
    ):
        line, eighth = Window(), Window()
        drive(line, mbit * 125_000, 0.08, 5.0)
        drive(eighth, mbit * 125_000 / 8, 0.08, 5.0)
        eighth.fit(line, 8)
        assert least <= eighth.chunk <= most
        assert eighth.size >= 4 * eighth.chunk


def test_one_of_many_connections_does_not_take_the_whole_line() -> None:
    line, first = Window(), Window()
    for window in (line, first):  # nothing has gone over another one yet
        drive(window, 100 * 125_000, 0.08, 5.0)
    for connections, share in ((2, 1.0), (4, 0.5), (8, 0.25)):
        first.fit(line, connections)
        assert first.size == pytest.approx(share * line.size, rel=0.01)
    first.fit(Window(), 8)
    assert first.size == 256 << 10
    first.fit(line, 1)
    assert first.size == line.size


def test_a_window_that_is_full_of_what_nobody_will_answer_asks_for_an_answer() -> None:
    """Four connections, each with a chunk too small for its own window to ask, and all together exactly the
    least window of a slow line: nothing would ever move again."""
    peer = Peer("w-b", 1, TransportConfig(), lambda *_: None, lambda *_: None)
    drive(peer._window, 200_000, 0.08, 5.0)
    assert peer._window.size_at(0.08) == 64 << 10
    pressed: list[int] = []
    peer._in_flight = 64 << 10
    lanes: list[Any] = [
        SimpleNamespace(window=SimpleNamespace(unasked_bytes=16 << 10), press=lambda: pressed.append(1))
        for _ in range(4)
    ]
    peer.lanes = lanes
    peer.relieve()
    assert len(pressed) == 4
    lanes[0].window.unasked_bytes = 0  # its answer will come
    peer.relieve()
    assert len(pressed) == 4


def test_the_connection_that_is_left_of_many_has_the_whole_line() -> None:
    peer = Peer("w-b", 1, TransportConfig(), lambda *_: None, lambda *_: None)
    lane: Any = SimpleNamespace(window=Window())
    drive(lane.window, 100 * 125_000, 0.08, 5.0)
    alone = lane.window.size
    peer.lanes = [lane] * 8
    peer.fit(lane)
    assert lane.window.size < alone
    peer.lanes = [lane]
    peer.fit(lane)
    assert lane.window.size == alone


def burst(window: Window, at_s: float, took_s: float, nbytes: int = 128 << 10) -> list[int]:
    """A message and its acknowledgements; the chunks that it was cut into."""
    chunks: list[int] = []
    while sum(chunks) < nbytes:
        chunks.append(min(window.chunk, nbytes - sum(chunks)))
        window.sent(at_s, chunks[-1], last=sum(chunks) == nbytes)
    for size in chunks:
        window.acked(at_s + took_s, window.acked_bytes + size)
    return chunks


def test_an_end_that_reads_late_for_a_while_makes_no_smaller_chunks() -> None:
    window = Window()
    burst(window, 0.0, 0.008)
    for at in range(1, 16):  # out of processor time: 0.4 s each, one a second
        assert len(burst(window, float(at), 0.4)) <= 2
    for at in range(16, 40):
        chunks = burst(window, float(at), 0.4)
    assert len(chunks) > 4, "a line that was never quicker is slow"


@pytest.mark.parametrize(
    ("rate", "chunk"), [(250_000, 16 << 10), (1_250_000, 36 << 10), (4_000_000, 124 << 10)]
)
def test_a_slow_line_over_a_short_way_gets_chunks_of_32_ms_and_a_window_of_two(rate: int, chunk: int) -> None:
    window = Window()
    drive(window, rate, 0.003, 5.0)
    window.note_rtt(5.0, 0.003)  # of an echo
    assert window.chunk == chunk
    assert window.size == pytest.approx(max(64 << 10, 0.064 * rate), rel=0.1)


def test_a_stall_after_messages_of_one_chunk_leaves_a_rate() -> None:
    window = Window()
    for at in range(20):
        window.sent(float(at), 4096, last=True)
        window.acked(at + 0.06, window.sent_bytes)
    assert window.rate == pytest.approx(4096 / 0.06)
    window.sent(20.0, 4096, last=True)
    window.acked(22.0, window.sent_bytes)
    assert window.rate == pytest.approx(4096 / 2.0)


def test_bursts_are_told_by_all_their_time_and_only_what_arrived() -> None:
    window = Window()
    burst(window, 0.0, 0.1)
    window.sent(1.0, 64 << 10, last=False)
    window.sent(1.0, 64 << 10, last=True)
    window.acked(1.1, window.acked_bytes + (64 << 10))
    window.acked(1.1, window.sent_bytes)  # in a heap
    assert max(window._bursts) == pytest.approx((128 << 10) / 0.1)
    window.sent(9.0, 1 << 20, last=True)
    window.broke()
    window.acked(9.01, window.sent_bytes)  # given up, not carried
    assert max(window._bursts) == pytest.approx((128 << 10) / 0.1)


def test_a_line_that_never_rests_is_what_it_was_in_the_last_second() -> None:
    window = Window()
    drive(window, 50 * 125_000, 0.02, 5.0)
    fast = window.rate
    assert fast is not None
    for at in range(40):  # now 5 Mbit/s, always with something under way
        window.sent(5.0 + 0.1 * at, 62_500, last=False)
        window.acked(5.1 + 0.1 * at, window.sent_bytes - 20_000)
    assert window.rate is not None
    assert window.rate < fast / 5


def test_a_forged_or_old_acknowledgement_moves_nothing_back() -> None:
    window = Window()
    window.sent(0.0, 1000, last=True)
    assert window.acked(0.1, 1000) == 1000
    assert window.acked(0.2, 500) == 0
    assert window.in_flight == 0


def test_the_last_chunk_always_asks_for_an_acknowledgement() -> None:
    window = Window()
    assert window.sent(0.0, 10, last=True) == Flag.ACK_SOON
    assert not window.unasked
    assert not window.sent(0.0, 10, last=False)
    assert window.unasked


def test_the_sender_asks_at_once_when_its_window_is_half_full_or_a_quarter_is_unacknowledged() -> None:
    window = Window()
    quarter = window.size // 4
    assert window.sent(0.0, quarter - 1, last=False) == 0
    assert window.sent(0.0, 1, last=False) == Flag.ACK_NOW
    assert not window.unpressed
    assert window.sent(0.0, quarter - 1, last=True) == Flag.ACK_SOON
    assert window.unpressed
    assert window.sent(0.0, 1, last=True) == Flag.ACK_NOW
    assert not window.unpressed


def test_a_rest_between_two_messages_does_not_read_as_a_slow_line() -> None:
    window, now_s = Window(), 0.0
    for _ in range(50):  # a message each half second over 10 MB/s, acknowledged just before the next
        for last in (False, False, True):
            window.sent(now_s, 50_000, last=last)
        window.acked(now_s + 0.015, window.sent_bytes)
        now_s += 0.5
    rate = window.rate
    window.sent(now_s, 50_000, last=True)
    for _ in range(8):  # the acknowledgement still waits when the next message leaves
        now_s += 0.5
        window.sent(now_s, 50_000, last=False)
        window.acked(now_s - 0.495, window.sent_bytes - 50_000)
        window.sent(now_s, 50_000, last=True)
        window.acked(now_s + 0.005, window.sent_bytes - 50_000)
    assert rate is not None
    assert window.rate is not None
    assert window.rate > 0.9 * rate


def test_the_prefix_is_ten_bytes() -> None:
    assert len(encode(Close(False, ""))) == struct.calcsize("!2sBBHI") + 1
