"""Frames: nothing a peer sends may break them."""

from __future__ import annotations

import zlib
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame
from protos.text_limits import plain
from worker.transport.frames import (
    MAX_CHUNK_BYTES,
    MAX_CONFIRMED,
    MAX_FRAMES,
    MAX_SPAN,
    MIN_CHUNK_BYTES,
    PREFIX,
    Ack,
    Close,
    Data,
    Direction,
    Frame,
    Hello,
    MessageKey,
    Ping,
    Pong,
    decode,
    decode_all,
    encode,
)

KEY = MessageKey("job-1", 3, 12, 4, 77, Direction.BACKWARD)
u64 = st.integers(0, 2**64 - 1)
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
    return Data(number, draw(keys), offset, offset + len(payload), meta, oldest), payload


other_frames: st.SearchStrategy[tuple[Frame, bytes]] = st.one_of(
    st.builds(Ack, u64, u64, st.lists(u64, max_size=MAX_CONFIRMED).map(tuple)),
    st.builds(Ping, u64),
    st.builds(Pong, u64),
    st.builds(Close, st.booleans(), names.filter(plain)),
    st.builds(Hello, st.integers(0, 65535), u64, names, names, names, st.integers(0, 255)),
).map(lambda frame: (frame, b""))
frames = st.one_of(data_frames(), other_frames)


@settings(max_examples=300, deadline=None)
@given(frames, st.booleans())
def test_every_frame_survives_the_wire(framed: tuple[Frame, bytes], summed: bool) -> None:
    frame, payload = framed
    back, carried = decode(encode(frame, payload, summed=summed))
    assert back == frame
    assert bytes(carried) == payload


@settings(max_examples=100, deadline=None)
@given(st.lists(frames, min_size=1, max_size=MAX_FRAMES))
def test_frames_of_one_message_come_out_as_they_went_in(sent: list[tuple[Frame, bytes]]) -> None:
    message = b"".join(encode(frame, payload) for frame, payload in sent)
    assert [(frame, bytes(payload)) for frame, payload in decode_all(message)] == sent


def test_what_stands_before_a_bad_frame_in_a_message_counts() -> None:
    found = decode_all(encode(Ping(1)) + encode(Ping(2)) + b"nothing like a frame")
    assert [next(found)[0], next(found)[0]] == [Ping(1), Ping(2)]
    with pytest.raises(BadFrame):
        next(found)


def test_a_message_without_a_frame_or_with_too_many_is_refused() -> None:
    with pytest.raises(BadFrame, match="0 bytes"):
        list(decode_all(b""))
    with pytest.raises(BadFrame, match="more than 64"):
        list(decode_all(encode(Ping(1)) * (MAX_FRAMES + 1)))
    with pytest.raises(BadFrame, match="stray bytes"):
        decode(encode(Ping(1)) * 2)


def test_damaged_messages_are_refused_and_raise_nothing_else() -> None:
    source, refused = Random(4711), 0
    whole = b"".join(encode(Data(n, KEY, 0, 300, b"head"), b"x" * 300) for n in range(5))
    for _ in range(10_000):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        if source.random() < 0.3:
            del damaged[source.randrange(len(damaged)) :]
        try:
            list(decode_all(damaged))
        except BadFrame:
            refused += 1
    assert refused > 2000  # payloads are not summed here, all else is


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
    wire = bytearray(encode(Data(0, KEY, 0, 8), b"12345678", summed=True))
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
    for at, value, words in ((2, 9, "version 9"), (3, 100, "type 100"), (0, 0, "magic")):
        changed = wire[:]
        changed[at] = value
        with pytest.raises(BadFrame, match=words):
            decode(bytes(changed))
    total = MAX_CHUNK_BYTES + 1
    large = bytearray(encode(Data(0, KEY, 0, total), bytes(MAX_CHUNK_BYTES)))
    large[6:10] = total.to_bytes(4, "big")
    with pytest.raises(BadFrame, match="cut off"):
        decode(large)
    head = large[14 : len(large) - MAX_CHUNK_BYTES]
    large[10:14] = zlib.crc32(head, zlib.crc32(large[:10])).to_bytes(4, "big")
    with pytest.raises(BadFrame, match="chunk of 1048577 bytes; at most 1048576"):
        decode(large + b"x")


def test_our_own_oversized_frames_are_our_own_mistake() -> None:
    for frame, payload in (
        (Data(0, KEY, 0, MAX_CHUNK_BYTES + 1), bytes(MAX_CHUNK_BYTES + 1)),
        (Data(0, KEY, 0, 1, meta=bytes(1 << 20)), b"x"),
        (Ack(0, 0, tuple(range(MAX_CONFIRMED + 1))), b""),
        (Hello(1, 2, "x" * 65, "y"), b""),
    ):
        with pytest.raises(ValueError, match="at most"):
            encode(frame, payload)


def test_a_reason_from_a_peer_is_printable_and_bounded() -> None:
    frame, _ = decode(encode(Close(True, "bye\x1b[2J\n" + "ä" * 1000)))
    assert isinstance(frame, Close)
    assert frame.reason.startswith("bye [2J ")
    assert len(frame.reason) < 600


def test_the_prefix_is_fourteen_bytes() -> None:
    assert len(encode(Close(False, ""))) == PREFIX.size + 1 == 15
