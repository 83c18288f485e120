"""Matrices and ranks of the low-rank codecs: which matrix a tensor is, and what rank a ratio allows.

No torch: the catalogue plans with these sizes. A factor pair of rank r over n x m takes
r * (n + m) numbers instead of n * m.
"""

from __future__ import annotations

from math import prod

from atoll.opdag import DTYPE_BYTES, TensorMeta
from compressors.rates import SCALE_BYTES

MAX_RANK = 256
"""Above, orthonormalising costs more than the bytes are worth on any link measured."""
FACTOR_BYTES = 4  # PowerSGD's and ACP-SGD's factors are float32: they are summed
CUT_BYTES = 2  # low_rank's are float16, scaled to at most 1


def gradient_matrix(meta: TensorMeta) -> tuple[int, int] | None:
    """Rows and columns of a gradient: the first dimension against the others, as in PowerSGD.
    None for vectors and what is empty, which travel dense."""
    if len(meta.shape) < 2 or not meta.elements:
        return None
    return meta.shape[0], prod(meta.shape[1:])


def activation_matrix(meta: TensorMeta) -> tuple[int, int] | None:
    """Tokens against features: all dimensions before the last, and the last. None as above."""
    if len(meta.shape) < 2 or not meta.elements:
        return None
    return prod(meta.shape[:-1]), meta.shape[-1]


def powersgd_rank(meta: TensorMeta, ratio: float) -> int:
    """Largest r with FACTOR_BYTES * r * (n + m) <= dense / ratio, at least 1; 0: travels dense."""
    matrix = gradient_matrix(meta)
    if matrix is None:
        return 0
    rank = _limited(matrix, meta.nbytes / ratio / (FACTOR_BYTES * sum(matrix)))
    return rank if FACTOR_BYTES * rank * sum(matrix) < meta.nbytes else 0


def acp_rank(meta: TensorMeta, ratio: float) -> int:
    """Largest r whose mean packet, FACTOR_BYTES * r * (n + m) / 2, is within dense / ratio; 0 where
    the larger of the two factors would not be smaller than dense."""
    matrix = gradient_matrix(meta)
    if matrix is None:
        return 0
    rank = _limited(matrix, 2 * meta.nbytes / ratio / (FACTOR_BYTES * sum(matrix)))
    most = (meta.nbytes - 1) // (FACTOR_BYTES * max(matrix))
    return min(rank, most)


def cut_rank(meta: TensorMeta, ratio: float) -> int:
    """Largest r with CUT_BYTES * r * (n + m) + SCALE_BYTES * r <= dense / ratio; 0 as above."""
    matrix = activation_matrix(meta)
    if matrix is None:
        return 0
    each = CUT_BYTES * sum(matrix) + SCALE_BYTES
    rank = _limited(matrix, meta.nbytes / ratio / each)
    return rank if rank * each < meta.nbytes else 0


def powersgd_bytes(meta: TensorMeta, ratio: float) -> float:
    """Return the bytes of both factors, or of the tensor uncompressed."""
    rank, matrix = powersgd_rank(meta, ratio), gradient_matrix(meta)
    return float(FACTOR_BYTES * rank * sum(matrix)) if rank and matrix else _dense(meta)


def acp_bytes(meta: TensorMeta, ratio: float) -> float:
    """The mean of the two factors, which alternate, or the tensor as it is."""
    rank, matrix = acp_rank(meta, ratio), gradient_matrix(meta)
    return FACTOR_BYTES * rank * sum(matrix) / 2 if rank and matrix else _dense(meta)


def cut_bytes(meta: TensorMeta, ratio: float) -> float:
    """Return the bytes of both factors and their scales, or of the tensor uncompressed."""
    rank, matrix = cut_rank(meta, ratio), activation_matrix(meta)
    return float(rank * (CUT_BYTES * sum(matrix) + SCALE_BYTES)) if rank and matrix else _dense(meta)


def _limited(matrix: tuple[int, int], rank: float) -> int:
    return max(1, min(int(rank), *matrix, MAX_RANK))


def _dense(meta: TensorMeta) -> float:
    return float(meta.elements * DTYPE_BYTES[meta.dtype])
