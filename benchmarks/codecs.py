"""How fast every codec is, what it leaves to send, and up to which link rate it pays.

    python -m benchmarks.codecs --seed 4711 --json
    python -m benchmarks.codecs --only topk lossless "reused" --elements 1000000

25 M numbers N(0, 1e-3), on one thread and on two. With two threads the tensor's halves are coded at
once, as two links of one worker do; each thread computes alone. GB/s count dense bytes; "x copy" is
against copying the same bytes in the same run on as many threads. Operations that
papers/compression.md 1.1 and 1.3 timed stand beside its figures ("vs notes" = ours / theirs; the notes
give no copy speed of their machine, so only absolute speeds compare). The verdict judges every thread
count for which they have a figure. Break-even: below this link rate, coding, sending and decoding one
after another beats sending dense. ``--json`` ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.codec_operations import COLUMNS, OPERATIONS, Operation
from benchmarks.harness import execute
from compressors import CODECS, make_compressor
from compressors.base import meta_of, parse_packet
from compressors.contrib.sparse.chunk_topk import ChunkTopK
from compressors.speed import SPREAD, break_even_bps
from compressors.topk import TopK

if TYPE_CHECKING:
    from torch import Tensor

    from compressors.base import Compressor

ELEMENTS = 25_000_000
RATIO = 100.0  # of codecs that take one: near 1 % of the elements, with positions
RATIOS = {"qsgd": 4.0, "dct_topk": 32.0, "low_rank": 32.0}
FACTOR = 1.3
"""Not slower than the notes by more than this."""
ENOUGH_S = 0.3
"""Three repeats of a few milliseconds each say more of the machine's other guests than of the work."""

VARIANTS: dict[str, Callable[[], Compressor]] = {
    "topk exact 1 %": lambda: TopK(density=0.01, rows=False),
    "topk sampled 1 %": lambda: TopK(density=0.01, rows=False, selection="sampled"),
    "topk reused 1 %": lambda: TopK(density=0.01, rows=False, selection="reused"),
    "chunk_topk 64/4096, 2 bits": lambda: ChunkTopK(kept=64),
    "chunk_topk 8/4096, sign": lambda: ChunkTopK(kept=8, values="1bit"),
}
Row = dict[str, Any]


def best_s(works: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Seconds until all of ``works``, each on a thread of its own, are done: the best of ``repeats``, and
    of as many as ENOUGH_S takes."""
    took, spent, done = math.inf, 0.0, 0
    with ThreadPoolExecutor(len(works)) as pool:
        while done <= repeats or spent < ENOUGH_S:
            start_s = time.perf_counter()
            if len(works) == 1:
                works[0]()
            else:
                list(pool.map(lambda work: work(), works))
            lasted_s = time.perf_counter() - start_s
            if done:  # the first run loads caches and libraries
                took, spent = min(took, lasted_s), spent + lasted_s
            done += 1
    return took


def sample(elements: int, seed: int) -> Tensor:
    """The numbers as rows, so that they are a matrix and have rows to select in."""
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed)).mul_(SPREAD)
    return values.view(-1, COLUMNS) if elements % COLUMNS == 0 else values


def measure_codec(build: Callable[[], Compressor], parts: Sequence[Tensor], repeats: int) -> Row:
    """Speeds and size of a codec; one instance for each part, with a state that one tensor has warmed."""
    encoding, decoding, wire = [], [], 0
    for part in parts:
        codec, meta = build(), meta_of(part)
        _, state = codec.compress(part, codec.init(meta), seed=1)
        packet, _ = codec.compress(part, state, seed=2)
        wire += packet.wire_bytes
        received = parse_packet(packet.header, bytearray(packet.payload))  # as a link receives it
        encoding.append(lambda c=codec, p=part, s=state: c.compress(p, s, seed=2))
        decoding.append(lambda c=codec, p=received, s=state: c.decompress(p, s))
    dense = sum(part.nbytes for part in parts)
    encode, decode = (dense / best_s(works, repeats) for works in (encoding, decoding))
    return {
        "encode_gb_s": encode / 1e9,
        "decode_gb_s": decode / 1e9,
        "bytes_per_element": wire / sum(part.numel() for part in parts),
        "ratio": dense / wire,
        "break_even_gbit_s": break_even_bps(wire / dense, encode, decode) / 1e9,
    }


def measure_copy(parts: Sequence[Tensor], repeats: int) -> float:
    """Bytes a second of copying into memory that exists."""
    pairs = [(part, torch.empty_like(part)) for part in parts]
    works = [lambda s=source, t=target: t.copy_(s) for source, target in pairs]
    return sum(part.nbytes for part in parts) / best_s(works, repeats)


def measure_operation(operation: Operation, parts: Sequence[Tensor], repeats: int) -> Row:
    """GB/s of dense bytes, beside the notes' figure for so many threads."""
    cast = [part.to(getattr(torch, operation.dtype)) for part in parts]
    took = best_s([operation.prepare(part) for part in cast], repeats)
    gb_s = sum(part.nbytes for part in cast) / took / 1e9
    table = operation.table if len(parts) == 1 else operation.table_two
    least = 1.0 if operation.goal else 1 / FACTOR
    return {"gb_s": gb_s, "notes_gb_s": table, "vs_notes": gb_s / table if table else None, "least": least}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that ``--only`` lets through, for every thread count, printed as it comes."""
    whole = sample(options.elements, options.seed)
    facts: dict[str, Any] = {"elements": options.elements, "seed": options.seed, "threads": {}}
    builders = {name: _catalogued(name) for name in CODECS} | VARIANTS
    for threads in options.threads:
        parts = whole.chunk(threads)
        copy = measure_copy(parts, options.repeats) / 1e9
        found: dict[str, Any] = {"copy_gb_s": copy, "codecs": {}, "operations": {}}
        facts["threads"][str(threads)] = found
        say(f"\n{threads} thread(s); copy {copy:.1f} GB/s\n{'codec':28}{'encode':>8}{'decode':>8} GB/s")
        for name, build in builders.items():
            if _wanted(name, options.only):
                row = measure_codec(build, parts, options.repeats)
                found["codecs"][name] = row | {"encode_x_copy": row["encode_gb_s"] / copy}
                found["codecs"][name]["decode_x_copy"] = row["decode_gb_s"] / copy
                say(codec_line(name, found["codecs"][name]))
        say(f"{'operation':38}{'GB/s':>8}{'x copy':>8}{'notes':>8}{'vs notes':>10}")
        for operation in OPERATIONS:
            if _wanted(operation.name, options.only):
                row = measure_operation(operation, parts, options.repeats)
                found["operations"][operation.name] = row | {"x_copy": row["gb_s"] / copy}
                say(operation_line(operation.name, found["operations"][operation.name]))
    return facts


def slower(facts: dict[str, Any]) -> dict[str, list[str]]:
    """By thread count: operations slower than the notes' by more than FACTOR, and goals not reached."""
    return {
        threads: [name for name, row in _judged(found).items() if row["vs_notes"] < row["least"]]
        for threads, found in facts["threads"].items()
    }


def _judged(found: dict[str, Any]) -> dict[str, Row]:
    """Operations that the notes timed with as many threads."""
    return {name: row for name, row in found["operations"].items() if row["vs_notes"] is not None}


def verdict_lines(facts: dict[str, Any]) -> list[str]:
    """``slower`` for people."""
    lines = []
    for threads, names in slower(facts).items():
        judged = _judged(facts["threads"][threads])
        told = [f"{n} ({judged[n]['vs_notes']:.2f}x, {judged[n]['x_copy']:.2f} x copy)" for n in names]
        lines.append(
            f"{threads} thread(s): {len(judged)} operations judged; slower than the notes / {FACTOR}: "
            f"{', '.join(told) or 'none'}"
        )
    return lines


def codec_line(name: str, row: Row) -> str:
    """One codec for people."""
    return (
        f"{name:28}{row['encode_gb_s']:8.2f}{row['decode_gb_s']:8.2f}"
        f"   {row['encode_x_copy']:5.2f}, {row['decode_x_copy']:5.2f} x copy"
        f"  {row['bytes_per_element']:7.4f} bytes an element ({row['ratio']:.4g}x)"
        f"  pays below {row['break_even_gbit_s']:.3g} Gbit/s"
    )


def operation_line(name: str, row: Row) -> str:
    """One operation for people."""
    notes = f"{row['notes_gb_s']:8.2f}{row['vs_notes']:9.2f}x" if row["vs_notes"] else f"{'-':>8}{'-':>10}"
    return f"{name:38}{row['gb_s']:8.2f}{row['x_copy']:8.2f}{notes}"


def say(line: str) -> None:
    """Print at once: a run takes minutes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _catalogued(name: str) -> Callable[[], Compressor]:
    ratio = RATIOS.get(name, RATIO) if CODECS[name].rated else 1.0
    return lambda: make_compressor(name, ratio)


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(part in name for part in only)


def main() -> int:
    """Measure and print; exit code 1 when an operation falls short of the notes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--seed", type=int, default=4711)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = run(options)
    facts |= {"slower_than_notes": slower(facts), "factor": FACTOR, "cores": os.cpu_count()}
    say("\n" + "\n".join(verdict_lines(facts)))
    if options.json:
        say(json.dumps(facts))
    return 1 if any(facts["slower_than_notes"].values()) else 0


if __name__ == "__main__":
    execute(main)
