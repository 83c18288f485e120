"""SwarmSGD: each rank averages with what another published last, and nobody waits.

    x = (s_i + Q(s_j)) / 2 + u_i,    u_i = now - s_i      s: published copies, before the burst of steps

After it x is rank i's published copy. Where each rank is read once a round the mean of all models is kept,
up to Q's error. ``exchange.every`` is the burst's number of steps.

Q sends 8 bits an element that stand for a place modulo a lattice: k = round(s_j / d), k mod 256, and the
reader takes the k nearest to its own s_i. The error, at most d/2, therefore shrinks with the distance of the
models, which plain quantisation of models does not. Right as long as they are within 127 d; a digest of k
tells. The publisher chooses d, a power of two, from the distance that it met itself, times ``margin``. A
reader that cannot decode goes on with its own model for this round, and publishes its next copy dense: its
readers meet the distance, and widen their lattices. (A source never waits, so none can be asked again.)

Source: papers/compression.md 7, SwarmSGD; quantiser (gk) there, d's choice and the dense copy are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from atoll.errors import BadFrame
from compressors.base import Compressor, Packet, meta_of
from compressors.vector import Vector, dense
from strategies.exchanges.base import Contribution, Exchanged, ExchangeRule, Flat, Merged, Settled, State

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound
    from atoll.opdag import TensorMeta

LEVELS = 256
REACH = LEVELS // 2 - 1  # lattice points to either side that can be distinguished
DIGEST_BYTES = 8
TAIL = 1 + DIGEST_BYTES  # exponent of d, digest
_BIAS = 160  # d = 2**(byte - _BIAS); byte 0: a dense copy
_FLOAT_BITS = 24  # a lattice finer than float32 would only lengthen k
_PLACE_BITS = 50  # beyond them k is not exact in float64

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Published:
    """A rank's published copy [n]; ``distance``: expected to another's, largest of an element; ``whole``:
    published dense."""

    model: Tensor
    distance: float = 0.0
    whole: bool = False


@dataclass(frozen=True)
class SwarmSgd(ExchangeRule):
    """The rule above; state: ``Published``."""

    margin: float = 2.0

    def init(self, flat: Flat, own: Tensor) -> State:
        return Published(own.clone())

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        """The published copy, whatever ``own`` has become since."""
        tail = np.zeros(TAIL)
        values = state.model.numpy()
        exponent = None if state.whole else lattice(values, self.margin * state.distance)
        if exponent is not None:
            found = places(values, exponent)
            tail = np.array([exponent + _BIAS, *_digest(found)])
            values = found % LEVELS
        row = torch.from_numpy(np.concatenate((values, tail)).astype(np.float32))
        return Contribution(dense(row), codec=_COPIES)

    def merge(self, parts: Sequence[Vector], own: Contribution) -> Merged:
        """Parts one behind the other: only the reader's settling tells its own from the other's."""
        return Merged(dense(torch.cat([part.dense() for part in parts])))

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """``now`` and its published copy where nothing came or it could not be decoded."""
        before: Published = done.state
        burst = float((done.now - before.model).abs().max())
        other = self._read(done)
        if other is None:
            return Settled(done.now, Published(done.now.clone(), before.distance + 2.0 * burst, before.whole))
        theirs = copy_of(other, before.model)
        if theirs is None:
            return Settled(done.now, Published(done.now.clone(), 2.0 * before.distance + 2.0 * burst, True))
        apart = theirs - before.model
        result = done.now + apart / 2.0
        return Settled(result, Published(result.clone(), float(apart.abs().max()) + 2.0 * burst))

    def _read(self, done: Exchanged) -> Tensor | None:
        """What the source sent; None if nothing came, or nobody was to be read."""
        for piece in done.pieces:
            others = [place for place, rank in enumerate(sorted(piece.included)) if rank != done.rank]
            if piece.total is not None and others:
                start = others[0] * done.contribution.vector.size
                return piece.total.dense()[start : start + done.contribution.vector.size]
        return None


# ---------------------------------------------------------------- the lattice


def lattice(values: npt.NDArray[np.float32], distance: float) -> int | None:
    """Exponent of the lattice's d = 2**e, at least ``distance`` / 127; None if ``values`` have no place."""
    largest = float(np.abs(values).max(initial=0.0))
    if not math.isfinite(largest) or not math.isfinite(distance):
        return None
    width = max(distance / REACH, largest * 2.0**-_FLOAT_BITS, 2.0 ** (2 - _BIAS))
    exponent = math.frexp(width)[1]  # the next power of two above
    return exponent if exponent + _BIAS < LEVELS else None


def places(values: npt.NDArray[np.float32], exponent: int) -> Places:
    """k = round(x / 2**e), exact in float64."""
    return np.rint(np.ldexp(values.astype(np.float64), -exponent)).astype(np.int64)


def copy_of(row: Tensor, reference: Tensor) -> Tensor | None:
    """The published copy [n] in a part [n + TAIL], read beside the reader's own; None if they are too far
    apart to decode it, or it is not finite."""
    values = row.numpy()
    body, tail = values[:-TAIL], values[-TAIL:]
    if tail[0] == 0:
        whole = row[:-TAIL].clone()
        return whole if bool(torch.isfinite(whole).all()) else None
    exponent = int(tail[0]) - _BIAS
    if not float(reference.abs().max()) < 2.0 ** (exponent + _PLACE_BITS):  # nor if it is not finite
        return None
    here = places(reference.numpy(), exponent)
    half = LEVELS // 2
    found = here + (body.astype(np.int64) - here + half) % LEVELS - half
    if not np.array_equal(_digest(found), tail[1:]):
        return None
    return torch.from_numpy(np.ldexp(found.astype(np.float64), exponent)).float()


def _digest(found: Places) -> npt.NDArray[np.uint8]:
    return np.frombuffer(blake2b(found.tobytes(), digest_size=DIGEST_BYTES).digest(), np.uint8)


class _Copies(Compressor):
    """Codec of a row [n + TAIL]: a byte an element, or four where the row says that it is dense."""

    name = "swarm"

    def compress(self, tensor: Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        values = tensor.numpy()
        kind = np.float32 if values[-TAIL] == 0 else np.uint8
        return Packet(self.name, meta_of(tensor), values.astype(kind).tobytes()), None

    def decompress(self, packet: Packet, state: State = None) -> Tensor:
        size = packet.meta.elements
        kind = {size: np.uint8, 4 * size: np.float32}.get(len(packet.payload))
        if kind is None or packet.zero or size < TAIL:
            raise BadFrame(f"published copy of {len(packet.payload)} bytes for {size} elements")
        values = np.frombuffer(packet.payload, kind).astype(np.float32)
        if (values[-TAIL] == 0) != (kind is np.float32):
            raise BadFrame(f"published copy of {len(packet.payload)} bytes with exponent {values[-TAIL]}")
        return torch.from_numpy(values)

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return 4 * meta.elements


_COPIES = _Copies()
