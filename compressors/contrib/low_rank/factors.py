"""Linear algebra and packet parts that the low-rank codecs share."""

from __future__ import annotations

import numpy as np
import torch

from atoll.opdag import TensorMeta
from compressors.base import Packet
from compressors.packing import TORCH_DTYPES, empty, flat, payload_array, rebuild, require_length

Matrix = torch.Tensor
"""float32, CPU, two dimensions."""


def sketch(rows: int, columns: int, seed: int) -> Matrix:
    """A full-rank start, uniform on [-1, 1), the same on every machine and library version: raw bits of
    a Philox counter, since the streams of ``randn`` may change between releases."""
    raw = np.random.Philox(key=seed % (1 << 64)).random_raw((rows * columns + 1) // 2)
    bits = raw.view(np.uint32)[: rows * columns]
    values = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return torch.from_numpy(values.reshape(rows, columns))


def orthonormal(matrix: Matrix) -> Matrix:
    """Orthonormal columns of the same span (rows >= columns), signs as in Gram-Schmidt.

    A matrix short of full rank gets columns to fill it. Where an element is not finite, all of the
    result is NaN: the factorisation's own answer depends on the library.
    """
    if not bool(torch.isfinite(matrix).all()):
        return torch.full_like(matrix, torch.nan)
    scale = matrix.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    basis, upper = torch.linalg.qr(matrix / scale)
    signs = torch.where(upper.diagonal() < 0, -1.0, 1.0)
    signed: Matrix = basis * signs
    return signed


def pack(*factors: Matrix) -> memoryview:
    """The factors' elements one after another, in their own dtypes."""
    parts = [factor.reshape(-1).view(torch.uint8) for factor in factors]
    return memoryview(torch.cat(parts).numpy())  # type: ignore[arg-type]


def unpack(packet: Packet, *shapes: tuple[int, int], dtype: type[np.floating] = np.float32) -> list[Matrix]:
    """Those factors as float32. BadFrame unless the payload is exactly as long."""
    size = np.dtype(dtype).itemsize
    require_length(packet, sum(rows * columns for rows, columns in shapes) * size)
    found, at = [], 0
    for rows, columns in shapes:
        array = payload_array(packet, dtype, rows * columns, at).astype(np.float32)
        found.append(torch.from_numpy(array.reshape(rows, columns)))
        at += rows * columns * size
    return found


def rebuilt(matrix: Matrix, meta: TensorMeta) -> torch.Tensor:
    """The tensor of ``meta``. An approximation of finite elements stays finite: it is cut to the dtype's
    range, which it may leave by its error; NaN passes."""
    limit = torch.finfo(TORCH_DTYPES[meta.dtype]).max
    return rebuild(matrix.clamp_(-limit, limit).reshape(-1).numpy(), meta)


def dense_payload(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order."""
    return memoryview(flat(tensor).view(torch.uint8).numpy())  # type: ignore[arg-type]


def dense_tensor(packet: Packet) -> torch.Tensor:
    """Those elements again. BadFrame unless the payload is exactly as long."""
    require_length(packet, packet.meta.nbytes)
    tensor = empty(packet.meta)
    if packet.meta.nbytes:
        raw = torch.frombuffer(bytearray(packet.payload), dtype=torch.uint8)
        tensor.view(-1).view(torch.uint8).copy_(raw)
    return tensor
