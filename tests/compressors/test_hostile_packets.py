"""No packet, however made, breaks a receiver: a clean refusal or a tensor of the agreed meta.

Packets that codecs really make, at the catalogue's settings and at others, are changed at random from
a fixed seed: bits, bytes, extreme integers planted at any place (a decoder that trusts an inner size
would allocate it), cut, grown, spliced with another's. Memory: the process may grow by 512 MiB (torch,
zstd), and what Python and numpy allocate in a decode stays within a multiple of the agreed tensor.
"""

from __future__ import annotations

import random
import resource
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors import CODECS, make_compressor
from compressors.base import (
    Compressor,
    Packet,
    SparseCompressor,
    Support,
    check_packet,
    meta_of,
    parse_packet,
)
from compressors.contrib.chain import Chain, KeepLargest, Zstd
from compressors.contrib.sparse.chunk_topk import ChunkTopK
from compressors.error_feedback import ErrorFeedback
from compressors.random_k import RandomK
from compressors.topk import TopK
from tests.compressors.codec_cases import CASES, normal

SMALL = [
    TensorMeta((3, 5), "float32"),
    TensorMeta((300,), "bfloat16"),
    TensorMeta((6, 128), "float16"),
    TensorMeta((40, 96), "float32"),
]
LARGE = [TensorMeta((100, 101), "float32"), TensorMeta((35, 2003), "bfloat16")]
"""Several chunks of 4,096 elements, and of 65,536."""
LARGE_SHARE = 0.1
"""Of the mutated packets: a decode of a large one takes as long as ten of the others."""
EXTREMES = [0, 1, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]
ROOM_BYTES = 512 << 20
WORK_BYTES = 256 << 10
"""What a decode may take besides its multiple of the tensor: tables, small arrays, messages."""
MULTIPLE = 24

Make = Callable[[], Compressor]
VARIANTS: dict[str, Make] = {
    "chunk_topk of 8 by sign": lambda: ChunkTopK(kept=8, values="1bit"),
    "chunk_topk of 64": lambda: ChunkTopK(kept=64),
    "chunk_topk by sign": lambda: ChunkTopK(60.0, values="1bit"),
    "topk by sample": lambda: TopK(20.0, rows=False, selection="sampled"),
    "topk in fp32": lambda: TopK(density=0.05, values="fp32"),
    "random_k biased": lambda: RandomK(20.0, unbiased=False),
    "error_feedback of chunk_topk": lambda: ErrorFeedback(codec=ChunkTopK(kept=8, values="1bit")),
    "error_feedback of int4_block": lambda: ErrorFeedback(codec=make_compressor("int4_block")),
    "chain of int8_block": lambda: Chain([KeepLargest(20.0)], make_compressor("int8_block")),
    "chain of bf16 and zstd": lambda: Chain([], make_compressor("bf16"), [Zstd()]),
    "chain of two splits": lambda: Chain(
        [KeepLargest(4.0), KeepLargest(2.0)],
        make_compressor("eden", 8.0),
        [Zstd()],
    ),
}
"""Settings that the catalogue's names do not give."""
ALL: dict[str, Make] = {str(case): case.make for case in CASES} | VARIANTS

every_codec = pytest.mark.parametrize("name", ALL)
sparse_codec = pytest.mark.parametrize("name", [n for n, make in ALL.items() if CODECS[make().name].size_on])


@contextmanager
def bounded_memory() -> Iterator[None]:
    """The address space may grow by ROOM_BYTES: beyond, an allocation fails and so does the test."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, before[1]))
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, before)


def mutated(data: bytes, dice: random.Random) -> bytes:
    """``data`` with one to three changes."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(changed) + 1)
        match dice.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << dice.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = dice.randrange(256)
            case 2:
                form = dice.choice(["<B", "<H", "<I", "<Q", ">H", ">I", ">Q"])
                size = struct.calcsize(form)
                changed[at : at + size] = struct.pack(form, dice.choice(EXTREMES) % 256**size)
            case 3:
                del changed[at:]
            case 4:
                changed[at:at] = dice.randbytes(dice.choice([1, 4, 64]))
            case 5:
                del changed[at : at + dice.randint(1, 9)]
            case _:
                changed[at : at + 16] = dice.randbytes(16)
    return bytes(changed)


def receive(codec: Compressor, packet: Packet, meta: TensorMeta, support: Support | None) -> None:
    """What a link does with a packet; ends in a tensor of ``meta``, or raises."""
    if support is None:
        check_packet(packet, codec.name, meta, codec.max_payload_bytes(meta))
        decoded = codec.decompress(packet)
    else:
        sparse: SparseCompressor = codec  # type: ignore[assignment]
        check_packet(packet, codec.name, meta, sparse.max_payload_bytes_on(meta))
        decoded = sparse.decompress_on(packet, support)
    assert meta_of(decoded) == meta
    assert decoded.device.type == "cpu"
    if CODECS[codec.name].size_on and support is None:
        positions = codec.support(packet).positions  # type: ignore[attr-defined]
        if positions.numel():
            assert int(positions.min()) >= 0
            assert int(positions.max()) < meta.elements
            assert bool((positions.diff() > 0).all())


def originals(codec: Compressor, metas: list[TensorMeta], *, on: bool) -> list[tuple[Packet, Support | None]]:
    """Packets that the codec makes, of ordinary, constant and hurt tensors."""
    packets: list[tuple[Packet, Support | None]] = []
    for meta in metas:
        hurt = normal(meta)
        hurt.view(-1)[7] = torch.nan
        for tensor in (normal(meta), torch.ones_like(hurt), torch.zeros_like(hurt), hurt):
            packet, _ = codec.compress(tensor, seed=3)
            if not on:
                packets.append((packet, None))
                continue
            sparse: SparseCompressor = codec  # type: ignore[assignment]
            support = sparse.support(packet)
            packets.append((sparse.compress_on(tensor, support, seed=3), support))
    return packets


def attack(name: str, rounds: int, *, on: bool = False) -> None:
    dice = random.Random(f"4711 {name} {on}")
    codec = ALL[name]()
    small, large = originals(codec, SMALL, on=on), originals(codec, LARGE, on=on)
    with bounded_memory():
        for number in range(rounds):
            packets = large if dice.random() < LARGE_SHARE else small
            packet, support = dice.choice(packets)
            header, payload = packet.header, bytes(packet.payload)
            other = dice.choice(packets)[0]
            match dice.randrange(8):
                case 0:
                    header = mutated(header, dice)
                case 1:
                    payload = bytes(other.payload)
                case 2:
                    parts = Packet(packet.codec, packet.meta, b"", other.params, packet.marks)
                    header = parts.header
                case 3 | 4:
                    params = mutated(packet.params, dice)
                    header = Packet(packet.codec, packet.meta, b"", params, packet.marks).header
                    payload = mutated(payload, dice) if dice.random() < 0.3 else payload
                case _:
                    payload = mutated(payload, dice)
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            try:
                receive(codec, parse_packet(header, payload), packet.meta, support)
            except BadFrame:
                pass
            except Exception as error:
                error.add_note(f"{name}, mutation {number}: {header.hex()} {payload[:4096].hex()}")
                raise
            grown = tracemalloc.get_traced_memory()[1] - held
            assert grown <= MULTIPLE * packet.meta.nbytes + WORK_BYTES, f"{grown} bytes in mutation {number}"


@every_codec
def test_300_mutated_packets_are_refused_or_decode_within_bounded_memory(name: str) -> None:
    attack(name, 300)


@sparse_codec
def test_300_mutated_gradients_at_agreed_positions_are_refused_or_decode(name: str) -> None:
    attack(name, 300, on=True)


@pytest.mark.slow
@every_codec
def test_10_000_mutated_packets_are_refused_or_decode_within_bounded_memory(name: str) -> None:
    attack(name, 10_000)


@pytest.mark.slow
@sparse_codec
def test_10_000_mutated_gradients_at_agreed_positions_are_refused_or_decode(name: str) -> None:
    attack(name, 10_000, on=True)
