"""Byte planes and entropy coding: fewer bytes, the same bits.

A float's sign and mantissa are noise, but its exponent takes few values: 2.55 bits of entropy for a
Gaussian, so at best 0.830 of fp32 and 0.659 of bf16. Elements are split into byte planes
(``byte_planes.py``), and a plane is entropy coded where a sample says that this saves something; so
zeros, which fill mantissas too, cost next to nothing. A tensor that would save less than MIN_GAIN
travels raw. The memory layout travels as in ``none.py``: the oracle holds over this codec.

Source: papers/compression.md 5. Coding exponents is ZipCCL's (arXiv 2604.27844, abstract) and
DFloat11's idea; the layout is our own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import torch
import zstandard

from atoll.errors import BadFrame
from atoll.opdag import DTYPE_BYTES, TensorMeta
from compressors.base import Compressor, Packet, State, meta_of
from compressors.byte_planes import KINDS, Plane, kinds, merge, plane_bytes, split
from compressors.layout import ALIGNMENT, Layout, from_wire, to_wire
from compressors.packing import TORCH_DTYPES, Bytes

MIN_GAIN = 0.05  # ZipNN's default
SAMPLE_PIECES, SAMPLE_PIECE = 8, 512  # elements looked at before a plane is coded
WINDOW_LOG = 17
MAX_WINDOW_BYTES = 1 << 20  # of level 1, which integers take, too
_SIZE = struct.Struct("!Q")
_RAW, _PLANES = 0, 1  # first byte of the parameters


class Lossless(Compressor):
    """``decompress(compress(x))`` is ``x``, bit for bit and stride for stride."""

    name = "lossless"

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """Raw, sharing a dense CPU tensor's memory, where less than MIN_GAIN is saved."""
        meta = meta_of(tensor)
        flat, layout = to_wire(tensor)
        flat = flat.cpu()
        if not flat.numel():
            return Packet(self.name, meta), None
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        data: Bytes = flat.view(torch.uint8).numpy()
        kept = b"" if layout == Layout.contiguous(meta.shape) else layout.to_bytes()
        coded = _encoded(data, meta.dtype)
        if coded is None:
            return Packet(self.name, meta, _view(data), bytes([_RAW]) + kept), None
        payload, sizes = coded
        params = bytes([_PLANES]) + b"".join(map(_SIZE.pack, sizes)) + kept
        return Packet(self.name, meta, _view(payload), params), None

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        """Raises BadFrame for planes that are not exactly the tensor's. Allocates the tensor and
        blocks, never what the payload asks for."""
        meta, payload = packet.meta, memoryview(packet.payload)
        dtype = TORCH_DTYPES[meta.dtype]
        if packet.zero:
            return torch.zeros(meta.shape, dtype=dtype)
        if not meta.elements:
            if payload:
                raise BadFrame(f"payload of {len(payload)} bytes for {meta}, which is empty")
            return torch.empty(meta.shape, dtype=dtype)
        sizes, layout = _parsed(packet)
        # The first element where the layout wants it, so that from_wire makes no second copy.
        memory = _aligned(meta.nbytes, layout.lead * DTYPE_BYTES[meta.dtype])
        if sizes is None:
            memory[:] = np.frombuffer(payload, np.uint8)
        else:
            merge(memory, meta.dtype, _sources(payload, sizes, meta))
        return from_wire(torch.from_numpy(memory).view(dtype), meta.shape, layout)

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return meta.nbytes


def _encoded(data: Bytes, dtype: str) -> tuple[Bytes, list[int]] | None:
    """The planes that travel raw, then the coded ones, and the size of each; None when all of them
    together save less than MIN_GAIN."""
    sample, coder = _sample(data, dtype), _coder(dtype)
    gains = [
        len(coder.compress(_view(plane))) < (1 - MIN_GAIN) * plane.nbytes
        for plane in next(split(sample, dtype, [None] * len(kinds(dtype))))
    ]
    while any(gains):
        payload, sizes = _packed(data, dtype, gains)
        full = plane_bytes(dtype, len(data))
        kept = [size < (1 - MIN_GAIN) * most for size, most in zip(sizes, full, strict=True)]
        if kept == gains:
            return (payload, sizes) if sum(sizes) <= (1 - MIN_GAIN) * len(data) else None
        gains = kept  # the sample misled: again, without the planes that did not shrink
    return None


def _packed(data: Bytes, dtype: str, coded: list[bool]) -> tuple[Bytes, list[int]]:
    """Payload and plane sizes with those planes coded. A payload of planes that grew is cut short:
    the caller looks at the sizes first."""
    full, payload, at = plane_bytes(dtype, len(data)), np.empty(len(data), np.uint8), 0
    targets: list[Plane | None] = [None] * len(full)
    streams, parts = {}, {}
    for i, (kind, is_coded) in enumerate(zip(kinds(dtype), coded, strict=True)):
        if is_coded:
            streams[i], parts[i] = _coder(dtype).compressobj(size=full[i]), list[bytes]()
        else:
            targets[i] = payload[at : at + full[i]].view(kind)
            at += full[i]
    for planes in split(data, dtype, targets):
        for i, stream in streams.items():
            parts[i].append(stream.compress(_view(planes[i])))
    sizes = list(full)
    for i, stream in streams.items():
        plane = b"".join([*parts[i], stream.flush()])
        sizes[i] = len(plane)
        room = payload[at : at + len(plane)]
        room[:] = np.frombuffer(plane, np.uint8)[: len(room)]
        at += len(room)
    return payload[:at], sizes


def _sample(data: Bytes, dtype: str) -> Bytes:
    """Some evenly spread pieces of whole elements, or all of a short tensor."""
    size = DTYPE_BYTES[dtype]
    piece = SAMPLE_PIECE * size
    if len(data) <= SAMPLE_PIECES * piece:
        return data
    # The middle of each eighth: ends are often special, as the last token's gradient of zeros.
    share = len(data) // size // SAMPLE_PIECES
    starts = [(share * i + (share - SAMPLE_PIECE) // 2) * size for i in range(SAMPLE_PIECES)]
    return np.concatenate([data[start : start + piece] for start in starts])


def _coder(dtype: str) -> zstandard.ZstdCompressor:
    """Huffman for float planes: a match finder with next to no table, which gives up at once where
    there is no run. Level 1 searches for matches in noise: measured on the exponents of a Gaussian,
    0.29 GB/s of plane and 0.361 of its bytes against 0.82 GB/s and 0.325."""
    if dtype not in KINDS:
        return zstandard.ZstdCompressor(level=1)
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            min_match=7,
            hash_log=6,
            chain_log=6,
            search_log=1,
            window_log=WINDOW_LOG,
        )
    )


def _view(array: Plane) -> memoryview:
    """The array's bytes; numpy's stubs do not say that it is a buffer."""
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type]


def _aligned(size: int, lead: int) -> Bytes:
    """New memory that begins ``lead`` bytes after a boundary of ALIGNMENT. numpy asks the system for
    huge pages and torch does not: filling fresh memory takes a quarter of the time."""
    memory = np.empty(size + 2 * ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT + lead
    return memory[start : start + size]


def _parsed(packet: Packet) -> tuple[list[int] | None, Layout]:
    """Plane sizes (None: stored raw) and layout. BadFrame when they contradict the payload."""
    meta, params, length = packet.meta, packet.params, len(packet.payload)
    if not params or params[0] not in (_RAW, _PLANES):
        raise BadFrame(f"lossless packet with {len(params)} bytes of parameters of no known form")
    at, sizes, total = 1, None, meta.nbytes
    if params[0] == _PLANES:
        full = plane_bytes(meta.dtype, meta.nbytes)
        at += _SIZE.size * len(full)
        if len(params) < at:
            raise BadFrame(f"lossless packet names {len(params)} bytes of parameters, {len(full)} planes")
        sizes = [size for (size,) in _SIZE.iter_unpack(params[1:at])]
        if any(size > most for size, most in zip(sizes, full, strict=True)):
            raise BadFrame(f"planes of {sizes} bytes; at most {full}")
        total = sum(sizes)
    if length != total:
        raise BadFrame(f"payload of {length} bytes for {meta}; its header says {total}")
    layout = Layout.contiguous(meta.shape)
    if len(params) > at:
        layout = Layout.from_bytes(params[at:], len(meta.shape))
    if layout.lead * DTYPE_BYTES[meta.dtype] >= ALIGNMENT:
        raise BadFrame(f"layout leads by {layout.lead} elements, more than {ALIGNMENT} bytes")
    return sizes, layout


def _sources(payload: memoryview, sizes: list[int], meta: TensorMeta) -> list[Callable[[slice], Plane]]:
    """Return for each plane a function that gives its elements block by block. BadFrame for a damaged one."""
    full = plane_bytes(meta.dtype, meta.nbytes)
    order = sorted(range(len(sizes)), key=lambda i: sizes[i] < full[i])  # stable: raw ones first
    sources: dict[int, Callable[[slice], Plane]] = {}
    at = 0
    for i in order:
        kind, data = kinds(meta.dtype)[i], payload[at : at + sizes[i]]
        at += sizes[i]
        if sizes[i] == full[i]:
            sources[i] = np.frombuffer(data, kind).__getitem__
        else:
            sources[i] = _decoder(data, kind, full[i])
    return [sources[i] for i in range(len(sizes))]


def _decoder(data: memoryview, kind: type[np.unsignedinteger], full: int) -> Callable[[slice], Plane]:
    """A coded plane of ``full`` bytes, decoded as its blocks are asked for."""
    try:
        if zstandard.frame_content_size(data) != full:
            raise BadFrame(f"a coded plane does not hold {full} bytes")
    except zstandard.ZstdError as error:
        raise BadFrame(f"a coded plane of {len(data)} bytes is damaged: {error}") from None
    # The window is what the coder would allocate for a hostile frame.
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(data)
    buffer = np.empty(0, kind)

    def block(part: slice) -> Plane:
        nonlocal buffer
        count = part.stop - part.start
        if len(buffer) < count:
            buffer = np.empty(count, kind)
        into = buffer[:count]
        try:
            got = reader.readinto(_view(into))
        except zstandard.ZstdError as error:
            raise BadFrame(f"a coded plane of {len(data)} bytes is damaged: {error}") from None
        if got != into.nbytes:
            raise BadFrame(f"a coded plane of {len(data)} bytes ends early")
        return into

    return block
