"""A tensor as the product of two thin matrices, after SFT's low-rank cut.

    X [tokens, features] ~ sum over r of s_r u_r v_r^T,   elements of u_r and v_r within [-1, 1]

SFT factorises the *weight* at the cut once, so that r numbers a token cross. Here each tensor is
factorised by itself, without touching the model (a randomised range finder with one power
iteration), so features cross too: 2 r (tokens + features) + 4 r bytes. Factors are fp16, which their
scales keep within [-1, 1]; the scales are fp32. What would not shrink travels dense.

No state: activations of different samples have nothing to carry on. Error: that of a truncated SVD,
up to the factor of a power iteration, and 5e-4 of each factor's elements.
Source: SFT (arXiv 2211.16703), papers/decentralized.md section 5; per-tensor factors are our own.
"""

from __future__ import annotations

import numpy as np
import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import Compressor, Packet, State, meta_of
from compressors.catalogue import codec
from compressors.contrib.low_rank.factors import (
    Matrix,
    dense_payload,
    dense_tensor,
    orthonormal,
    rebuilt,
    sketch,
)
from compressors.contrib.low_rank.ranks import CUT_BYTES, activation_matrix, cut_rank
from compressors.packing import (
    flat,
    payload_array,
    require_float_packet,
    require_floats,
    require_length,
    zeros,
)
from compressors.rates import SCALE_BYTES

START_SEED = 0x534654
TINY = torch.finfo(torch.float32).tiny
FULL_SVD = 64  # sides up to this are factorised exactly: cheap, and no sketch can miss a direction


class LowRank(Compressor):
    """Rank-r activations; the rank follows from the ratio."""

    name = "low_rank"

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """``seed`` is not used: one sketch serves every tensor. An element that is not finite makes
        the whole decoded tensor NaN."""
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        rank, shape = cut_rank(meta, self.ratio), activation_matrix(meta)
        if not rank or shape is None:
            return Packet(self.name, meta, dense_payload(tensor)), None
        left, scales, right = factorise(flat(tensor).float().reshape(shape), rank)
        halves = [left.to(torch.float16), right.to(torch.float16)]
        parts = [scales, *halves]
        payload = b"".join(part.contiguous().numpy().tobytes() for part in parts)
        return Packet(self.name, meta, payload), None

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        """Raises BadFrame unless the payload is exactly the scales and the two factors."""
        meta = packet.meta
        require_float_packet(packet)
        if packet.zero:
            return zeros(meta)
        rank, shape = cut_rank(meta, self.ratio), activation_matrix(meta)
        if not rank or shape is None:
            return dense_tensor(packet)
        rows, columns = shape
        require_length(packet, self.max_payload_bytes(meta))
        at = SCALE_BYTES * rank
        scales = torch.from_numpy(payload_array(packet, np.float32, rank).copy())
        left = _half(packet, rows, rank, at)
        right = _half(packet, columns, rank, at + CUT_BYTES * rank * rows)
        return rebuilt((left * scales) @ right.T, meta)

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return int(codec(self.name).size(meta, self.ratio))


def factorise(matrix: Matrix, rank: int) -> tuple[Matrix, Matrix, Matrix]:
    """U [n, r], s [r], V [m, r] with the largest element of each column 1 and matrix ~ U diag(s) V^T.

    NaN in s where an element of ``matrix`` is not finite.
    """
    largest = matrix.abs().max()
    if not bool(torch.isfinite(largest)):
        rows, columns = matrix.shape
        return torch.zeros(rows, rank), torch.full((rank,), torch.nan), torch.zeros(columns, rank)
    scale = largest.clamp_min(TINY)
    unit = matrix / scale  # so that no product of large elements overflows
    if min(matrix.shape) <= FULL_SVD:
        left, sizes, rows_right = torch.linalg.svd(unit, full_matrices=False)
        left, right = left[:, :rank] * sizes[:rank], rows_right[:rank].T
    else:
        basis = orthonormal(unit @ sketch(matrix.shape[1], rank, START_SEED))
        left = orthonormal(unit @ orthonormal((basis.T @ unit).T))
        right = (left.T @ unit).T
    tall, wide = (side.abs().amax(dim=0).clamp_min(TINY) for side in (left, right))
    return left / tall, tall * wide * scale, right / wide


def _half(packet: Packet, rows: int, rank: int, at: int) -> Matrix:
    values = payload_array(packet, np.float16, rows * rank, at).astype(np.float32)
    if not np.isfinite(values).all():
        raise BadFrame("low_rank: a factor holds an element that is not finite")
    return torch.from_numpy(values.reshape(rows, rank))
