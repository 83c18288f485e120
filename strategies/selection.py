"""Client selection: the interface of every selector, and the plain random one.

A selector is pure: (state, candidates, count, round, seed) -> (names, state). Draws follow from the
seed and the round alone, not from earlier draws, so all strategies compared on one seed see the same rounds
where they may (papers/federated.md 5, protocol). Selectors that need the losses of candidates ask first
(``ask``); what came of a round arrives by ``learn``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import numpy as np

from atoll.errors import UsageError
from strategies.options import check_bounds

UNKNOWN_S = 1.0  # of a round, before any was measured


@dataclass(frozen=True, slots=True)
class Candidate:
    """A client that could take part now. ``seconds``: expected time of a round, computation and links."""

    n_samples: int = 1
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.n_samples < 1 or not self.seconds > 0.0:
            raise UsageError(
                f"a candidate with {self.n_samples} samples, {self.seconds:g} s; both are more than 0"
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Observation of a participant. ``square_loss``: mean over its local steps of the squared loss of a
    micro-batch, itself a mean; ``seconds`` as a Candidate's."""

    square_loss: float
    n_samples: int
    seconds: float


Candidates = Mapping[str, Candidate]
Selection = tuple[tuple[str, ...], Any]
"""Names in ascending order, and the selector's next state."""


@dataclass(frozen=True)
class Selector:
    """The contract; fields of a subclass are its options."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_bounds(self)

    def init(self) -> Any:
        """The state before round 0; None for a selector without one."""
        return None

    def ask(self, candidates: Candidates, count: int, at_round: int, seed: int) -> tuple[str, ...]:
        """Return the clients whose loss at the current weights ``choose`` needs."""
        return ()

    def choose(
        self,
        state: Any,
        candidates: Candidates,
        count: int,
        at_round: int,
        seed: int,
        losses: Mapping[str, float] | None = None,
    ) -> Selection:
        """At most ``count`` of ``candidates``; all of them where there are no more."""
        raise TypeError(f"{type(self).__name__} does not say whom it chooses")

    def learn(self, state: Any, at_round: int, outcomes: Mapping[str, Outcome]) -> Any:
        """The state after the round's participants have answered."""
        return state


@dataclass(frozen=True)
class Random(Selector):
    """Uniformly, without replacement."""

    name: ClassVar[str] = "random"

    def choose(
        self,
        state: Any,
        candidates: Candidates,
        count: int,
        at_round: int,
        seed: int,
        losses: Mapping[str, float] | None = None,
    ) -> Selection:
        return draw(dict.fromkeys(candidates, 1.0), count, generator(seed, at_round)), state


def candidates_of(n_samples: Mapping[str, int], seconds: Mapping[str, float]) -> dict[str, Candidate]:
    """Those who could take part, by their samples. ``seconds``: of a round, of whomever they are known;
    0 or absent means the median of the others, and ``UNKNOWN_S`` before any is known."""
    known = [value for value in seconds.values() if value > 0.0]
    unseen_s = median(known) if known else UNKNOWN_S
    return {name: Candidate(count, seconds.get(name) or unseen_s) for name, count in n_samples.items()}


def smoothed(before: float, measured: float, weight: float = 0.3) -> float:
    """Exponential mean; the first measurement counts whole."""
    return measured if before <= 0.0 else (1.0 - weight) * before + weight * measured


def generator(seed: int, at_round: int, use: int = 0) -> np.random.Generator:
    """The draws of one round; ``use`` parts the draws of one round from each other."""
    return np.random.default_rng([seed, at_round, use])


def draw(weights: Mapping[str, float], count: int, source: np.random.Generator) -> tuple[str, ...]:
    """``count`` names without replacement, each next one with probability by weight; ascending.

    Weights are >= 0; names of weight 0 come only when the others do not suffice. By exponential races,
    which take one number a name, in the order of the names: the order of the mapping has no effect.
    """
    names = sorted(weights)
    races = source.exponential(size=len(names))
    with np.errstate(divide="ignore"):
        ends = races / np.array([weights[name] for name in names], float)
    first = np.lexsort((races, ends))[: max(0, count)]
    return tuple(sorted(names[at] for at in first))
