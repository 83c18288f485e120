"""Oort: clients whose data still teach, within a time that adapts.

    utility_k = |B_k| sqrt(mean loss^2), clipped at its 0.9 quantile, scaled to [0, 1] over the explored
    score_k   = (utility_k + sqrt(0.1 ln t / last_k)) * (T / t_k)^2 where t_k > T

the loss is a micro-batch's, which is what clients have: mean loss^2 is over their local steps, and less
than over samples by how much these differ within a batch.
Here t is the round from 1, last_k that in which k's utility was seen, t_k its measured seconds. T is a
percentile of all t_k: it starts at the 30th. Every 20 rounds it is raised by 5 points when the utility
gathered has changed by less than 10 %, and lowered by 5 when by more than five times. A share of each
round, 0.9 at first, times 0.98 a round, at least 0.3, goes to clients not yet seen, drawn by expected
speed among the 5 times as many that are fastest. The others are drawn by score among those above
``cut_off`` times the score of the last who would fit. The bias is intended; noisy labels look like data
that teach. Where everybody's data must count, take ``bandwidth_aware``, which bounds the wait.
Source: Lai 2021, Alg. 1, and its released defaults; papers/federated.md 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, log, sqrt
from typing import Any, ClassVar

import numpy as np

from strategies.options import bounded
from strategies.selection import Candidates, Outcome, Selection, Selector, draw, generator

PACE_ROUNDS = 20
PACE_STEP = 5.0
STEADY, JUMP = 0.1, 5.0  # relative changes of utility that raise and lower T
WINDOW = 5  # times the places, of unexplored candidates
CLIP = 0.9
PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Newest observation of a client."""

    utility: float
    at_round: int  # from 1
    seconds: float


@dataclass(frozen=True)
class OortState:
    """``gathered``: utility of each round's participants since two pace periods ago."""

    seen: Mapping[str, Seen] = field(default_factory=dict)
    percentile: float = 30.0
    gathered: tuple[float, ...] = ()


@dataclass(frozen=True)
class Oort(Selector):
    """``cut_off`` in (0, 1]; ``explore``, ``decay`` and ``least`` in [0, 1]."""

    name: ClassVar[str] = "oort"

    explore: float = bounded(0.9, 0.0, 1.0)
    decay: float = bounded(0.98, 0.0, 1.0)
    least: float = bounded(0.3, 0.0, 1.0)
    cut_off: float = bounded(0.95, 0.0, 1.0, open_low=True)

    def init(self) -> OortState:
        return OortState()

    def choose(
        self,
        state: Any,
        candidates: Candidates,
        count: int,
        at_round: int,
        seed: int,
        losses: Mapping[str, float] | None = None,
    ) -> Selection:
        known = {name: state.seen[name] for name in candidates if name in state.seen}
        fresh = {name: 1.0 / c.seconds for name, c in candidates.items() if name not in known}
        share = max(self.least, self.explore * self.decay**at_round)
        explored = min(len(fresh), round(share * count))
        exploited = min(len(known), count - explored)
        explored = min(len(fresh), count - exploited)
        window = sorted(fresh, key=lambda name: (-fresh[name], name))[: WINDOW * explored]
        new = draw({name: fresh[name] for name in window}, explored, generator(seed, at_round, 0))
        scores = self.scores(known, state.percentile, at_round + 1)
        ranked = sorted(scores, key=lambda name: (-scores[name], name))
        if exploited:
            bar = self.cut_off * scores[ranked[exploited - 1]]
            ranked = [name for name in ranked if scores[name] >= bar]
        again = draw({name: scores[name] for name in ranked}, exploited, generator(seed, at_round, 1))
        return tuple(sorted((*new, *again))), state

    def scores(self, known: Mapping[str, Seen], percentile: float, now: int) -> dict[str, float]:
        """score_k of the explored; ``now`` the round from 1."""
        if not known:
            return {}
        utilities = np.array([seen.utility for seen in known.values()])
        clipped = np.minimum(utilities, np.quantile(utilities, CLIP))
        span = float(clipped.max() - clipped.min())
        limit_s = float(np.percentile([seen.seconds for seen in known.values()], percentile))
        scores = {}
        for (name, seen), utility in zip(known.items(), clipped, strict=True):
            scaled = (float(utility) - float(clipped.min())) / span if span > 0.0 else 1.0
            score = scaled + sqrt(0.1 * log(now) / seen.at_round)
            late = seen.seconds > limit_s
            scores[name] = score * (limit_s / seen.seconds) ** PENALTY if late else score
        return scores

    def learn(self, state: Any, at_round: int, outcomes: Mapping[str, Outcome]) -> OortState:
        """An outcome with a loss that is not finite, or no time, teaches nothing."""
        before: OortState = state
        seen = dict(before.seen)
        gathered = 0.0
        for name, outcome in sorted(outcomes.items()):
            usable = isfinite(outcome.square_loss) and outcome.square_loss >= 0.0 and outcome.seconds > 0.0
            if usable and isfinite(outcome.seconds):
                utility = outcome.n_samples * sqrt(outcome.square_loss)
                seen[name] = Seen(utility, at_round + 1, outcome.seconds)
                gathered += utility
        after = replace(before, seen=seen, gathered=(*before.gathered, gathered)[-2 * PACE_ROUNDS :])
        return _paced(after, at_round + 1)


def _paced(state: OortState, now: int) -> OortState:
    """T's percentile after round ``now`` from 1."""
    if now % PACE_ROUNDS or len(state.gathered) < 2 * PACE_ROUNDS:
        return state
    earlier = sum(state.gathered[:PACE_ROUNDS])
    change = abs(sum(state.gathered[PACE_ROUNDS:]) - earlier)
    if change <= STEADY * earlier:
        return replace(state, percentile=min(100.0, state.percentile + PACE_STEP))
    if change >= JUMP * earlier:
        return replace(state, percentile=max(PACE_STEP, state.percentile - PACE_STEP))
    return state
