"""Several small frames as one message of the stream.

A message of the stream costs a fixed time on either side whatever its size (some 0.3 ms, measured
on loopback), and each would be acknowledged by itself. What is small and waits for the same
connection therefore leaves together: ``prefix | lengths | frames``, the prefix as every frame has
it, with a sum over itself and the lengths. The frames inside keep their own sums. No data waits in
order to be bundled: frames gather while the one before them is being written. The last frame may be
of any size, so that an acknowledgement travels with whatever goes back. No socket, clock or thread
here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from atoll.errors import BadFrame
from worker.transport.frames import (
    MAGIC,
    MAX_CONFIRMED,
    MAX_FRAME_BYTES,
    MAX_MARKS,
    MAX_NAME_BYTES,
    MAX_REASON_BYTES,
    PREFIX,
    START,
    SUMMED,
    VERSION,
    Ack,
    Buffer,
    Data,
    Frame,
    FrameType,
)

MAX_FRAMES = 64
MAX_BUNDLE_BYTES = 64 << 10
"""Of all frames but the last: what an urgent frame may have to wait for."""
MAX_MESSAGE_BYTES = MAX_BUNDLE_BYTES + MAX_FRAME_BYTES + 4 * MAX_FRAMES + PREFIX.size
_FIXED = 64 + MAX_NAME_BYTES  # prefix and fixed fields of any frame, and a name
LEAST_ROOM = _FIXED + max(12 * MAX_MARKS + 8 * MAX_CONFIRMED, MAX_REASON_BYTES)
"""Any frame that is no data fits in so much."""


def room_for(frame: Frame, payload: Buffer) -> int:
    """At least the bytes of the encoded frame, known without encoding it."""
    match frame:
        case Data():
            return _FIXED + len(frame.meta) + len(payload)
        case Ack():
            return _FIXED + 12 * len(frame.marks) + 8 * len(frame.confirmed)
    return LEAST_ROOM + len(payload)


def within(room: int) -> int:
    """Bytes of data, with the message's header, that a frame of at most ``room`` bytes carries."""
    return room - _FIXED


def join(frames: Sequence[bytes]) -> bytes:
    """The frames as one message; a single frame stays as it is. ValueError beyond a bound."""
    if len(frames) == 1:
        return frames[0]
    sizes = [*map(len, frames)]
    if not 2 <= len(frames) <= MAX_FRAMES or not _fitting(sizes):
        raise ValueError(f"bundle of {len(frames)} frames, {sum(sizes)} bytes")
    lengths = struct.pack(f"!{len(sizes)}I", *sizes)
    start = START.pack(MAGIC, VERSION, FrameType.BUNDLE, len(lengths))
    crc = zlib.crc32(lengths, zlib.crc32(start))
    return b"".join((start, crc.to_bytes(4, "big"), lengths, *frames))


def split(message: Buffer) -> tuple[Buffer, ...]:
    """The frames in ``message``, not copied nor looked into. Raises BadFrame, never anything else.

    What is no bundle is returned as it is; ``frames.decode`` judges it.
    """
    view = memoryview(message)
    if len(view) < PREFIX.size or view[3] != FrameType.BUNDLE:
        return (message,)
    magic, version, _, head_length, crc = PREFIX.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        return (message,)
    head = view[PREFIX.size : PREFIX.size + head_length]
    count = head_length // 4
    if len(head) != head_length or head_length % 4 or not 2 <= count <= MAX_FRAMES:
        raise BadFrame(f"bundle of {head_length} bytes of lengths; 2 to {MAX_FRAMES} frames are accepted")
    if zlib.crc32(head, zlib.crc32(view[:SUMMED])) != crc:
        raise BadFrame("bundle checksum differs; it was damaged or forged")
    lengths = struct.unpack(f"!{count}I", head)
    body = view[PREFIX.size + head_length :]
    if sum(lengths) != len(body) or not _fitting(lengths):
        raise BadFrame(
            f"bundle of {len(body)} bytes, {sum(lengths)} declared; "
            f"at most {MAX_BUNDLE_BYTES} before the last frame and {MAX_FRAME_BYTES} in it"
        )
    found, at = [], 0
    for length in lengths:
        found.append(body[at : at + length])
        at += length
    return tuple(found)


def _fitting(sizes: Sequence[int]) -> bool:
    return sum(sizes[:-1]) <= MAX_BUNDLE_BYTES and sizes[-1] <= MAX_FRAME_BYTES
