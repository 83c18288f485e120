"""DCT top-k: the largest coefficients of each block's discrete cosine transform.

    Q = TopK_k(C_a X C_b^T);  v' = C_a^T Q C_b;  C orthonormal (DCT-II), X a block of up to 64 by 64

The last dimension gives the columns, all others the rows; a side that no divisor from 16 to 64 cuts is
padded with zeros. The codec is DeMo's extraction of what moves most; its momentum (delta <- beta delta +
eta g - v') is the caller's, or ``error_feedback`` around this codec (beta = 1).
Bounds: ||v - v'||**2 <= (1 - k/c) ||v||**2 a block of c elements, for the transform keeps lengths. A block
that holds an element that is not finite decodes to NaN. Values beyond 2**120 are safe: transformed
at 2**-7 of their size. Source: DeMo (papers/decentralized.md 8.6).
"""

from __future__ import annotations

from functools import lru_cache
from math import cos, pi, sqrt

import torch
from torch import Tensor

from atoll.opdag import TensorMeta
from compressors.base import Compressor, Packet, State, meta_of
from compressors.contrib.sparse.sizes import DctBlocks, dct_blocks, dct_ratio
from compressors.packing import TORCH_DTYPES, flat, require_floats, zeros
from compressors.topk import TopK

_ROOM = 2.0**-7  # the transform of a block adds up to 64 values of one sign


class DctTopK(Compressor):
    """The codec above. ``ratio``: dense bytes / payload bytes aimed at."""

    name = "dct_topk"

    def __init__(self, ratio: float = 32.0) -> None:
        """Raises ValueError unless ``ratio`` is at least 1."""
        if not ratio >= 1.0:
            raise ValueError(f"DCT top-k of ratio {ratio}; at least 1")
        self.ratio = ratio

    def compress(self, tensor: Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        if not meta.elements:
            return Packet(self.name, meta), None
        values = flat(tensor).to(torch.float32) * _ROOM
        # NaN reaches every coefficient of its block; an infinity could be decoded as a large number.
        values.masked_fill_(~torch.isfinite(values), torch.nan)
        packet, _ = self._topk(meta).compress(dct_of(values, dct_blocks(meta)))
        return Packet(self.name, meta, packet.payload, packet.params), None

    def decompress(self, packet: Packet, state: State = None) -> Tensor:
        meta = packet.meta
        if packet.zero or not meta.elements:
            return zeros(meta)
        blocks, inner = dct_blocks(meta), self._topk(meta)
        coded = Packet(inner.name, blocks.coefficients, packet.payload, packet.params)
        values = inverse_dct(inner.decompress(coded), blocks)
        largest = torch.finfo(TORCH_DTYPES[meta.dtype]).max
        # Missing coefficients may overshoot: what was finite stays so.
        values = values.clamp_(-largest * _ROOM, largest * _ROOM).div_(_ROOM)
        return values.to(TORCH_DTYPES[meta.dtype]).reshape(meta.shape)

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return self._topk(meta).max_payload_bytes(dct_blocks(meta).coefficients) if meta.elements else 0

    def _topk(self, meta: TensorMeta) -> TopK:
        return TopK(dct_ratio(meta, self.ratio))


@lru_cache(maxsize=64)
def _basis(size: int) -> Tensor:
    """C: row f is the cosine of frequency f; C C^T = 1. Not to be written to."""
    scale = [sqrt((1.0 if f == 0 else 2.0) / size) for f in range(size)]
    rows = [[scale[f] * cos(pi * (x + 0.5) * f / size) for x in range(size)] for f in range(size)]
    return torch.tensor(rows, dtype=torch.float32)


def dct_of(values: Tensor, blocks: DctBlocks) -> Tensor:
    """Coefficients [blocks, a block's] of ``values`` [rows * columns]."""
    a, b = blocks.block_rows, blocks.block_columns
    matrix = values.view(blocks.rows, blocks.columns)
    matrix = torch.nn.functional.pad(matrix, (0, -blocks.columns % b, 0, -blocks.rows % a))
    cut = matrix.view(matrix.shape[0] // a, a, matrix.shape[1] // b, b).transpose(1, 2)
    return (_basis(a) @ cut @ _basis(b).T).reshape(blocks.coefficients.shape)


def inverse_dct(coefficients: Tensor, blocks: DctBlocks) -> Tensor:
    """Values [rows, columns] of ``coefficients`` [blocks, a block's]."""
    a, b = blocks.block_rows, blocks.block_columns
    down, across = -(-blocks.rows // a), -(-blocks.columns // b)
    cut = _basis(a).T @ coefficients.view(down, across, a, b) @ _basis(b)
    matrix = cut.transpose(1, 2).reshape(down * a, across * b)
    return matrix[: blocks.rows, : blocks.columns].contiguous()
