"""Sum: exact data parallelism; Mean: the weighted mean, with error feedback where the codec is lossy.

Sum adds gradients of blocks of micro-batches, already divided by the step's number of them, in ascending
order at the segments' owners: the bits of one machine that folds the same blocks.

Mean sends v = g + e through the exchange's codec, adds in float32 at the owner and codes the sum once, so
that the error does not grow with the number of ranks (about 0.9 % at 8 bits; papers/compression.md 5). With
a sparse codec the sum travels as its positions and values. e' = v - what a total holds of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressors import CODECS, make_compressor
from compressors.sparse import Scattered
from compressors.vector import UNCOMPRESSED, dense
from strategies.exchanges.base import (
    Contribution,
    Exchanged,
    ExchangeRule,
    Flat,
    Kept,
    Settled,
    State,
    average,
    finite_or,
    left_over,
    own_kept,
    own_row,
    weighted,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from atoll.exchange import ExchangeRound
    from compressors.base import Compressor


class Sum(ExchangeRule):
    """Exact sum of gradients."""

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        return Contribution(dense(own))

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """The sum; a segment that never came keeps the rank's own, and the receipt says so: a step whose
        receipt is not complete is discarded."""
        result = done.now.clone()
        for piece in done.pieces:
            if piece.total is not None:
                result[piece.segment.start : piece.segment.stop] = piece.total.dense()
        return Settled(result, None)


@dataclass(frozen=True)
class Mean(ExchangeRule):
    """Weighted mean of gradients; state: the residual, or None for an exact codec."""

    def codecs(self) -> tuple[Compressor, Compressor]:
        """Codecs of parts and of totals."""
        return part_and_total(self.exchange.codec, self.exchange.ratio)

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        wanted = own if state is None else own + state
        codec, total_codec = self.codecs()
        weight = at.weight_of(rank)
        return Contribution(dense(weighted(wanted, weight)), codec, total_codec, carry=weight)

    def settle(self, done: Exchanged) -> Settled | Contribution:
        return Settled(average(done).values, finite_or(left_over(done), done.state))

    def undelivered(self, contribution: Contribution, state: State) -> State:
        return finite_or(contribution.vector.dense() / contribution.carry, state)

    def stored(self, state: State, flat: Flat) -> list[Kept]:
        return own_kept(state, flat)

    def resumed(self, kept: Sequence[Kept], flat: Flat) -> State:
        return own_row(kept, flat)


def part_and_total(codec: str, ratio: float) -> tuple[Compressor, Compressor]:
    """Codecs of a dense contribution and of its dense total: the same, but none for a sum of sparse parts,
    which is sparse itself."""
    part = make_compressor(codec, ratio)
    return part, UNCOMPRESSED if isinstance(part, Scattered) or CODECS[codec].exact else part
