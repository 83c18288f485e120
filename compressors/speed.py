"""How fast a codec is on this machine, and when that pays.

A worker measures its link codecs as it starts and reports them; the coordinator's chooser and
`atoll codecs` apply the break-even formula to what was measured, never to a fixed table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from atoll.opdag import DTYPE_BYTES
from compressors import make_compressor
from compressors.base import Compressor, State, meta_of, parse_packet

WIDTH = 1024
"""Elements of a sample's last dimension: the features of one token."""
SPREAD = 1e-3
"""Standard deviation of the samples, near that of gradients."""


@dataclass(frozen=True, slots=True)
class CodecRate:
    """One codec on one thread count; rates count dense bytes."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    bytes_per_element: float  # on the wire, header included


def break_even_bps(share: float, encode_bytes_per_s: float, decode_bytes_per_s: float) -> float:
    """Link rate, in bits per second, below which coding, sending and decoding one after another
    beats sending dense: 8 * (1 - share) / (1/encode + 1/decode).

    ``share`` = wire bytes / dense bytes; 0 where nothing is saved. Where chunks are coded while
    others travel, the link may be as fast as the slower of the two rates.
    Source: papers/compression.md 1.4.
    """
    if share >= 1 or encode_bytes_per_s <= 0 or decode_bytes_per_s <= 0:
        return 0.0
    return 8 * (1 - share) / (1 / encode_bytes_per_s + 1 / decode_bytes_per_s)


def sample(elements: int, seed: int, dtype: str = "float32") -> torch.Tensor:
    """``elements`` Gaussian numbers of SPREAD, as rows of WIDTH where they divide so."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator).mul_(SPREAD).to(getattr(torch, dtype))
    return values.view(-1, WIDTH) if elements % WIDTH == 0 and elements else values


def measure(name: str, ratio: float = 1.0, elements: int = 1 << 18, seed: int = 0) -> CodecRate:
    """Rates of a codec of the catalogue on ``elements`` fp32 Gaussians, with torch's thread count.

    One warm-up and the best of two: some 10 ms for a fast codec at the default size.
    """
    return measure_on(name, sample(elements, seed), ratio, seed)


def measure_on(
    name: str, tensor: torch.Tensor, ratio: float = 1.0, seed: int = 0, *, repeats: int = 2
) -> CodecRate:
    """``measure`` on a tensor of the caller's (not empty). A codec with a state carries it on."""
    return rate_of(make_compressor(name, ratio), tensor, seed, repeats=repeats)


def rate_of(codec: Compressor, tensor: torch.Tensor, seed: int = 0, *, repeats: int = 2) -> CodecRate:
    """``measure_on`` for a codec with settings of its own."""
    meta = meta_of(tensor)
    dense = meta.elements * DTYPE_BYTES[meta.dtype]
    encode_s = decode_s = float("inf")
    wire = 0
    state: State = codec.init(meta)
    for repeat in range(1 + repeats):
        start_s = time.perf_counter()
        packet, after = codec.compress(tensor, state, seed=seed + repeat)
        packed_s = time.perf_counter()
        received = parse_packet(packet.header, packet.payload)
        parsed_s = time.perf_counter()
        codec.decompress(received, state)
        done_s = time.perf_counter()
        state = after
        if repeat:  # the first run loads caches and libraries
            encode_s = min(encode_s, packed_s - start_s)
            decode_s = min(decode_s, done_s - parsed_s)
            wire += packet.wire_bytes
    tiny = 1e-9  # a clock too coarse for a codec that does nothing
    return CodecRate(
        dense / max(encode_s, tiny), dense / max(decode_s, tiny), wire / repeats / max(meta.elements, 1)
    )
