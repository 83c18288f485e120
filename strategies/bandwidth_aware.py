"""Bandwidth-aware selection that forgets nobody: fast clients more often, each within a bounded wait.

    drawn with probability by 1 / expected seconds, after those who must come now

A client that has been available all along takes part at least once in any ``max_wait`` rounds (in any
ceil(N/count) rounds where that is more, N the candidates). Whoever must come is found by deadlines:
of the clients due within h rounds all beyond count (h - 1) must come now, for the h that asks most. Speed
alone would train on the data of the well-connected. Source: derived here; the need for the bound:
papers/flower.md 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.options import bounded
from strategies.selection import Candidates, Selection, Selector, draw, generator

Last = Mapping[str, int]
"""The round in which each client last took part, or one before that in which it was first seen."""


@dataclass(frozen=True)
class BandwidthAware(Selector):
    """``max_wait`` in rounds, 1..10,000; ``power`` of 1 / seconds in [0, 8]: 0 is a uniform draw."""

    name: ClassVar[str] = "bandwidth_aware"

    max_wait: int = bounded(10, 1, 10_000)
    power: float = bounded(1.0, 0.0, 8.0)

    def init(self) -> Last:
        return {}

    def choose(
        self,
        state: Any,
        candidates: Candidates,
        count: int,
        at_round: int,
        seed: int,
        losses: Mapping[str, float] | None = None,
    ) -> Selection:
        last: Last = {name: state.get(name, at_round - 1) for name in candidates}
        count = max(1, count)
        wait = max(self.max_wait, -(-len(candidates) // count))
        # Rounds that each may still be left out; whoever was away may be overdue.
        slack = {name: max(0, wait - (at_round - was)) for name, was in last.items()}
        first = sorted(candidates, key=lambda name: (slack[name], last[name], name))
        must = min(count, _due(sorted(slack.values()), count))
        chosen = first[:must]
        weights = {
            name: candidate.seconds**-self.power
            for name, candidate in candidates.items()
            if name not in chosen
        }
        chosen += draw(weights, count - must, generator(seed, at_round))
        return tuple(sorted(chosen)), {**state, **last, **dict.fromkeys(chosen, at_round)}


def _due(slacks: list[int], count: int) -> int:
    """Return how many must be chosen now so that none waits too long; ``slacks`` ascending."""
    return max([0, *(at + 1 - count * slack for at, slack in enumerate(slacks))])
