"""PowerSGD: one power iteration a step from the last step's factor, with error feedback.

    P = M Q;  P <- orthonormal(P);  Q = M^T P;  M^ = P Q^T;  E = M - M^,  M = gradient + E

P is n x r and Q is m x r; both travel, 4 r (n + m) bytes, so a packet needs no state to be decoded.
The three phases are functions: among many workers P and Q are each averaged where the phases meet,
which two all-reduces do. Vectors, and matrices that would not shrink, travel dense.

State: Q and E. All workers begin with the same Q (seeded by the shape).
Source: PowerSGD (arXiv 1905.13727) as papers/compression.md 4 gives it, from its authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atoll.opdag import TensorMeta
from compressors.base import Packet, State, meta_of
from compressors.catalogue import codec
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
from compressors.contrib.low_rank.ranks import gradient_matrix, powersgd_rank
from compressors.packing import flat, require_float_packet, require_floats, zeros

START_SEED = 0x506F776572534744


@dataclass(frozen=True, slots=True)
class PowerState:
    """State with which the next step of one tensor begins."""

    q: Matrix  # [m, r]: the last step's right factor
    residual: Matrix  # [n, m]: what has not been sent yet


def phase_p(matrix: Matrix, q: Matrix) -> Matrix:
    """P = M Q, [n, r]; workers average it before ``phase_q``."""
    return matrix @ q


def phase_q(matrix: Matrix, p: Matrix) -> tuple[Matrix, Matrix]:
    """Orthonormal P and Q = M^T P, [m, r]; workers average Q before ``restored``."""
    basis = orthonormal(p)
    return basis, (basis.T @ matrix).T  # several times faster than matrix.T @ basis


def restored(basis: Matrix, q: Matrix) -> Matrix:
    """M^ = P Q^T, [n, m]."""
    return basis @ q.T


class PowerSGD:
    """Rank-r gradients; the rank follows from the ratio."""

    name = "powersgd"

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def init(self, meta: TensorMeta) -> State:
        """None for a tensor that travels dense."""
        rank, matrix = powersgd_rank(meta, self.ratio), gradient_matrix(meta)
        if not rank or matrix is None:
            return None
        rows, columns = matrix
        return PowerState(sketch(columns, rank, START_SEED), torch.zeros(rows, columns))

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """``seed`` is not used: nothing is random after the start. A tensor with an element that is
        not finite gives a packet of NaN and leaves the state as it was."""
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        before: PowerState | None = self.init(meta) if state is None else state
        if before is None:
            return Packet(self.name, meta, dense_payload(tensor)), None
        matrix = flat(tensor).float().reshape(before.residual.shape) + before.residual
        basis, q = phase_q(matrix, phase_p(matrix, before.q))
        packet = Packet(self.name, meta, pack(basis, q))
        if not bool(torch.isfinite(q).all()):
            return packet, before
        # Nothing to iterate from in a zero gradient: keep the span found so far.
        return packet, PowerState(q if q.any() else before.q, matrix - restored(basis, q))

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        """Raises BadFrame unless the payload is exactly the two factors."""
        meta = packet.meta
        require_float_packet(packet)
        if packet.zero:
            return zeros(meta)
        rank, matrix = powersgd_rank(meta, self.ratio), gradient_matrix(meta)
        if not rank or matrix is None:
            return dense_tensor(packet)
        basis, q = unpack(packet, (matrix[0], rank), (matrix[1], rank))
        return rebuilt(restored(basis, q), meta)

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return int(codec(self.name).size(meta, self.ratio))
