"""How many elements sparse codecs keep, and the bytes they take: formulas without torch.

A selection group is a row of the last dimension when that has at least 64 elements (one token's
features), else the whole tensor. Every group keeps the same number of elements, the largest whose
expected packet is no longer than dense bytes / ratio, at least one. Rows rather than the whole
tensor for activations, so that tokens stay comparable (papers/decentralized.md 1.7).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

from atoll.opdag import TensorMeta
from compressors.bits import packed_bytes
from compressors.indices import expected_bytes, max_bytes
from compressors.ranking import plan_ranks

MIN_ROW = 64
"""Elements of the last dimension from which each row selects for itself."""
VALUE_CODECS = ("fp32", "fp16", "2bit", "1bit")
"""The place is the wire's code: append, never reorder."""
BITS = {"fp32": 32, "fp16": 16, "2bit": 2, "1bit": 1}
EXPONENT = struct.Struct("<h")  # fp16: values are scaled by 2 to this
LEVELS = struct.Struct("<f2e")  # 2bit: largest scale; |v|/scale below and above the mean
TOP = struct.Struct("<f")  # 1bit: largest scale


def rows_of(meta: TensorMeta) -> tuple[int, int]:
    """(groups, elements of each). One group of no elements for an empty tensor."""
    width = meta.shape[-1] if meta.shape else 1
    if width < MIN_ROW or not meta.elements:
        return 1, meta.elements
    return meta.elements // width, width


def value_bytes(count: int, groups: int, kind: str) -> int:
    """Bytes of ``count`` values in ``groups`` equal groups: exact."""
    if not count:
        return 0
    if kind == "fp32":
        return 4 * count
    if kind == "fp16":
        return EXPONENT.size + 2 * count
    head = LEVELS.size if kind == "2bit" else TOP.size
    return head + groups + packed_bytes(count, BITS[kind])


def sparse_bytes(kept: int, total: int, groups: int, kind: str) -> float:
    """Expected payload of ``kept`` of ``total`` elements with their positions."""
    return value_bytes(kept, groups, kind) + expected_bytes(kept, total)


def max_sparse_bytes(kept: int, total: int, groups: int, kind: str) -> int:
    """No such payload is longer."""
    return value_bytes(kept, groups, kind) + max_bytes(kept, total)


@lru_cache(maxsize=4096)
def kept_of_row(rows: int, width: int, budget_bytes: float, kind: str) -> int:
    """The k above: 1 <= k <= width, 0 for an empty tensor."""
    if not width:
        return 0
    return max(
        1,
        bisect_right(
            range(1, width + 1),
            budget_bytes,
            key=lambda kept: sparse_bytes(kept * rows, rows * width, rows, kind),
        ),
    )


def topk_kept(meta: TensorMeta, ratio: float, kind: str = "fp16") -> int:
    """Elements that ``topk`` keeps of a tensor of ``meta``, over all its rows, with values of ``kind``."""
    rows, width = rows_of(meta)
    return rows * kept_of_row(rows, width, meta.nbytes / ratio, kind)


def topk_size(meta: TensorMeta, ratio: float, kind: str = "fp16") -> float:
    """Values of ``kind`` and positions as ``indices.expected_bytes`` says."""
    return sparse_bytes(topk_kept(meta, ratio, kind), meta.elements, rows_of(meta)[0], kind)


def topk_size_on(meta: TensorMeta, ratio: float, kind: str = "fp16") -> float:
    """The values alone: exact."""
    return float(value_bytes(topk_kept(meta, ratio, kind), rows_of(meta)[0], kind))


def topk2_size(meta: TensorMeta, ratio: float) -> float:
    """Of ``topk2``: values in 2 bits."""
    return topk_size(meta, ratio, "2bit")


def topk2_size_on(meta: TensorMeta, ratio: float) -> float:
    """The values alone: exact."""
    return topk_size_on(meta, ratio, "2bit")


# ---------------------------------------------------------------- random_k


def random_k_of(meta: TensorMeta, ratio: float) -> int:
    """Elements that ``random_k`` keeps in the mean."""
    return min(meta.elements, max(1, int(meta.elements / ratio)))


def random_k_most(kept: int, total: int) -> int:
    """And at most: 8 standard deviations more."""
    return min(total, kept + 8 * isqrt(kept) + 16)


def random_k_size(meta: TensorMeta, ratio: float) -> float:
    """Values of the tensor's own dtype alone."""
    return random_k_of(meta, ratio) * meta.nbytes / max(1, meta.elements)


# ---------------------------------------------------------------- gaussian_k


def whole_size(meta: TensorMeta, ratio: float) -> float:
    """Of a selection over the whole tensor, values in 16 bits."""
    kept = kept_of_row(1, meta.elements, meta.nbytes / ratio, "fp16")
    return sparse_bytes(kept, meta.elements, 1, "fp16")


def whole_size_on(meta: TensorMeta, ratio: float) -> float:
    """The values alone."""
    return float(value_bytes(kept_of_row(1, meta.elements, meta.nbytes / ratio, "fp16"), 1, "fp16"))


# ---------------------------------------------------------------- dct_topk


@dataclass(frozen=True, slots=True)
class DctBlocks:
    """How ``dct_topk`` cuts a tensor, as a matrix padded with zeros, into blocks."""

    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def coefficients(self) -> TensorMeta:
        """[blocks, coefficients of a block]."""
        down, across = -(-self.rows // self.block_rows), -(-self.columns // self.block_columns)
        return TensorMeta((down * across, self.block_rows * self.block_columns), "float32")


def dct_blocks(meta: TensorMeta) -> DctBlocks:
    """The last dimension as columns, all others as rows; blocks of up to 64 by 64."""
    columns = meta.shape[-1] if meta.shape else 1
    rows = meta.elements // columns if columns else 0
    return DctBlocks(rows, columns, _block_side(rows), _block_side(columns))


def _block_side(size: int) -> int:
    """The largest divisor from 16 to 64; else 64 with padding, or all of a short side."""
    if size <= 64:
        return max(1, size)
    return next((side for side in range(64, 15, -1) if size % side == 0), 64)


def dct_ratio(meta: TensorMeta, ratio: float) -> float:
    """Of the coefficients' bytes to the payload's, where the tensor's are to be ``ratio``."""
    return max(1.0, ratio * dct_blocks(meta).coefficients.nbytes / max(1, meta.nbytes))


def dct_size(meta: TensorMeta, ratio: float) -> float:
    """Top-k of each block's coefficients."""
    return topk_size(dct_blocks(meta).coefficients, dct_ratio(meta, ratio))


# ---------------------------------------------------------------- chunk_topk

CHUNK = 4096


def chunks_of(meta: TensorMeta, chunk: int = CHUNK) -> tuple[int, int]:
    """(chunks, elements of each): the last is padded; a shorter tensor is one chunk."""
    width = min(chunk, meta.elements)
    return (-(-meta.elements // width), width) if width else (0, 0)


def chunk_bytes(meta: TensorMeta, chunk: int, kept: int, kind: str) -> float:
    """Expected payload of ``kept`` elements a chunk, positions ranked or in a Rice stream."""
    chunks, width = chunks_of(meta, chunk)
    kept = min(kept, width)
    positions = expected_bytes(chunks * kept, chunks * width)
    plan = plan_ranks(width, kept)
    if plan is not None:
        positions = min(positions, plan.bytes_of(chunks))
    return value_bytes(chunks * kept, chunks, kind) + positions


def chunk_kept(meta: TensorMeta, ratio: float, chunk: int = CHUNK, kind: str = "2bit") -> int:
    """The most elements a chunk whose expected payload is dense bytes / ratio, at least one."""
    width = chunks_of(meta, chunk)[1]
    if not width:
        return 0
    budget = meta.nbytes / ratio
    return max(1, bisect_right(range(1, width + 1), budget, key=lambda k: chunk_bytes(meta, chunk, k, kind)))


def chunk_size(meta: TensorMeta, ratio: float) -> float:
    """At the catalogue's settings: chunks of 4,096, values of 2 bits."""
    return chunk_bytes(meta, CHUNK, chunk_kept(meta, ratio), "2bit")


# ---------------------------------------------------------------- chain

_CHAIN_PARTS = 3 * (4 + 1)  # a length and zstd's flag each
_ZSTD_HALVES = {"bfloat16": 0.62}
_ZSTD_HALF = 0.81
"""zstd-1 on the 16-bit values of a Gaussian's largest: 0.78 to 0.82, of heavier tails up to 0.89;
of bfloat16, which leaves three bits of each empty, less."""


@lru_cache(maxsize=4096)
def _chain_kept_of_row(rows: int, width: int, budget_bytes: float, dtype: str) -> int:
    if not width:
        return 0
    return max(
        1,
        bisect_right(
            range(1, width + 1), budget_bytes, key=lambda kept: _chain_bytes(rows * kept, rows * width, dtype)
        ),
    )


def _chain_bytes(kept: int, total: int, dtype: str) -> float:
    # zstd-1 on delta-varints against the entropy: measured 1.00 above 3 %, 1.10 to 1.15 at 1 %.
    positions = expected_bytes(kept, total) * (1.0 + 5.0 * min(0.02, max(0.0, 0.03 - kept / max(1, total))))
    return _CHAIN_PARTS + _ZSTD_HALVES.get(dtype, _ZSTD_HALF) * 2 * kept + positions


def chain_kept(meta: TensorMeta, ratio: float) -> int:
    """Elements that ``chain`` keeps, over all rows."""
    rows, width = rows_of(meta)
    return rows * _chain_kept_of_row(rows, width, meta.nbytes / ratio, meta.dtype)


def chain_size(meta: TensorMeta, ratio: float) -> float:
    """Values in 16 bits, delta-varints, zstd over both."""
    return _chain_bytes(chain_kept(meta, ratio), meta.elements, meta.dtype)
