"""The wire between two workers: frames with a small header of our own, over a pipe of byte messages.

A frame is ``prefix | head | payload``, a message one or several of them. The prefix names magic, version,
type and both lengths and carries a CRC-32 of itself and the head (and of the payload where the type says
so: TLS authenticates every record already, so payloads are only summed on insecure links). A tensor of any
size travels as DATA frames, each of which names its whole key, so chunks may take different
connections and arrive in any order. Reading trusts nothing: every length is checked before it
is used, and anything wrong raises BadFrame. No socket, clock or thread here.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from atoll.bounded import MAX_OPS
from atoll.errors import BadFrame
from protos.text_limits import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Buffer = bytes | bytearray | memoryview

MAGIC = b"AT"
VERSION = 4
MAX_CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES = 4 << 10
"""A message's chunks are at least this long, save the last: bounds the receiver's bookkeeping."""
MAX_META_BYTES = 16 << 10
MAX_NAME_BYTES = 64
MAX_SPAN = 4096
"""A message's number is at most this far ahead of the oldest unconfirmed one."""
MAX_CONFIRMED = 256  # message numbers in one ACK
MAX_REASON_BYTES = 512
MAX_FRAMES = 64  # in one message: others wait while they are handled
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (128 << 10)
"""A chunk, and what small frames may leave with it."""

PREFIX = struct.Struct("!2sBBHII")  # magic, version, type, head and payload length, sum of all but itself
_START = struct.Struct("!2sBBHI")  # what of the prefix is summed
_SUMMED = 0x80  # bit of the type: the sum covers the payload, too
_HELLO = struct.Struct("!HQBBBB")  # protocol, session, stream, name/target/label lengths
_DATA = struct.Struct("!QIQIIBHQQIB")
_ACK = struct.Struct("!QQ")
_ECHO = struct.Struct("!Q")


class FrameType(IntEnum):
    """What a frame is; values are the wire's."""

    HELLO = 1
    DATA = 2
    ACK = 3
    PING = 4
    PONG = 5
    CLOSE = 6


class Direction(IntEnum):
    """Reason for which a message travels; see ``URGENCY``."""

    BACKWARD = 0
    TIED_PARTIAL = 1
    TIED_TOTAL = 2
    FORWARD = 3
    EVALUATION = 4
    EVALUATION_CODED = 5  # the same batches, through the links' codecs
    REPLAY = 6  # empty: send me again what you sent my stage in this step; micro NOT_HERE: it cannot be
    PART = 7  # of gradients, to who adds them; micro: block, edge: ``gradient_exchange.Bucket.op``. ...
    TOTAL = 8  # of gradients, to the other replicas; micro: the replica that has added. ...
    # ... Of a round of peers: their bytes, edge: segment, micro: piece and label (``exchange.carrier``).
    COPY = 9  # pieces of blobs (``hosting.peer_blobs``)

    # An Enum's own is a Python function, and keys are looked up ten times a message.
    __hash__ = int.__hash__


_ORDER = (
    Direction.BACKWARD, Direction.TIED_PARTIAL, Direction.TIED_TOTAL, Direction.PART, Direction.TOTAL,
    Direction.FORWARD, Direction.EVALUATION, Direction.EVALUATION_CODED, Direction.REPLAY,
    Direction.COPY,
)  # fmt: skip
URGENCY = tuple(map(_ORDER.index, Direction))
"""By direction: the smaller leaves first. Values are the wire's, and of the seeds of what codecs draw."""
NOT_HERE = 1
"""``micro`` of the answer to a REPLAY that cannot be obeyed; its header is the reason."""
MEASURED = frozenset({Direction.FORWARD, Direction.BACKWARD, Direction.PART, Direction.TOTAL})
"""Boundary tensors of training steps, and exchanges: what a link's rate is measured by. Tied parameters
and evaluation come in bursts of their own size at steps of their own; no codec answers for them."""

EXCHANGED = frozenset({Direction.PART, Direction.TOTAL})
OF_STEPS = frozenset(Direction) - {Direction.COPY}
"""Directions of what a computation that hangs sends no more: copies of checkpoints travel on."""


class MessageKey(NamedTuple):
    """What a message is. ``edge``: op position, or parameter index for tied parameters."""

    job: str
    plan_version: int
    step: int
    micro: int
    edge: int
    direction: Direction


def of_round(key: MessageKey) -> bool:
    """Whether a message is of the round that ends a period of a peer's own steps; of exact replicas, of the
    exchange."""
    return key.direction in (Direction.PART, Direction.TOTAL) or (
        key.direction is Direction.TIED_TOTAL and key.micro > 0
    )


class End(NamedTuple):
    """Where messages of a piece go: its worker, and its number among the pieces there."""

    worker: str
    turn: int = 0

    def edge(self, at: int) -> int:
        """Return the edge of messages to this piece about an op or a tied parameter: those to several pieces
        of one worker differ."""
        return at + MAX_OPS * self.turn


def about(key: MessageKey) -> int:
    """Return what a message of a piece is about: an op or a tied parameter."""
    return key.edge % MAX_OPS


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of either side of a connection."""

    protocol: int
    session: int  # differs after every restart or loss: message numbers begin anew
    name: str
    target: str  # whom the sender believes to talk to
    label: str = ""  # the sender's name to whoever shapes the receiver's pipes
    stream: int = 0  # which of the dialler's connections this is


class Data(NamedTuple):
    """One chunk ``[offset, offset + payload)`` of message ``number``; ``meta`` comes with offset 0."""

    number: int
    key: MessageKey
    offset: int
    total: int
    meta: bytes = b""
    oldest: int = 0  # smallest number the sender still keeps; what is older needs no memory


class Ack(NamedTuple):
    """Payload bytes that arrived on this connection so far, the receiver's clock, and messages delivered."""

    received: int
    clock_ns: int
    confirmed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ping:
    """An echo request."""

    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Its answer."""

    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """Last frame of a side; ``leaving``: do not dial again."""

    leaving: bool
    reason: str


Frame = Hello | Data | Ack | Ping | Pong | Close


def encode(frame: Frame, payload: Buffer = b"", *, summed: bool = False) -> bytes:
    """The frame's bytes, ``payload`` at the end. Raises ValueError when a field exceeds its bound."""
    kind, head = _head(frame)
    if len(payload) > MAX_CHUNK_BYTES:
        raise ValueError(f"payload of {len(payload)} bytes; a frame carries at most {MAX_CHUNK_BYTES}")
    start = _START.pack(MAGIC, VERSION, kind | (_SUMMED if summed else 0), len(head), len(payload))
    crc = zlib.crc32(head, zlib.crc32(start))
    if summed:
        crc = zlib.crc32(payload, crc)
    return b"".join((start, crc.to_bytes(4, "big"), head, payload))


def _head(frame: Frame) -> tuple[FrameType, bytes]:
    match frame:
        case Data():
            return FrameType.DATA, _data_head(frame)
        case Ack(received, clock_ns, confirmed):
            if len(confirmed) > MAX_CONFIRMED:
                raise ValueError(f"{len(confirmed)} confirmations in one ACK; at most {MAX_CONFIRMED}")
            numbers = struct.pack(f"!{len(confirmed)}Q", *confirmed)
            return FrameType.ACK, _ACK.pack(received, clock_ns) + numbers
        case Ping(number):
            return FrameType.PING, _ECHO.pack(number)
        case Pong(number):
            return FrameType.PONG, _ECHO.pack(number)
        case Close(leaving, reason):
            return FrameType.CLOSE, bytes([leaving]) + reason.encode()[:MAX_REASON_BYTES]
        case Hello(protocol, session, name, target, label, stream):
            texts = [_text(name), _text(target), _text(label)]
            head = _HELLO.pack(protocol, session, stream, *map(len, texts))
            return FrameType.HELLO, b"".join((head, *texts))


def _data_head(frame: Data) -> bytes:
    key, job, meta = frame.key, _text(frame.key.job), frame.meta
    if len(meta) > MAX_META_BYTES:
        raise ValueError(f"message header of {len(meta)} bytes; at most {MAX_META_BYTES}")
    which = (frame.number, *key[1:], len(meta))
    head = _DATA.pack(*which, frame.offset, frame.total, frame.number - frame.oldest, len(job))
    return b"".join((head, job, meta))


def _text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > MAX_NAME_BYTES:
        raise ValueError(f"name of {len(encoded)} bytes; at most {MAX_NAME_BYTES}")
    return encoded


def decode(message: Buffer) -> tuple[Frame, memoryview]:
    """The only frame in ``message`` and its payload, not copied. Raises BadFrame, never anything else."""
    frame, payload, rest = _first(memoryview(message))
    if rest:
        raise BadFrame(f"{len(rest)} stray bytes after a frame that is to come alone")
    return frame, payload


def decode_all(message: Buffer) -> Iterator[tuple[Frame, memoryview]]:
    """Every frame in ``message``, one after the other, as ``decode`` does."""
    rest, count = memoryview(message), 0
    while not count or rest:
        if count == MAX_FRAMES:
            raise BadFrame(f"more than {MAX_FRAMES} frames in one message")
        frame, payload, rest = _first(rest)
        count += 1
        yield frame, payload


def _first(view: memoryview) -> tuple[Frame, memoryview, memoryview]:
    """A frame, its payload, and what follows it."""
    if len(view) < PREFIX.size:
        raise BadFrame(f"frame of {len(view)} bytes; the prefix alone has {PREFIX.size}")
    magic, version, kind, head_length, length, crc = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise BadFrame("frame does not begin with the magic bytes; is the peer an Atoll worker?")
    if version != VERSION:
        raise BadFrame(f"frame version {version}, this side speaks {VERSION}; update the older one")
    body, end = PREFIX.size + head_length, PREFIX.size + head_length + length
    if len(view) < end:
        raise BadFrame(f"frame is cut off: {end} bytes declared, {len(view)} arrived")
    head, payload = bytes(view[PREFIX.size : body]), view[body:end]
    reader = _READERS.get(kind & ~_SUMMED)
    if reader is None:
        raise BadFrame(f"unknown frame type {kind}")
    # Fields steer nothing until the sum over them is right.
    found = zlib.crc32(head, zlib.crc32(view[: _START.size]))
    if (zlib.crc32(payload, found) if kind & _SUMMED else found) != crc:
        raise BadFrame("frame checksum differs; it was damaged or forged")
    try:
        frame = reader(head)
    except (struct.error, UnicodeDecodeError, ValueError, IndexError):
        raise BadFrame(f"malformed {FrameType(kind & ~_SUMMED).name} frame") from None
    if isinstance(frame, Data):
        _check_data(frame, length)
    elif length:
        raise BadFrame(f"{type(frame).__name__} frame carries {length} stray bytes")
    return frame, payload, view[end:]


def _read_data(head: bytes) -> Data:
    number, version, step, micro, edge, direction, n_meta, offset, total, behind, n = _DATA.unpack_from(head)
    job, meta = head[_DATA.size : _DATA.size + n], head[_DATA.size + n :]
    if len(job) != n or len(meta) != n_meta or n > MAX_NAME_BYTES or behind > number:
        raise ValueError
    key = MessageKey(job.decode(), version, step, micro, edge, Direction(direction))
    return Data(number, key, offset, total, meta, number - behind)


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
    confirmed = struct.unpack(f"!{(len(head) - _ACK.size) // 8}Q", head[_ACK.size :])
    if len(confirmed) > MAX_CONFIRMED:
        raise ValueError
    received, clock_ns = _ACK.unpack_from(head)
    return Ack(received, clock_ns, confirmed)


def _read_close(head: bytes) -> Close:
    if len(head) > 1 + MAX_REASON_BYTES or head[0] > 1:
        raise ValueError
    # A reason cut at its bound may end inside a character.
    return Close(bool(head[0]), clean(head[1:].decode("utf-8", "replace"), MAX_REASON_BYTES))


def _read_hello(head: bytes) -> Hello:
    protocol, session, stream, *sizes = _HELLO.unpack_from(head)
    if len(head) != _HELLO.size + sum(sizes) or max(sizes) > MAX_NAME_BYTES:
        raise ValueError
    name, target, label = struct.unpack("".join(f"{size}s" for size in sizes), head[_HELLO.size :])
    return Hello(protocol, session, name.decode(), target.decode(), label.decode(), stream)


_READERS: dict[int, Callable[[bytes], Frame]] = {
    FrameType.DATA: _read_data,
    FrameType.ACK: _read_ack,
    FrameType.PING: lambda head: Ping(*_ECHO.unpack(head)),
    FrameType.PONG: lambda head: Pong(*_ECHO.unpack(head)),
    FrameType.CLOSE: _read_close,
    FrameType.HELLO: _read_hello,
}
