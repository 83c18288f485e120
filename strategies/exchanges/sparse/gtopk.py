"""gTop-k: the k largest elements of the sum of everybody's k largest, by a binomial tree of merges.

    v = g + e;  S = the k largest |v|;  merge = sum, of which the k largest stay;  result = sum / weights
    e' = v, with own entries that the result chose taken out

No rank receives more than k pairs (position, value) a hop, ceil(log2 P) hops up and one down. Two ways of
losing mass are closed. An entry that the result did not choose goes back to the rank that brought it. One
that a merge evicted although the result chose its position (it came through another branch) stays with
the rank that merged; the source gives it up. So result times weights and residuals add up to the
contributions. Of a round that fails halfway, a rank keeps all that the total does not hold of it, and
everything if no total came. Its work then arrives late or, where the total had it, twice, but never not
at all. The number k follows from ``exchange.ratio``.
Source: gTop-k, arXiv 1901.04359 (papers/compression.md 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compressors.selection import all_finite
from compressors.sparse_sizes import vector_kept
from compressors.vector import Vector, dense, strongest, total
from strategies.exchanges.base import (
    Contribution,
    Exchanged,
    ExchangeRule,
    Flat,
    Kept,
    Merged,
    Row,
    Settled,
    State,
    average,
    finite_or,
    own_kept,
    own_row,
    picked,
    unpicked,
    weighted,
)

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound


@dataclass(frozen=True)
class GTopK(ExchangeRule):
    """The rule above; state: the residual [n], or None."""

    def kept(self, size: int) -> int:
        """Entries of a contribution and of a merge."""
        return vector_kept(size, self.exchange.ratio)

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        wanted = own if state is None else own + state
        vector = dense(weighted(wanted, at.weight_of(rank)))
        best, _ = strongest(vector, self.kept(vector.size))
        return Contribution(best, carry=wanted)

    def merge(self, parts: Sequence[Vector], own: Contribution) -> Merged:
        best, rest = strongest(total(parts), self.kept(own.vector.size))
        return Merged(best, rest if len(rest.values) else None)

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """The mean. One that is not finite leaves the state: the step will be discarded."""
        mean = average(done).values
        if not all_finite(mean):
            return Settled(mean, done.state)
        residual, ours = unpicked(done, done.contribution.carry), picked(done)
        for _, evicted in done.kept_back:  # of the one segment
            # Only where the result has the position: elsewhere each rank keeps its own.
            residual += torch.where(ours, evicted.dense(), 0.0) / done.round.weight_of(done.rank)
        return Settled(mean, residual)

    def undelivered(self, contribution: Contribution, state: State) -> State:
        return finite_or(contribution.carry, state)

    def rows(self, flat: Flat, ranks: int) -> tuple[tuple[Row, ...], ...]:
        kept = self.kept(flat.size)
        return ((Row(flat.size, (kept, kept)),),)

    def stored(self, state: State, flat: Flat) -> list[Kept]:
        return own_kept(state, flat)

    def resumed(self, kept: Sequence[Kept], flat: Flat) -> State:
        return own_row(kept, flat)
