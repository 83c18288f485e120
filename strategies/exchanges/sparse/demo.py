"""DeMo: the largest cosine coefficients of a decoupled momentum; the step is the sign of their mean.

    m <- beta m + g;  Q = the k largest |DCT(m)| of each block;  m <- m - IDCT(Q)
    result = sign(IDCT(mean of Q over the ranks that sent a coefficient))

Plain SGD then applies the result: no other momentum, a learning rate as for signs. What does not travel
stays in m, which every rank has for itself; m is in units of gradients (the source scales g by the
learning rate, which changes the sign only while the rate changes). Blocks are those of ``dct_topk``, up to
64 by 64. k follows from ``exchange.ratio``: the source's 32 of 4,096 are a ratio of about 100 here.

The mean counts the senders of each coefficient, not all ranks; weights of ranks have no part in it. The
inverse transform runs at every rank, so bits agree within one device class.
Source: DeMo (papers/decentralized.md 8.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.opdag import TensorMeta
from compressors.contrib.sparse.dct_topk import dct_of, inverse_dct
from compressors.contrib.sparse.sizes import DctBlocks, dct_blocks, dct_kept
from compressors.selection import all_finite, bits_of, largest_in_rows
from compressors.vector import Vector, chosen, dense, joined, total
from strategies.exchanges.base import (
    OWN,
    OWN_PREFIX,
    Contribution,
    Exchanged,
    ExchangeRule,
    Flat,
    Kept,
    Merged,
    Row,
    Settled,
    State,
    finite_or,
    own_row,
)

if TYPE_CHECKING:
    from atoll.exchange import ExchangeRound


LATE = OWN_PREFIX + "late"
"""Key of a tensor's gradients that join with the next."""


@dataclass(frozen=True)
class DemoState:
    """Momentum [n] of this rank, how each tensor of it is cut and how much of a block is kept; ``late``:
    gradients [n] of rounds that were given up, which join with the next."""

    momentum: Tensor
    tensors: tuple[tuple[DctBlocks, int], ...]
    late: Tensor | None = None


@dataclass(frozen=True)
class _Sent:
    gradient: Tensor  # [n], with the late ones
    momentum: Tensor  # [n], with the gradient


@dataclass(frozen=True)
class Demo(ExchangeRule):
    """The rule above; state: ``DemoState``."""

    decay: float = 0.999  # beta

    def init(self, flat: Flat, own: Tensor) -> State:
        return DemoState(torch.zeros(flat.size), self._tensors(flat))

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        gradient = own if state.late is None else own + state.late
        momentum = self.decay * state.momentum + gradient
        sizes = [blocks.rows * blocks.columns for blocks, _ in state.tensors]
        parts, start = [], 0
        for values, (blocks, kept) in zip(torch.split(momentum, sizes), state.tensors, strict=True):
            coefficients = dense(dct_of(values, blocks))
            width = blocks.coefficients.shape[1]
            best = largest_in_rows(bits_of(coefficients.values), width, kept)
            parts.append((start, chosen(coefficients, torch.from_numpy(best))))
            start += coefficients.size
        return Contribution(joined(start, parts), carry=_Sent(gradient, momentum))

    def merge(self, parts: Sequence[Vector], own: Contribution) -> Merged:
        """Mean over the parts that have a coefficient."""
        summed = total(parts)
        senders = total([replace(part, values=torch.ones_like(part.values)) for part in parts])
        return Merged(replace(summed, values=summed.values / senders.values))

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """The signs. A mean that is not finite leaves the state: the step will be discarded."""
        mean = torch.zeros(done.contribution.vector.size)
        delivered = torch.zeros_like(mean)
        sent = done.sent.dense()
        for piece in done.pieces:
            here = slice(piece.segment.start, piece.segment.stop)
            if piece.total is not None:
                mean[here] = piece.total.dense()
                if done.rank in piece.included:
                    delivered[here] = sent[here]
        tensors = done.state.tensors
        if not all_finite(mean):
            return Settled(torch.full_like(done.now, torch.nan), done.state)
        momentum = done.contribution.carry.momentum - _inverse(delivered, tensors)
        return Settled(_inverse(mean, tensors).sign_(), DemoState(momentum, tensors))

    def undelivered(self, contribution: Contribution, state: State) -> State:
        return replace(state, late=finite_or(contribution.carry.gradient, state.late))

    def rows(self, flat: Flat, ranks: int) -> tuple[tuple[Row, ...], ...]:
        """Of a total at most what all ranks have chosen."""
        tensors = self._tensors(flat)
        elements = sum(blocks.coefficients.elements for blocks, _ in tensors)
        chosen_of = sum(blocks.coefficients.shape[0] * kept for blocks, kept in tensors)
        return ((Row(elements, (chosen_of, ranks * chosen_of)),),)

    def stored(self, state: State, flat: Flat) -> list[Kept]:
        found: list[Kept] = [{OWN: part} for part in flat.tensors(state.momentum)]
        if state.late is None:
            return found
        late = flat.tensors(state.late)
        return [{**one, LATE: part} for one, part in zip(found, late, strict=True)]

    def resumed(self, kept: Sequence[Kept], flat: Flat) -> State:
        momentum = own_row(kept, flat)
        if momentum is None:
            momentum = torch.zeros(flat.size)
        return DemoState(momentum, self._tensors(flat), own_row(kept, flat, LATE))

    def _tensors(self, flat: Flat) -> tuple[tuple[DctBlocks, int], ...]:
        """How each tensor is cut, and how much of a block is kept."""
        metas = [TensorMeta(shape, "float32") for shape in flat.shapes]
        return tuple((dct_blocks(m), dct_kept(m, self.exchange.ratio)) for m in metas if m.elements)


def _inverse(coefficients: Tensor, tensors: Sequence[tuple[DctBlocks, int]]) -> Tensor:
    """Values [n] of all tensors' coefficients."""
    sizes = [blocks.coefficients.elements for blocks, _ in tensors]
    parts = torch.split(coefficients, sizes)
    values = [inverse_dct(p, blocks) for p, (blocks, _) in zip(parts, tensors, strict=True)]
    return torch.cat([value.reshape(-1) for value in values])
