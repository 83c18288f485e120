"""SparseLoCo: DiLoCo of a few large values a chunk; a decaying residual stands for the outer momentum.

    v = beta e + (theta_outer - theta_i);  Q = the largest |v| of each chunk, two bits a value;  e = v - Q
    theta_outer <- theta_outer - alpha mean(Q)

Chunks begin with each tensor, so they are the same whoever holds which tensors. H is ``exchange.every``.
``exchange.ratio`` gives the values a chunk: about 200 are the 64 of 4,096 that papers/peers.md 7.5 counts.
beta and alpha are as in public descriptions, not checked against the paper.
Every rank sends its coded chunks to every other and adds all in one order: a sum's positions and float32
values would be far more bytes than parts of two bits a value. So a round counts for all or for none; after
one that does not, each goes on from its own model, whose next change has these steps too.
Source: SparseLoCo, arXiv 2508.15706 (papers/peers.md 7.5); DiLoCo: papers/decentralized.md 8.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from compressors.contrib.sparse.chunk_topk import ChunkTopK
from strategies.exchanges.base import Contribution, State
from strategies.exchanges.diloco import DiLoCo

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound


@dataclass(frozen=True)
class SparseLoCo(DiLoCo):
    """The rule above; state: DiLoCo's, its momentum unused."""

    lr: float = 1.0  # alpha
    momentum: float = 0.0
    decay: float = 0.95  # beta

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        if state.residual is not None:
            state = replace(state, residual=self.decay * state.residual)
        brought = super().contribute(own, state, at, rank)
        borders = tuple(accumulate(size for size in state.sizes if size))[:-1]
        return replace(brought, codec=ChunkTopK(self.exchange.ratio), borders=borders)
