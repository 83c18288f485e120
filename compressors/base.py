"""Compressor and Packet: what every codec of a link agrees on.

A packet describes itself in a short versioned header (codec, dtype, shape, the codec's own
parameters); the receiver checks it against the declared TensorMeta before it looks at the
payload. A zero gradient is a packet with a mark and no payload, whatever the codec. Importing this
module does not load torch: who only carries packets has none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from atoll.bounded import MAX_DIMS
from atoll.errors import BadFrame
from atoll.opdag import TensorMeta

if TYPE_CHECKING:
    import torch

Buffer = bytes | bytearray | memoryview

HEADER_VERSION = 1
MAX_HEADER_BYTES = 1024
DTYPES: tuple[str, ...] = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
)
"""The position is the wire's code: append, never reorder."""

_HEAD = struct.Struct("!BBBBBH")  # version, marks, dtype, dims, codec length, params length


class Mark(IntFlag):
    """Bits of a packet's header."""

    NOTHING = 0
    ZERO = 1  # the gradient is zero; no payload


_MARKS = {int(mark): mark for mark in (Mark.NOTHING, Mark.ZERO)}


@dataclass(frozen=True)
class Packet:
    """A compressed tensor: ``meta`` is the tensor's, ``params`` the codec's own few bytes."""

    codec: str
    meta: TensorMeta
    payload: Buffer = b""
    params: bytes = b""
    marks: Mark = Mark.NOTHING

    @property
    def zero(self) -> bool:
        return self.marks is Mark.ZERO

    @cached_property
    def header(self) -> bytes:
        """The header as it travels. Raises ValueError when a field exceeds its bound."""
        codec = self.codec.encode("ascii")
        shape = self.meta.shape
        head = _HEAD.pack(
            HEADER_VERSION,
            self.marks,
            DTYPES.index(self.meta.dtype),
            len(shape),
            len(codec),
            len(self.params),
        )
        header = b"".join((head, struct.pack(f"!{len(shape)}Q", *shape), codec, self.params))
        if len(header) > MAX_HEADER_BYTES or len(shape) > MAX_DIMS:
            raise ValueError(f"packet header of {len(header)} bytes, {len(shape)} dimensions")
        return header

    @property
    def wire_bytes(self) -> int:
        """Header and payload; the transport's framing comes on top."""
        return len(self.header) + len(self.payload)


def zero_packet(codec: str, meta: TensorMeta) -> Packet:
    """The mark that stands for a gradient of zeros."""
    return Packet(codec, meta, marks=Mark.ZERO)


def parse_packet(header: Buffer, payload: Buffer) -> Packet:
    """Read a received header. Raises BadFrame for anything malformed."""
    view = memoryview(header)
    if not _HEAD.size <= len(view) <= MAX_HEADER_BYTES:
        raise BadFrame(f"packet header of {len(view)} bytes; {_HEAD.size} to {MAX_HEADER_BYTES}")
    version, marks, dtype, dims, codec_length, params_length = _HEAD.unpack_from(view)
    if version != HEADER_VERSION:
        raise BadFrame(f"packet header version {version}, this side reads {HEADER_VERSION}; update one")
    if dims > MAX_DIMS or dtype >= len(DTYPES) or marks not in _MARKS:
        raise BadFrame(f"packet header names dtype {dtype}, {dims} dimensions, marks {marks}")
    if len(view) != _HEAD.size + 8 * dims + codec_length + params_length:
        raise BadFrame("packet header's lengths do not add up")
    shape = struct.unpack_from(f"!{dims}Q", view, _HEAD.size)
    at = _HEAD.size + 8 * dims
    try:
        codec = bytes(view[at : at + codec_length]).decode("ascii")
    except UnicodeDecodeError:
        raise BadFrame("the packet's codec name is not text") from None
    packet = Packet(
        codec, TensorMeta(shape, DTYPES[dtype]), payload, bytes(view[at + codec_length :]), _MARKS[marks]
    )
    if packet.zero and payload:
        raise BadFrame(f"a zero gradient with {len(payload)} bytes of payload")
    return packet


State = Any
"""A codec's own frozen value (a residual, a warm start), or None; in as an argument, out as a result."""


class Compressor(Protocol):
    """A codec with its settings. Pure: the same tensor, state and seed give the same packet.

    What it is valid for, whether it is exact, linear or unbiased, and how many bytes it is expected
    to take, stands in ``compressors.catalogue`` under its name.
    """

    name: str

    def init(self, meta: TensorMeta) -> State:
        """The state before the first tensor of ``meta``; None for a codec without one."""
        return None

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """Pack ``tensor`` (any device and layout, floating or integer), and the next state."""

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        """A CPU tensor of ``packet.meta``; may share the payload's memory. Raises BadFrame.

        ``state`` only for codecs whose two ends share one (``Codec.shared_state``).
        """

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        """No payload for ``meta`` is longer; what the receiver allows."""


@dataclass(frozen=True, slots=True)
class Support:
    """Which elements of a tensor of ``meta`` a sparse packet holds."""

    meta: TensorMeta
    positions: torch.Tensor  # int64 [k], ascending, unique, into the contiguous elements


class SparseCompressor(Compressor, Protocol):
    """A codec that keeps some elements, and can send another tensor's values at the same ones."""

    def support(self, packet: Packet) -> Support:
        """The positions in a packet that this side made or has received. Raises BadFrame."""

    def compress_on(self, tensor: torch.Tensor, support: Support, *, seed: int = 0) -> Packet:
        """The values of ``tensor`` at ``support``, no indices."""

    def decompress_on(self, packet: Packet, support: Support) -> torch.Tensor:
        """Those values, zero elsewhere. Raises BadFrame."""

    def max_payload_bytes_on(self, meta: TensorMeta) -> int:
        """No payload of ``compress_on`` is longer."""


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Shape and dtype of a torch tensor in the vocabulary of ``atoll``."""
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def check_packet(packet: Packet, codec: str, meta: TensorMeta, max_payload_bytes: int) -> None:
    """Raise BadFrame unless the packet is what was agreed."""
    if packet.codec != codec:
        raise BadFrame(f"packet of codec {packet.codec!r}, the plan says {codec!r}")
    if packet.meta != meta:
        raise BadFrame(f"packet holds {packet.meta}, the plan says {meta}")
    if len(packet.payload) > max_payload_bytes:
        raise BadFrame(f"payload of {len(packet.payload)} bytes; at most {max_payload_bytes}")
