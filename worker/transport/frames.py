"""The wire between two workers: frames with a small header of our own, over one byte-message stream.

A frame is ``prefix | head | payload``. The prefix names magic, version, type and head length and
carries a CRC-32 of itself and the head (and of the payload where the head says so: TLS authenticates every
record already, so payloads are only summed on insecure links). A message of any size
travels as DATA frames, each of which names its whole key, so chunks may take different
connections and arrive in any order. ``decode`` trusts nothing: every length is checked before it
is used, and anything wrong raises BadFrame. No socket, clock or thread here.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from atoll.errors import BadFrame
from protos.text_limits import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Buffer = bytes | bytearray | memoryview

MAGIC = b"AT"
VERSION = 3
MAX_CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES = 4 << 10
"""A message's chunks are at least this long, save the last: bounds the receiver's bookkeeping."""
MAX_META_BYTES = 16 << 10
MAX_NAME_BYTES = 64
MAX_SPAN = 4096
"""A message's number is at most this far ahead of the oldest unconfirmed one."""
MAX_CONFIRMED = 256  # message numbers in one ACK
MAX_MARKS = 16  # arrivals in one ACK
MAX_AGE_US = 2**32 - 1
MAX_REASON_BYTES = 512
ECHO_BYTES = 64
MAX_FRAME_BYTES = MAX_CHUNK_BYTES + MAX_META_BYTES + 1024

PREFIX = struct.Struct("!2sBBHI")  # magic, version, type, head length, crc of all but itself
SUMMED = PREFIX.size - 4
START = struct.Struct("!2sBBH")  # what of the prefix is summed
_HELLO = struct.Struct("!HQBBBBB")  # protocol, session, lane, lanes, name/target/label lengths
_DATA = struct.Struct("!QIQIIBBHQQIB")
_FLAGS_AT = struct.calcsize("!QIQIIB")
_ACK = struct.Struct("!QHH")  # receiver's clock ns, marks, confirmed
_MARK = struct.Struct("!QI")  # payload bytes received on this stream, how long ago in us
_ECHO = struct.Struct("!Q")


class FrameType(IntEnum):
    """What a frame is; values are the wire's."""

    HELLO = 1
    DATA = 2
    ACK = 3
    PING = 4
    PONG = 5
    PROBE = 6
    CLOSE = 7
    BUNDLE = 8  # of other frames: worker/transport/bundle.py


class Direction(IntEnum):
    """Why a message travels; the smaller value leaves first."""

    BACKWARD = 0
    TIED_PARTIAL = 1
    TIED_TOTAL = 2
    FORWARD = 3
    EVALUATION = 4
    EVALUATION_CODED = 5  # the same batches, through the links' codecs

    # An Enum's own is a Python function, and keys are looked up ten times a message.
    __hash__ = int.__hash__


MEASURED = frozenset({Direction.FORWARD, Direction.BACKWARD})
"""Boundary tensors of training steps: what a link's rate is measured by. Tied parameters and evaluation
come in bursts of their own size at steps of their own, and no codec of the plan answers for them."""


class Flag(IntEnum):
    """Bits of a DATA or PROBE frame."""

    ACK_NOW = 1
    CHECKSUM = 2  # the prefix's CRC covers the payload too
    ACK_SOON = 4  # with what goes back next, or when nothing does for a while


class MessageKey(NamedTuple):
    """What a message is. ``edge``: op position, or parameter index for tied parameters."""

    job: str
    plan_version: int
    step: int
    micro: int
    edge: int
    direction: Direction


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of either side of a stream."""

    protocol: int
    session: int  # differs after every restart or loss: message numbers begin anew
    name: str
    target: str  # whom the sender believes to talk to
    label: str = ""  # the sender's name to whoever shapes the receiver's wires
    lane: int = 0  # which of the peer's connections this is
    lanes: int = 1


class Data(NamedTuple):
    """One chunk ``[offset, offset + payload)`` of message ``number``; ``meta`` comes with offset 0."""

    number: int
    key: MessageKey
    offset: int
    total: int
    meta: bytes = b""
    flags: int = 0
    oldest: int = 0  # smallest number the sender still keeps; what is older needs no memory


class Ack(NamedTuple):
    """What arrived on this stream, and messages delivered.

    ``marks``: cumulative payload bytes and the age of that state in microseconds, ascending in
    bytes. An acknowledgement that waited for something to travel with tells of every arrival since
    the last one, so that the sender's clockwork sees each as if it had been told at once.
    """

    marks: tuple[tuple[int, int], ...]
    clock_ns: int
    confirmed: tuple[int, ...] = ()

    @property
    def received(self) -> int:
        """Payload bytes in all."""
        return self.marks[-1][0]


@dataclass(frozen=True, slots=True)
class Ping:
    """A 64-byte echo request."""

    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Its answer."""

    number: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Payload that is counted and thrown away: a bandwidth measurement."""

    flags: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """Last frame of a side; ``leaving``: do not dial again."""

    leaving: bool
    reason: str


Frame = Hello | Data | Ack | Ping | Pong | Probe | Close
_WITH_PAYLOAD = (Data, Probe)


def encode(frame: Frame, payload: Buffer = b"") -> bytes:
    """The frame's bytes, ``payload`` at the end. Raises ValueError when a field exceeds its bound."""
    kind, head = _head(frame)
    if len(payload) > MAX_CHUNK_BYTES:
        raise ValueError(f"payload of {len(payload)} bytes; a frame carries at most {MAX_CHUNK_BYTES}")
    start = START.pack(MAGIC, VERSION, kind, len(head))
    crc = zlib.crc32(head, zlib.crc32(start))
    if isinstance(frame, _WITH_PAYLOAD) and frame.flags & Flag.CHECKSUM:
        crc = zlib.crc32(payload, crc)
    return b"".join((start, crc.to_bytes(4, "big"), head, payload))


def _head(frame: Frame) -> tuple[FrameType, bytes]:
    match frame:
        case Data():
            return FrameType.DATA, _data_head(frame)
        case Ack():
            if len(frame.confirmed) > MAX_CONFIRMED:
                raise ValueError(f"{len(frame.confirmed)} confirmations in one ACK; at most {MAX_CONFIRMED}")
            if not 1 <= len(frame.marks) <= MAX_MARKS:
                raise ValueError(f"{len(frame.marks)} arrivals in one ACK; 1 and at most {MAX_MARKS}")
            head = _ACK.pack(frame.clock_ns, len(frame.marks), len(frame.confirmed))
            marks = b"".join(_MARK.pack(received, age_us) for received, age_us in frame.marks)
            confirmed = struct.pack(f"!{len(frame.confirmed)}Q", *frame.confirmed)
            return FrameType.ACK, b"".join((head, marks, confirmed))
        case Ping() | Pong():
            kind = FrameType.PING if isinstance(frame, Ping) else FrameType.PONG
            filler = bytes(ECHO_BYTES - PREFIX.size - _ECHO.size)
            return kind, _ECHO.pack(frame.number) + filler
        case Probe():
            return FrameType.PROBE, bytes([frame.flags])
        case Close():
            reason = frame.reason.encode()[:MAX_REASON_BYTES]
            return FrameType.CLOSE, bytes([frame.leaving]) + reason
        case Hello():
            texts = [_text(frame.name), _text(frame.target), _text(frame.label)]
            sizes = [len(text) for text in texts]
            head = _HELLO.pack(frame.protocol, frame.session, frame.lane, frame.lanes, *sizes)
            return FrameType.HELLO, b"".join((head, *texts))


def _data_head(frame: Data) -> bytes:
    key, job = frame.key, _text(frame.key.job)
    if len(frame.meta) > MAX_META_BYTES:
        raise ValueError(f"message header of {len(frame.meta)} bytes; at most {MAX_META_BYTES}")
    head = _DATA.pack(
        frame.number,
        key.plan_version,
        key.step,
        key.micro,
        key.edge,
        key.direction,
        frame.flags,
        len(frame.meta),
        frame.offset,
        frame.total,
        frame.number - frame.oldest,
        len(job),
    )
    return b"".join((head, job, frame.meta))


def decode(message: Buffer) -> tuple[Frame, memoryview]:
    """The frame in ``message`` and its payload, not copied. Raises BadFrame, never anything else."""
    view = memoryview(message)
    if len(view) < PREFIX.size:
        raise BadFrame(f"frame of {len(view)} bytes; the prefix alone has {PREFIX.size}")
    if len(view) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(view)} bytes; at most {MAX_FRAME_BYTES}")
    magic, version, kind, head_length, crc = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise BadFrame("frame does not begin with the magic bytes; is the peer an Atoll worker?")
    if version != VERSION:
        raise BadFrame(f"frame version {version}, this side speaks {VERSION}; update the older one")
    head = bytes(view[PREFIX.size : PREFIX.size + head_length])
    payload = view[PREFIX.size + head_length :]
    if len(head) != head_length:
        raise BadFrame(f"frame is cut off: head of {head_length} bytes, {len(head)} arrived")
    reader = _READERS.get(kind)
    if reader is None:
        raise BadFrame(f"unknown frame type {kind}")
    # Fields steer nothing until the sum over them is right.
    found = zlib.crc32(head, zlib.crc32(view[:SUMMED]))
    if _flags(kind, head) & Flag.CHECKSUM:
        found = zlib.crc32(payload, found)
    if found != crc:
        raise BadFrame("frame checksum differs; it was damaged or forged")
    try:
        frame = reader(head)
    except (struct.error, UnicodeDecodeError, ValueError, IndexError):
        raise BadFrame(f"malformed {FrameType(kind).name} frame") from None
    if payload and not isinstance(frame, _WITH_PAYLOAD):
        raise BadFrame(f"{FrameType(kind).name} frame carries {len(payload)} stray bytes")
    if isinstance(frame, Data):
        _check_data(frame, len(payload))
    return frame, payload


def _flags(kind: int, head: bytes) -> int:
    if kind == FrameType.DATA and len(head) >= _DATA.size:
        return head[_FLAGS_AT]
    return head[0] if kind == FrameType.PROBE and len(head) else 0


def _read_data(head: bytes) -> Data:
    fields = _DATA.unpack_from(head)
    number, plan_version, step, micro, edge, direction, flags, meta_length, offset, total, behind, n = fields
    job, meta = head[_DATA.size : _DATA.size + n], head[_DATA.size + n :]
    if len(job) != n or len(meta) != meta_length or n > MAX_NAME_BYTES or behind > number:
        raise ValueError
    key = MessageKey(job.decode(), plan_version, step, micro, edge, Direction(direction))
    return Data(number, key, offset, total, meta, flags, number - behind)


def _check_data(frame: Data, length: int) -> None:
    end = frame.offset + length
    if frame.number - frame.oldest > MAX_SPAN:
        raise BadFrame(f"message {frame.number} is {frame.number - frame.oldest} ahead; at most {MAX_SPAN}")
    if length > MAX_CHUNK_BYTES:
        raise BadFrame(f"chunk of {length} bytes; at most {MAX_CHUNK_BYTES}")
    if end > frame.total:
        raise BadFrame(f"chunk ends at byte {end} of a message of {frame.total}")
    if frame.meta and (frame.offset or len(frame.meta) > MAX_META_BYTES):
        raise BadFrame(f"message header of {len(frame.meta)} bytes at offset {frame.offset}")
    if end < frame.total and length < MIN_CHUNK_BYTES:
        raise BadFrame(f"chunk of {length} bytes inside a message; at least {MIN_CHUNK_BYTES}")
    if frame.total and not length:
        raise BadFrame("empty chunk of a message that is not empty")


def _read_ack(head: bytes) -> Ack:
    clock_ns, n_marks, n_confirmed = _ACK.unpack_from(head)
    start = _ACK.size + n_marks * _MARK.size
    if not 1 <= n_marks <= MAX_MARKS or n_confirmed > MAX_CONFIRMED or len(head) != start + 8 * n_confirmed:
        raise ValueError
    marks = tuple(_MARK.iter_unpack(head[_ACK.size : start]))
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(marks)):
        raise ValueError
    return Ack(marks, clock_ns, struct.unpack_from(f"!{n_confirmed}Q", head, start))


def _read_echo(head: bytes) -> int:
    if len(head) != ECHO_BYTES - PREFIX.size:
        raise ValueError
    return int(_ECHO.unpack_from(head)[0])


def _read_probe(head: bytes) -> Probe:
    (flags,) = head
    return Probe(flags)


def _read_close(head: bytes) -> Close:
    if len(head) > 1 + MAX_REASON_BYTES or head[0] > 1:
        raise ValueError
    # A reason cut at its bound may end inside a character.
    return Close(bool(head[0]), clean(head[1:].decode("utf-8", "replace"), MAX_REASON_BYTES))


def _read_hello(head: bytes) -> Hello:
    protocol, session, lane, lanes, *sizes = _HELLO.unpack_from(head)
    if len(head) != _HELLO.size + sum(sizes) or max(sizes) > MAX_NAME_BYTES or lane >= lanes:
        raise ValueError
    at, texts = _HELLO.size, []
    for size in sizes:
        texts.append(head[at : at + size].decode())
        at += size
    return Hello(protocol, session, texts[0], texts[1], texts[2], lane, lanes)


_READERS: dict[int, Callable[[bytes], Frame]] = {
    FrameType.DATA: _read_data,
    FrameType.ACK: _read_ack,
    FrameType.PING: lambda head: Ping(_read_echo(head)),
    FrameType.PONG: lambda head: Pong(_read_echo(head)),
    FrameType.PROBE: _read_probe,
    FrameType.CLOSE: _read_close,
    FrameType.HELLO: _read_hello,
}


def _text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > MAX_NAME_BYTES:
        raise ValueError(f"name of {len(encoded)} bytes; at most {MAX_NAME_BYTES}")
    return encoded


def confirmations(numbers: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """Split ``numbers`` into those one ACK holds and the rest."""
    return tuple(numbers[:MAX_CONFIRMED]), list(numbers[MAX_CONFIRMED:])
