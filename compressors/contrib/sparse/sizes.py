"""Counts of elements that the sparse codecs of ``contrib`` keep, and the bytes they take; no torch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from atoll.opdag import TensorMeta
from compressors.contrib.sparse.ranking import plan_ranks
from compressors.indices import expected_bytes
from compressors.sparse_sizes import kept_of_row, rows_of, topk_size, topk_size_on, value_bytes


def topk2_size(meta: TensorMeta, ratio: float) -> float:
    """Return topk's size with values in 2 bits."""
    return topk_size(meta, ratio, "2bit")


def topk2_size_on(meta: TensorMeta, ratio: float) -> float:
    """Return the bytes of the values alone: exact."""
    return topk_size_on(meta, ratio, "2bit")


# ---------------------------------------------------------------- dct_topk


@dataclass(frozen=True, slots=True)
class DctBlocks:
    """Blocks into which ``dct_topk`` cuts a tensor, as a matrix padded with zeros."""

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
    """Return the ratio of the coefficients' bytes to the payload's, where the tensor's is to be ``ratio``."""
    return max(1.0, ratio * dct_blocks(meta).coefficients.nbytes / max(1, meta.nbytes))


def dct_size(meta: TensorMeta, ratio: float) -> float:
    """Top-k of each block's coefficients."""
    return topk_size(dct_blocks(meta).coefficients, dct_ratio(meta, ratio))


def dct_kept(meta: TensorMeta, ratio: float) -> int:
    """Coefficients of each block whose payload, values in 32 bits, is dense bytes / ratio, at least one."""
    blocks, width = dct_blocks(meta).coefficients.shape
    return kept_of_row(blocks, width, meta.nbytes / ratio, "fp32")


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
    # Zstd-1 on varints, as 0.7.0 wrote positions, against the entropy: measured 1.00 above 3 %, 1.10 to 1.15
    # at 1 %. Both ends derive from it what is kept, so it stays.
    positions = expected_bytes(kept, total) * (1.0 + 5.0 * min(0.02, max(0.0, 0.03 - kept / max(1, total))))
    return _CHAIN_PARTS + _ZSTD_HALVES.get(dtype, _ZSTD_HALF) * 2 * kept + positions


def chain_kept(meta: TensorMeta, ratio: float) -> int:
    """Elements that ``chain`` keeps, over all rows."""
    rows, width = rows_of(meta)
    return rows * _chain_kept_of_row(rows, width, meta.nbytes / ratio, meta.dtype)


def chain_size(meta: TensorMeta, ratio: float) -> float:
    """Values in 16 bits and positions, zstd over both."""
    return _chain_bytes(chain_kept(meta, ratio), meta.elements, meta.dtype)
