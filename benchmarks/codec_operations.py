"""The operations that the notes timed (papers/compression.md 1.1, 1.3), as this package does them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compressors import make_compressor
from compressors.base import meta_of
from compressors.contrib.low_rank import acp_sgd
from compressors.contrib.low_rank.factors import orthonormal, sketch
from compressors.contrib.sparse.gaussian_k import GaussianK
from compressors.indices import encoded
from compressors.packing import empty, flat
from compressors.random_k import draw_positions
from compressors.selection import above, bits_of, largest, place, sampled_threshold, scatter, values_at
from compressors.topk import TopK

if TYPE_CHECKING:
    from torch import Tensor

Work = Callable[[], Any]
COLUMNS = 5000
"""Of the sample as a matrix; the notes had 4096 x 6000."""
BLOCK = 1 << 19
"""Elements: 2 MiB of each operand."""


@dataclass(frozen=True, slots=True)
class Operation:
    """``prepare`` does what is not timed and returns the work; table in GB/s of dense fp32."""

    name: str
    prepare: Callable[[Tensor], Work]
    table: float
    table_two: float | None = None  # with two threads, where the notes have it
    dtype: str = "float32"  # of the sample, and of the GB
    goal: bool = False  # ``table`` is not the notes' but what is to be reached


def _kept(tensor: Tensor, density: float) -> int:
    return max(1, round(density * tensor.numel()))


def _exact(density: float) -> Callable[[Tensor], Work]:
    def prepare(tensor: Tensor) -> Work:
        return lambda: largest(bits_of(tensor), _kept(tensor, density))

    return prepare


def _gaussian(density: float) -> Callable[[Tensor], Work]:
    def prepare(tensor: Tensor) -> Work:
        codec, meta = GaussianK(density=density), meta_of(tensor)
        return lambda: codec.select(bits_of(tensor), meta, None)

    return prepare


def _sampled(density: float) -> Callable[[Tensor], Work]:
    def prepare(tensor: Tensor) -> Work:
        kept = _kept(tensor, density)
        return lambda: above(bits_of(tensor), sampled_threshold(bits_of(tensor), kept))

    return prepare


def _reused(density: float) -> Callable[[Tensor], Work]:
    def prepare(tensor: Tensor) -> Work:
        key = sampled_threshold(bits_of(tensor), _kept(tensor, density))
        return lambda: above(bits_of(tensor), key)

    return prepare


def _whole_topk(tensor: Tensor) -> Work:
    """Threshold kept, fp16 values, positions by density: the whole packet."""
    codec = TopK(density=0.01, selection="reused", rows=False, values="fp16")
    _, state = codec.compress(tensor, codec.init(meta_of(tensor)))
    return lambda: codec.compress(tensor, state)


def _scatter(density: float) -> Callable[[Tensor], Work]:
    def prepare(tensor: Tensor) -> Work:
        bits, meta = bits_of(tensor), meta_of(tensor)
        positions = above(bits, sampled_threshold(bits, _kept(tensor, density)))
        # As the notes timed it, into memory at hand: a packet's decode (the codec's own row) touches
        # new pages, which costs twice as much.
        values = torch.from_numpy(values_at(bits, positions, meta.dtype))
        target = scatter(positions, values.numpy(), meta)
        memory = target.view(-1).numpy().view(np.uint8)

        def work() -> None:
            memory.fill(0)  # of bytes: the system's own, twice as fast as of wider elements
            place(target, positions, values)

        return work

    return prepare


def _residual(density: float) -> Callable[[Tensor], Work]:
    """The gradient added to the residual, which is zero then where elements were kept. The pass over memory
    is what it costs: a block is zeroed while the caches still hold it. A codec that rounds leaves its
    rounding there, and selects between the two: ``error_feedback``'s own row."""

    def prepare(tensor: Tensor) -> Work:
        bits, gradient = bits_of(tensor), flat(tensor)
        positions = above(bits, sampled_threshold(bits, _kept(tensor, density)))
        residual, nothing = empty(meta_of(gradient)).zero_(), torch.zeros(len(positions))
        starts = range(0, len(bits), BLOCK)

        def work() -> Tensor:
            ends = np.searchsorted(positions, [start + BLOCK for start in starts]).tolist()
            first = 0
            for start, end in zip(starts, ends, strict=True):
                residual[start : start + BLOCK].add_(gradient[start : start + BLOCK])
                place(residual, positions[first:end], nothing[first:end])
                first = end
            return residual

        return work

    return prepare


def _encode(name: str, ratio: float = 1.0) -> Callable[[Tensor], Work]:
    def prepare(tensor: Tensor) -> Work:
        codec = make_compressor(name, ratio)
        return lambda: codec.compress(tensor, seed=1)

    return prepare


def _decode(name: str, ratio: float = 1.0) -> Callable[[Tensor], Work]:
    def prepare(tensor: Tensor) -> Work:
        codec = make_compressor(name, ratio)
        packet, _ = codec.compress(tensor, seed=1)
        return lambda: codec.decompress(packet)

    return prepare


def _draw(tensor: Tensor) -> Work:
    return lambda: draw_positions(tensor.numel(), _kept(tensor, 0.01), 7)


def _half_step(rank: int) -> Callable[[Tensor], Work]:
    """One factor and its orthonormal columns, ready for the next step."""

    def prepare(tensor: Tensor) -> Work:
        matrix = tensor.view(-1, COLUMNS if tensor.numel() % COLUMNS == 0 else tensor.shape[-1])
        basis = orthonormal(sketch(matrix.shape[1], rank, 7))
        return lambda: acp_sgd.next_basis(acp_sgd.phase(matrix, basis, 0))

    return prepare


def _positions(tensor: Tensor) -> Work:
    bits, total = bits_of(tensor), tensor.numel()
    positions = above(bits, sampled_threshold(bits, _kept(tensor, 0.01)))
    return lambda: encoded(positions, total, "zstd")


OPERATIONS = (
    Operation("exact selection, 0.1 %", _exact(0.001), 0.41, 0.43),
    Operation("exact selection, 1 %", _exact(0.01), 0.25, 0.24),
    Operation("exact selection, 10 %", _exact(0.1), 0.26, 0.28),
    Operation("gaussian_k selection, 0.1 %", _gaussian(0.001), 0.61, 0.49),
    Operation("gaussian_k selection, 1 %", _gaussian(0.01), 0.56, 1.08),
    Operation("gaussian_k selection, 10 %", _gaussian(0.1), 0.49, 1.22),
    Operation("sampled threshold, 0.1 %", _sampled(0.001), 1.63, 1.16),
    Operation("sampled threshold, 1 %", _sampled(0.01), 1.45, 2.55),
    Operation("sampled threshold, 10 %", _sampled(0.1), 1.14, 3.25),
    Operation("reused threshold, 0.1 %", _reused(0.001), 6.6, 9.5),
    Operation("reused threshold, 1 %", _reused(0.01), 5.5, 8.3),
    Operation("reused threshold, 10 %", _reused(0.1), 2.1, 3.7),
    Operation("reused threshold, 1 %, whole packet", _whole_topk, 4.0, goal=True),
    Operation("residual add and zero kept, 10 %", _residual(0.1), 11, 15),
    Operation("sparse decode, 1 %", _scatter(0.01), 28, 35),
    Operation("sparse decode, 10 %", _scatter(0.1), 15, 21),
    Operation("sign encode", _encode("sign"), 2.25, 1.7),
    Operation("sign decode", _decode("sign"), 7.0, 6.3),
    Operation("int8_block encode", _encode("int8_block"), 1.18, 0.83),
    Operation("int8_block decode", _decode("int8_block"), 3.1, 3.0),
    Operation("qsgd encode, 8 bit", _encode("qsgd", 4.0), 0.29, 0.37),
    Operation("terngrad encode", _encode("terngrad"), 0.35, 0.24),
    Operation("fp16 encode", _encode("fp16"), 5.5, 4.0),
    Operation("fp16 decode", _decode("fp16"), 3.2, 3.0),
    Operation("bf16 encode", _encode("bf16"), 4.7, 4.2),
    Operation("bf16 decode", _decode("bf16"), 3.0, 4.8),
    Operation("random_k draw, 1 %", _draw, 22, 23),
    Operation("low rank half step, r=4", _half_step(4), 1.03, 1.65),
    Operation("low rank half step, r=32", _half_step(32), 0.84, 1.4),
    Operation("lossless encode, fp32", _encode("lossless"), 0.79, 1.5),
    Operation("lossless encode, bf16", _encode("lossless"), 0.68, 1.1, "bfloat16"),
    Operation("varint and zstd positions encode, 1 %", _positions, 26),
)
"""Of the notes' table without what this package does not do: a Bernoulli mask for random-k, zstd over raw
floats, the fixed 4-bit exponent code and blosc2."""
