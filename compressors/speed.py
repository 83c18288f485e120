"""Speed of a codec on this machine, and the link rate below which it pays.

A worker measures its link codecs when it has joined and reports them; the coordinator's chooser and
`atoll codecs` apply the break-even formula to what was measured, never to a fixed table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from statistics import median

import torch

from atoll.opdag import DTYPE_BYTES
from compressors import make_compressor
from compressors.base import Compressor, State, meta_of, parse_packet

WIDTH = 1024
"""Elements of a sample's last dimension: the features of one token."""
SPREAD = 1e-3
"""Standard deviation of the samples, near that of gradients."""
SUSTAINED_CPU_S = 0.06
"""Fifteen periods of a quota of 4 ms, or more than one of 50 ms."""
SUSTAINED_MOST_S = 1.0


@dataclass(frozen=True, slots=True)
class CodecRate:
    """Speed of a codec on one thread count; rates count dense bytes."""

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


def measure_on(
    name: str, tensor: torch.Tensor, ratio: float = 1.0, seed: int = 0, *, repeats: int = 2
) -> CodecRate:
    """Rates of a codec of the catalogue on ``tensor`` (not empty), with torch's thread count. One warm-up and
    the best of ``repeats``: some 10 ms for a fast codec. A codec with a state carries it on."""
    return rate_of(make_compressor(name, ratio), tensor, seed, repeats=repeats)


def rate_of(codec: Compressor, tensor: torch.Tensor, seed: int = 0, *, repeats: int = 2) -> CodecRate:
    """``measure_on`` for a codec with settings of its own."""
    timed = islice(_rounds(codec, tensor, seed), 1, 1 + repeats)  # the first loads caches and libraries
    encoding, decoding, wire = zip(*timed, strict=True)
    return _rate(tensor, min(encoding), min(decoding), sum(wire) / repeats)


def sustained_on(
    name: str,
    tensor: torch.Tensor,
    ratio: float = 1.0,
    seed: int = 0,
    *,
    cpu_s: float = SUSTAINED_CPU_S,
    most_s: float = SUSTAINED_MOST_S,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.thread_time,
) -> CodecRate:
    """Rates that a codec of the catalogue can keep up on ``tensor`` (not empty), by ``clock``.

    Encodes and decodes in turn until this thread has computed for ``cpu_s`` or ``most_s`` have passed.
    All of that time counts, divided as the medians of both are. Under a quota of processor time a
    short burst fits into what is left of a period, and the kernel lets a thread wait for the next one
    when it comes back from a system call. So clocks around the two see little of it (measured at an
    eighth of a core: 3.8 ms of 24.7).
    """
    rounds = _rounds(make_compressor(name, ratio), tensor, seed, clock)
    return sustained(rounds, tensor, cpu_s=cpu_s, most_s=most_s, clock=clock, cpu_clock=cpu_clock)


def sustained(
    rounds: Iterator[tuple[float, float, int]],
    tensor: torch.Tensor,
    *,
    cpu_s: float = SUSTAINED_CPU_S,
    most_s: float = SUSTAINED_MOST_S,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.thread_time,
) -> CodecRate:
    """``sustained_on`` for anything whose rounds give the seconds there, the seconds back, and bytes."""
    next(rounds)  # loads caches and libraries
    start_s, start_cpu_s = clock(), cpu_clock()
    taken = []
    for one in rounds:
        taken.append(one)
        if cpu_clock() - start_cpu_s >= cpu_s or clock() - start_s >= most_s:
            break
    round_s = (clock() - start_s) / len(taken)
    encoding, decoding, wire = zip(*taken, strict=True)
    encode_s, decode_s = median(encoding), median(decoding)
    share = encode_s / (encode_s + decode_s) if encode_s + decode_s else 0.5
    return _rate(tensor, share * round_s, (1 - share) * round_s, sum(wire) / len(wire))


def _rounds(
    codec: Compressor, tensor: torch.Tensor, seed: int, clock: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[float, float, int]]:
    """(seconds encoding, seconds decoding, wire bytes) of one tensor after the other, without end."""
    state: State = codec.init(meta_of(tensor))
    for number in count(seed):
        start_s = clock()
        packet, after = codec.compress(tensor, state, seed=number)
        packed_s = clock()
        received = parse_packet(packet.header, packet.payload)
        parsed_s = clock()
        codec.decompress(received, state)
        yield packed_s - start_s, clock() - parsed_s, packet.wire_bytes
        state = after


def _rate(tensor: torch.Tensor, encode_s: float, decode_s: float, wire: float) -> CodecRate:
    dense = tensor.numel() * DTYPE_BYTES[meta_of(tensor).dtype]
    tiny = 1e-9  # a clock too coarse for a codec that does nothing
    return CodecRate(dense / max(encode_s, tiny), dense / max(decode_s, tiny), wire / max(tensor.numel(), 1))
