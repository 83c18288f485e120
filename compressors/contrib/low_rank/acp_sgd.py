"""ACP-SGD: PowerSGD with one factor a step instead of two, the sides alternating.

    even steps: P = M Q, Q orthonormal;    M^ = P Q^T
    odd steps:  Q = M^T P, P orthonormal;  M^ = P Q^T;     E = M - M^,  M = gradient + E

Only the new factor travels, 4 r n or 4 r m bytes in turn: half of PowerSGD's. The other one, the
basis, is the last step's factor made orthonormal, so both ends know it: the state is shared. For one
basis the code is linear in M, so the factors of many workers are summed by one all-reduce, and the
residual needs nobody's answer. Vectors, and matrices that would not shrink, travel dense.

State: step, basis and E (sender), step and basis (receiver; ``AcpSGD.follow``). The first basis is
seeded by the shape. A packet of another step is refused, never guessed at.
Source: ACP-SGD (arXiv 2306.08881) as papers/compression.md 4 gives it, from its authors' code.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import Packet, State, meta_of
from compressors.contrib.low_rank.factors import (
    Matrix,
    dense_payload,
    dense_tensor,
    orthonormal,
    pack,
    rebuilt,
    sketch,
    unpack,
)
from compressors.contrib.low_rank.ranks import FACTOR_BYTES, acp_rank, gradient_matrix
from compressors.packing import flat, read_params, require_float_packet, require_floats, zeros

START_SEED = 0x4143502D534744
_STEP = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class AcpState:
    """State with which the next step of one tensor begins."""

    step: int  # even: the basis is Q [m, r]; odd: P [n, r]
    basis: Matrix  # orthonormal columns
    residual: Matrix | None  # [n, m]: what has not been sent yet; None: nothing


def phase(matrix: Matrix, basis: Matrix, step: int) -> Matrix:
    """The factor that travels at ``step``: M Q or M^T P. Linear in M, so workers may sum it."""
    # Several times faster than matrix.T @ basis.
    return matrix @ basis if step % 2 == 0 else (basis.T @ matrix).T


def restored(factor: Matrix, basis: Matrix, step: int) -> Matrix:
    """M^ = P Q^T, [n, m]."""
    return factor @ basis.T if step % 2 == 0 else basis @ factor.T


def next_basis(factor: Matrix) -> Matrix:
    """The basis of the next step, on the other side. ``factor`` is the sum over all workers where there
    are several; its scale does not matter."""
    return orthonormal(factor)


class AcpSGD:
    """Rank-r gradients, one factor a packet; the rank follows from the ratio."""

    name = "acp_sgd"

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def init(self, meta: TensorMeta) -> State:
        """None for a tensor that travels dense."""
        shape = self._shape(meta)
        if shape is None:
            return None
        _, columns, rank = shape
        return AcpState(0, orthonormal(sketch(columns, rank, START_SEED)), None)

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """``seed`` is not used: nothing is random after the start. A tensor with an element that is
        not finite gives a packet of NaN and leaves the state as it was."""
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        before: AcpState | None = self.init(meta) if state is None else state
        shape = self._shape(meta)
        if before is None or shape is None:
            return Packet(self.name, meta, dense_payload(tensor)), None
        matrix = flat(tensor).float().reshape(shape[:2])
        if before.residual is not None:
            matrix = matrix + before.residual
        factor = phase(matrix, before.basis, before.step)
        finite = bool(torch.isfinite(factor).all())
        if not finite:  # a receiver must not see part of it
            factor = torch.full_like(factor, torch.nan)
        packet = Packet(self.name, meta, pack(factor), _STEP.pack(before.step))
        if not finite:
            return packet, before
        left = matrix - restored(factor, before.basis, before.step)
        return packet, AcpState(before.step + 1, next_basis(factor), left)

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        """``state`` is the one before the packet (None: the first one). Raises BadFrame unless the
        payload is exactly the factor of that state's step."""
        meta = packet.meta
        require_float_packet(packet)
        if packet.zero:
            return zeros(meta)
        before: AcpState | None = self.init(meta) if state is None else state
        if before is None:
            return dense_tensor(packet)
        return rebuilt(restored(self._factor(packet, before), before.basis, before.step), meta)

    def follow(self, packet: Packet, state: State = None) -> State:
        """The receiver's state after a packet that it decoded with ``state``."""
        before: AcpState | None = self.init(packet.meta) if state is None else state
        if before is None or packet.zero:
            return before
        factor = self._factor(packet, before)
        if not bool(torch.isfinite(factor).all()):
            return before
        return AcpState(before.step + 1, next_basis(factor), None)

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        shape = self._shape(meta)
        return meta.nbytes if shape is None else FACTOR_BYTES * shape[2] * max(shape[:2])

    def _shape(self, meta: TensorMeta) -> tuple[int, int, int] | None:
        rank, matrix = acp_rank(meta, self.ratio), gradient_matrix(meta)
        return (*matrix, rank) if rank and matrix else None

    def _factor(self, packet: Packet, before: AcpState) -> Matrix:
        (step,) = read_params(packet, _STEP)
        if step != before.step:
            raise BadFrame(f"acp_sgd packet of step {step}, this side is at {before.step}; rejoin first")
        shape = self._shape(packet.meta)
        assert shape is not None  # noqa: S101  (a state exists only for such tensors)
        rows, columns, rank = shape
        (factor,) = unpack(packet, (rows if step % 2 == 0 else columns, rank))
        return factor
