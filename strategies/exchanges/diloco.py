"""DiLoCo: the change of H local steps is a gradient for an outer Nesterov step, taken at every rank alike.

    Delta = mean(theta_outer - theta_i);  v <- beta v + Delta
    theta_outer <- theta_outer - eta (Delta + beta v)

All go on from theta_outer. The inner optimizer's state is not touched. One rank alone takes the outer step
too. ``exchange.codec`` codes the changes and their sum; H is ``exchange.every``.

What no total holds of a rank's change (the codec's error; all of it where an owner did not include it) is
added to its next one. A late rank takes the outer step of the others, and its own steps arrive a round later.
(The source drops the slowest, papers/decentralized.md 8.4.) A round of which a rank holds nothing changes
nothing: it goes on from its own model, whose next change has these steps too. Changes are finite: a round
refuses any other.

theta_outer and v must be equal at all ranks. Where a total never came they stay as they were, and a rank
that lacks a total which others have (its receipt's digest differs) adopts their state and model before its
next round. A newcomer's model is that state's ``outer``. Source: papers/decentralized.md 8.4 (DiLoCo).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from atoll.collective import Segment
from compressors.vector import dense
from strategies.exchanges.base import (
    Contribution,
    Exchanged,
    ExchangeRule,
    Flat,
    Settled,
    State,
    average,
    left_over,
    weighted,
)
from strategies.exchanges.mean import part_and_total

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound


BLOCK = 1 << 18  # elements of an outer step that are computed at one time


@dataclass(frozen=True)
class OuterState:
    """Outer parameters and momentum [n], equal at all ranks; ``residual`` [n] of this rank, None: nothing.
    ``sizes``: elements of the tensors that make up the row."""

    outer: Tensor
    momentum: Tensor
    residual: Tensor | None = None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class DiLoCo(ExchangeRule):
    """The rule above; state: ``OuterState``."""

    lr: float = 0.7  # eta
    momentum: float = 0.9  # beta

    def init(self, flat: Flat, own: Tensor) -> State:
        return OuterState(own.clone(), torch.zeros_like(own), sizes=flat.sizes)

    def segments(self, sizes: Sequence[int], at: ExchangeRound) -> Sequence[Segment]:
        """Parts of the model that the round exchanges; ``sizes``: elements of its tensors."""
        return (Segment(0, sum(sizes)),)

    def used(self, now: Tensor, outer: Tensor) -> Tensor:
        """Model after the round from the local and the outer one, of the exchanged elements."""
        return outer

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        segments = self.segments(state.sizes, at)
        wanted = _taken(state.outer, segments) - _taken(own, segments)
        if state.residual is not None:
            wanted = wanted + _taken(state.residual, segments)
        codec, total_codec = part_and_total(self.exchange.codec, self.exchange.ratio)
        return Contribution(dense(weighted(wanted, at.weight_of(rank))), codec, total_codec)

    def settle(self, done: Exchanged) -> Settled | Contribution:
        before: OuterState = done.state
        segments = self.segments(before.sizes, done.round)
        mean, left = average(done), left_over(done)
        at = 0
        outer, momentum, result = before.outer.clone(), before.momentum.clone(), done.now.clone()
        # A model of its own for every value in between would be six more at one time.
        for here in _blocks(segments):
            there = slice(at, at + here.stop - here.start)
            values, at = mean.values[there], there.stop
            came = mean.came[there]
            faster = self.momentum * momentum[here] + values
            moved = outer[here] - self.lr * (values + self.momentum * faster)
            outer[here] = torch.where(came, moved, outer[here])
            momentum[here] = torch.where(came, faster, momentum[here])
            result[here] = self.used(result[here], outer[here])
        del mean
        residual = before.residual
        if residual is not None or left.any():
            residual = torch.zeros_like(done.now) if residual is None else residual.clone()
            parts = torch.split(left, [segment.size for segment in segments])
            for segment, part in zip(segments, parts, strict=True):
                residual[segment.start : segment.stop] = part
            if not residual.any():
                residual = None
        return Settled(result, OuterState(outer, momentum, residual, before.sizes))


def _taken(flat: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Elements of the segments one after another."""
    return torch.cat([flat[segment.start : segment.stop] for segment in segments])


def _blocks(segments: Sequence[Segment]) -> Iterator[slice]:
    """Yield the elements of the segments, in blocks."""
    for segment in segments:
        for start in range(segment.start, segment.stop, BLOCK):
            yield slice(start, min(start + BLOCK, segment.stop))
