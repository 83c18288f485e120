"""Power-of-choice: of some clients drawn by their samples, those with the highest loss.

    d candidates without replacement, each with probability p_k;  the ``count`` of them whose loss at
    the current weights is highest

``factor`` = d / count: 1 is FedAvg's unbiased draw, larger ones lean to clients that do badly, which is
faster at first and may end at a bias. Costs one loss evaluation of d clients.
Source: Cho 2020, section 4; papers/federated.md 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, ClassVar

from strategies.options import bounded
from strategies.selection import Candidates, Selection, Selector, draw, generator


@dataclass(frozen=True)
class PowerOfChoice(Selector):
    """``factor`` in [1, 1000]."""

    name: ClassVar[str] = "power_of_choice"

    factor: float = bounded(2.0, 1.0, 1000.0)

    def ask(self, candidates: Candidates, count: int, at_round: int, seed: int) -> tuple[str, ...]:
        weights = {name: float(candidate.n_samples) for name, candidate in candidates.items()}
        return draw(weights, ceil(self.factor * count), generator(seed, at_round))

    def choose(
        self,
        state: Any,
        candidates: Candidates,
        count: int,
        at_round: int,
        seed: int,
        losses: Mapping[str, float] | None = None,
    ) -> Selection:
        """Select by loss; clients that reported no finite loss come last."""
        told = losses or {}

        def low(name: str) -> tuple[bool, float, str]:
            loss = told.get(name, float("nan"))
            return (not isfinite(loss), -loss if isfinite(loss) else 0.0, name)

        asked = self.ask(candidates, count, at_round, seed)
        return tuple(sorted(sorted(asked, key=low)[:count])), state
