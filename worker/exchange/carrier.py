"""Messages of an exchange round as bytes in pieces, each of which has a key and a bound that both ends know.

    frame = count of labels, length of the packet's header, digest, labels, header, payload

A frame leaves in pieces of at most ``PIECE_BYTES``, so a model's segment needs no buffer of its size on its
way. All that is declared of it is the most that it can have: a codec's packet may be shorter, and then so are
its last pieces. What does not read as a message is a fault of its sender.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from atoll.collective import TOTAL, Collective
from atoll.errors import BadFrame
from atoll.exchange import DIGEST_BYTES
from atoll.opdag import TensorMeta
from compressors.base import MAX_HEADER_BYTES, parse_packet
from compressors.sparse_sizes import most_vector_bytes
from compressors.vector import UNCOMPRESSED
from worker.exchange.round import Message
from worker.transport.frames import Direction

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound
    from strategies.exchanges.base import Contribution

PIECE_BYTES = 4 << 20
LABELS = 4096  # more ranks than a plan has
_HEAD = struct.Struct("!HH16s")


class Slot(NamedTuple):
    """Where a message belongs: a segment's part of one rank, or its total."""

    segment: int
    label: int

    def key(self, piece: int) -> tuple[Direction, int, int]:
        """Direction, micro and edge of a piece's message."""
        if self.label == TOTAL:
            return Direction.TOTAL, piece * LABELS, self.segment
        return Direction.PART, piece * LABELS + self.label, self.segment


def most_bytes(
    collective: Collective,
    slot: Slot,
    settings: Contribution,
    positions: tuple[int, int] | None = None,
    *,
    plain: bool = False,
) -> int:
    """Return the bound of a message's bytes; ``positions``: of a part and of a total, as ``Row`` has them.
    ``plain``: it is not coded."""
    size, total = collective.segments[slot.segment].size, slot.label == TOTAL
    if positions is None:
        codec = UNCOMPRESSED if plain else settings.total_codec if total else settings.codec
        payload = codec.max_payload_bytes(TensorMeta((size,), "float32"))
    else:
        payload = most_vector_bytes(positions[total], size)
    return _HEAD.size + 2 * len(collective.labels) + MAX_HEADER_BYTES + payload


def pieces_of(n_bytes: int) -> list[int]:
    """Return the bound of each piece of a frame of at most so many bytes."""
    whole, rest = divmod(n_bytes, PIECE_BYTES)
    return [PIECE_BYTES] * whole + [rest] * (rest > 0)


def packed(message: Message) -> Tensor:
    """Return a message's bytes, uint8 [n]."""
    header = message.packet.header
    labels = struct.pack(f"!{len(message.included)}H", *message.included)
    head = _HEAD.pack(len(message.included), len(header), message.digest)
    frame = b"".join((head, labels, header, message.packet.payload))
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def split(frame: Tensor, most: int) -> Iterator[Tensor]:
    """Yield the pieces of a frame, as many as its bound has; ValueError where it is longer."""
    if len(frame) > most:
        raise ValueError(f"a message of {len(frame)} bytes; at most {most}")
    for number in range(len(pieces_of(most))):
        yield frame[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]


@dataclass
class Arriving:
    """A message on its way: its pieces in their order, as far as they have come."""

    slot: Slot
    source: int  # rank
    sizes: list[int]
    pieces: list[Tensor] = field(default_factory=list)
    hops: int = 1  # messages that follow each other until this one is here

    @property
    def whole(self) -> bool:
        return len(self.pieces) == len(self.sizes)

    @property
    def next_key(self) -> tuple[Direction, int, int]:
        """Key of the piece that comes next."""
        return self.slot.key(len(self.pieces))


def arriving(collective: Collective, rank: int, settings: Contribution) -> list[Arriving]:
    """Return what a rank receives in a round, first what others need nothing of anybody for to send."""
    found = []
    for slot, source in ((Slot(*at), source) for at, source in collective.sources(rank).items()):
        plain = collective.plain(source, rank, slot.label)
        sizes = pieces_of(most_bytes(collective, slot, settings, plain=plain))
        found.append(Arriving(slot, source, sizes, hops=collective.hops(rank, *slot)))
    return sorted(found, key=lambda one: (one.hops, one.slot))


def unpacked(arrived: Arriving, at: ExchangeRound, phase: int, target: int) -> Message:
    """Read the message of an arrived frame. Raises BadFrame for what ``packed`` does not make."""
    return read(torch.cat(arrived.pieces), arrived.slot, arrived.source, at, phase, target)


def read(row: Tensor, slot: Slot, source: int, at: ExchangeRound, phase: int, target: int) -> Message:
    """Read the message in a frame's bytes, uint8 [n]. Raises BadFrame for what ``packed`` does not make."""
    frame = memoryview(row.numpy())  # type: ignore[arg-type]
    if len(frame) < _HEAD.size:
        raise BadFrame(f"a message of a round of {len(frame)} bytes")
    count, header_bytes, digest = _HEAD.unpack_from(frame)
    begins = _HEAD.size + 2 * count
    ends = begins + header_bytes
    if ends > len(frame) or len(digest) != DIGEST_BYTES:
        raise BadFrame(
            f"a message of a round of {len(frame)} bytes with {count} labels and a header to {ends}"
        )
    included = struct.unpack_from(f"!{count}H", frame, _HEAD.size)
    packet = parse_packet(frame[begins:ends], frame[ends:])
    return Message(at.number, phase, source, target, slot.segment, slot.label, included, packet, digest)
