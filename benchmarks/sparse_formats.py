"""Bits of a kept element on the wire: this format against those of the field, at the same mathematics.

    python benchmarks/sparse_formats.py --elements 25000000 --seed 4711 --json

Top-k of chunks of 4,096 of a Gaussian tensor: 64 with values of 2 bits (SparseLoCo: positions of 12
bits) and 8 with the sign (Psyche: positions of 16 bits, no scale). Ours is measured on the bytes of the
packet, header included; the field's are formulas of their formats' bytes. Every packet is decoded and
its positions and signs are checked against a sort. Speeds: best of some, GB/s of the dense float32,
selection included and apart. Bound: log2 C(4096, k) bits for the positions (papers/peers.md 7.5).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.harness import execute
from compressors.contrib.sparse.chunk_topk import ChunkTopK, code_positions
from compressors.indices import decode_positions, encode_positions
from compressors.selection import bits_of, largest_in_rows

CHUNK = 4096
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Field:
    """One published format: what it keeps, and the bits of a chunk in its own encoding."""

    name: str
    kept: int
    values: str
    value_bits: int
    index_bits: int
    scale_bits: int

    @property
    def ratio(self) -> float:
        return 32 * CHUNK / (self.kept * (self.index_bits + self.value_bits) + self.scale_bits)


FIELDS = (
    Field("SparseLoCo", 64, "2bit", 2, 12, 0),
    Field("Psyche", 8, "1bit", 1, 16, 0),
)


def best(call: Callable[[], Result], repetitions: int) -> tuple[float, Result]:
    """Seconds of the fastest run, and what it gave."""
    seconds, result = math.inf, call()
    for _ in range(repetitions):
        begin = time.perf_counter()
        result = call()
        seconds = min(seconds, time.perf_counter() - begin)
    return seconds, result


def check(tensor: torch.Tensor, decoded: torch.Tensor, kept: int) -> None:
    """The decoded elements are the largest of each chunk, with their signs."""
    whole = tensor.numel() // CHUNK * CHUNK
    rows, found = tensor[:whole].view(-1, CHUNK), decoded[:whole].view(-1, CHUNK)
    assert bool((found.count_nonzero(1) == kept).all())
    least = torch.where(found != 0, rows.abs(), torch.inf).min(1).values
    assert bool(((rows.abs() > least[:, None]).sum(1) < kept).all())
    assert bool((rows.sign() == found.sign())[found != 0].all())


def measure(field: Field, tensor: torch.Tensor, repetitions: int) -> dict[str, Any]:
    """One line of the table."""
    codec = ChunkTopK(chunk=CHUNK, kept=field.kept, values=field.values)
    encode_s, (packet, _) = best(lambda: codec.compress(tensor), repetitions)
    decode_s, decoded = best(lambda: codec.decompress(packet), repetitions)
    check(tensor, decoded, field.kept)
    bits = bits_of(tensor)
    select_s, positions = best(lambda: largest_in_rows(bits, CHUNK, field.kept), repetitions)
    chunks = tensor.numel() // CHUNK
    code_s, coded = best(lambda: code_positions(positions, chunks, CHUNK, field.kept), repetitions)
    rice_s, rice = best(lambda: encode_positions(positions, tensor.numel()), repetitions)
    assert np.array_equal(decode_positions(rice, len(positions), tensor.numel()), positions)
    dense = tensor.numel() * 4
    return {
        "format": field.name,
        "kept": field.kept,
        "value_bits": field.value_bits,
        "bits_per_index": 8 * len(coded) / len(positions),
        "bound_bits_per_index": math.log2(math.comb(CHUNK, field.kept)) / field.kept,
        "rice_bits_per_index": 8 * len(rice) / len(positions),
        "field_bits_per_index": field.index_bits,
        "scale_bits_per_chunk": 8,
        "wire_bytes": packet.wire_bytes,
        "ratio": dense / packet.wire_bytes,
        "field_ratio": field.ratio,
        "encode_GB_per_s": dense / encode_s / 1e9,
        "decode_GB_per_s": dense / decode_s / 1e9,
        "select_GB_per_s": dense / select_s / 1e9,
        "index_encode_GB_per_s": dense / code_s / 1e9,
        "rice_encode_GB_per_s": dense / rice_s / 1e9,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=25_000_000, help="rounded down to whole chunks")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=4711)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    elements = max(1, options.elements // CHUNK) * CHUNK
    values = np.random.default_rng(options.seed).standard_normal(elements, dtype=np.float32)
    lines = [measure(field, torch.from_numpy(values), options.repetitions) for field in FIELDS]
    print(f"{'format':12} {'kept':>5} {'bits/index':>10} {'bound':>6} {'field':>6} {'ratio':>8} {'field':>7}")
    for line in lines:
        print(
            f"{line['format']:12} {line['kept']:5} {line['bits_per_index']:10.3f}"
            f" {line['bound_bits_per_index']:6.2f} {line['field_bits_per_index']:6}"
            f" {line['ratio']:7.1f}x {line['field_ratio']:6.1f}x"
            f"   encode {line['encode_GB_per_s']:.2f} (select {line['select_GB_per_s']:.2f},"
            f" positions {line['index_encode_GB_per_s']:.1f}), decode {line['decode_GB_per_s']:.2f} GB/s"
        )
    if options.json:
        print(json.dumps({"seed": options.seed, "elements": elements, "formats": lines}))


if __name__ == "__main__":
    execute(main)
