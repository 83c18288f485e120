"""Counts of elements that sparse codecs keep, and the bytes they take: formulas without torch.

A selection group is a row of the last dimension when that has at least 64 elements (one token's
features), else the whole tensor. Every group keeps the same number of elements, the largest whose
expected packet is no longer than dense bytes / ratio, at least one. Rows rather than the whole
tensor for activations, so that tokens stay comparable (papers/decentralized.md 1.7).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from functools import lru_cache
from math import isqrt

from atoll.opdag import TensorMeta
from compressors.bits import packed_bytes
from compressors.indices import expected_bytes, max_bytes

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


# ---------------------------------------------------------------- vectors of exchanges


def vector_bytes(kept: int, total: int) -> float:
    """Expected payload of a sparse ``vector.Vector``: positions, values in 32 bits."""
    return sparse_bytes(kept, total, 1, "fp32")


def most_vector_bytes(most: int, total: int) -> int:
    """No payload of a sparse vector of up to ``most`` of ``total`` elements is longer.

    A stream of fewer positions may be the longer one: all of them take one byte, and from half of them on it
    is a bitmap of one length. Rice's worst case lies within half a bit a position of what it is expected to
    take, which grows with their number.
    """
    kept = min(most, total)
    positions = min(kept, total // 2)
    return 4 * kept + max_bytes(positions, total) + positions // 16 + 8


def vector_kept(total: int, ratio: float) -> int:
    """Elements of a vector of ``total`` whose payload is that of all divided by ``ratio``, at least one."""
    return kept_of_row(1, total, 4.0 * total / ratio, "fp32")


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
    """Return the bytes of a selection over the whole tensor, values in 16 bits."""
    kept = kept_of_row(1, meta.elements, meta.nbytes / ratio, "fp16")
    return sparse_bytes(kept, meta.elements, 1, "fp16")


def whole_size_on(meta: TensorMeta, ratio: float) -> float:
    """The values alone."""
    return float(value_bytes(kept_of_row(1, meta.elements, meta.nbytes / ratio, "fp16"), 1, "fp16"))
