"""k positions of n as one number: at the entropy bound, for small k.

    position = high * 2**b + low;  the k highs of a chunk, ascending and possibly equal, are one of
    C(H + k - 1, k) multisets;  rank = sum over i of C(high[i] + i, i + 1),  i = 0 .. k-1

The lows travel as they are, the rank in the bits that C(H + k - 1, k) needs. The split b is chosen so that
their sum is least while the rank fits 62 bits. Thus 8 of 4,096 take 81 bits, 10.13 a position (bound 10.09,
Rice 10.54, 16-bit numbers 16). Every chunk takes the same number of bits, so there is nothing else to say.
Source: the combinatorial number system; Cover 1973 (enumerative source coding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from atoll.errors import BadFrame
from compressors.bits import Bytes, Ints, pack, packed_bytes, unpack

_MAX_RANK_BITS = 62
_MAX_TABLE = 1 << 14


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Coding of chunks of ``width`` with ``kept`` positions each."""

    width: int
    kept: int
    low_bits: int
    highs: int  # H
    rank_bits: int

    @property
    def bits(self) -> int:
        """Bits of a chunk."""
        return self.kept * self.low_bits + self.rank_bits

    def bytes_of(self, chunks: int) -> int:
        """Exact."""
        return packed_bytes(chunks, self.rank_bits) + packed_bytes(chunks * self.kept, self.low_bits)


@lru_cache(maxsize=256)
def plan_ranks(width: int, kept: int) -> RankPlan | None:
    """The cheapest plan; None where no rank of ``kept`` positions fits, or there is none."""
    if not 0 < kept < width:
        return None
    plans = []
    for low_bits in range((width - 1).bit_length() + 1):
        highs = ((width - 1) >> low_bits) + 1
        if (highs + kept) * (kept + 1) > _MAX_TABLE:
            continue
        rank_bits = (math.comb(highs + kept - 1, kept) - 1).bit_length()
        if rank_bits <= _MAX_RANK_BITS:
            plans.append(RankPlan(width, kept, low_bits, highs, rank_bits))
    return min(plans, key=lambda plan: plan.bits, default=None)


@lru_cache(maxsize=16)
def _binomials(plan: RankPlan) -> Ints:
    """[i, c] -> C(c, i + 1) for c < H + k; those beyond any rank are cut to the largest int64."""
    top = 2**63 - 1
    return np.array(
        [[min(math.comb(c, i + 1), top) for c in range(plan.highs + plan.kept)] for i in range(plan.kept)],
        np.int64,
    )


def encode_ranks(local: Ints, plan: RankPlan) -> Bytes:
    """``local``: [chunks, k] positions in their chunk, ascending in each."""
    table = _binomials(plan)
    raised = (local >> plan.low_bits) + np.arange(plan.kept)
    ranks = np.zeros(len(local), np.int64)
    for i in range(plan.kept):
        ranks += table[i, raised[:, i]]
    low = local & ((1 << plan.low_bits) - 1)
    return np.concatenate((pack(ranks, plan.rank_bits), pack(low.reshape(-1), plan.low_bits)))


def decode_ranks(data: Bytes, chunks: int, plan: RankPlan) -> Ints:
    """Invert ``encode_ranks``. Raises BadFrame unless it is positions, ascending and unique."""
    if len(data) != plan.bytes_of(chunks):
        raise BadFrame(f"{len(data)} bytes for {chunks} chunks of {plan}")
    split = packed_bytes(chunks, plan.rank_bits)
    ranks = unpack(data[:split], chunks, plan.rank_bits)
    if chunks and int(ranks.max()) >= math.comb(plan.highs + plan.kept - 1, plan.kept):
        raise BadFrame(f"a rank beyond {plan}")
    low = unpack(data[split:], chunks * plan.kept, plan.low_bits).reshape(chunks, plan.kept)
    table = _binomials(plan)
    local = np.empty((chunks, plan.kept), np.int64)
    for i in range(plan.kept - 1, -1, -1):  # greedy: the largest c with C(c, i + 1) <= rank
        raised = np.searchsorted(table[i], ranks, side="right") - 1
        ranks -= table[i, raised]
        local[:, i] = raised - i
    local <<= plan.low_bits
    local |= low
    if chunks and (int(local.max()) >= plan.width or not bool((np.diff(local, axis=1) > 0).all())):
        raise BadFrame(f"positions of a chunk are not ascending and below {plan.width}")
    return local
