"""What noised local steps cost one sample of a client, and the words for it. Pure.

Each of T steps is a Poisson sample of rate q with noise z, and a round's charge is that of its steps. The
charges of rounds, and of jobs on the same data, add up order by order (Mironov 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.privacy.accountant import epsilon_of, round_rdp
from strategies.privacy.private import UNIT

if TYPE_CHECKING:
    from atoll.privacy import SamplePrivacy

BUDGET_DELTA = 1e-5
"""Delta of a data owner's budget, over all jobs."""


@dataclass(frozen=True, slots=True)
class Charge:
    """``steps`` of noise ``noise`` on a sample that is drawn with ``rate``: so much an update tells of it."""

    noise: float
    rate: float
    steps: int

    def __post_init__(self) -> None:
        if not (self.noise > 0.0 and 0.0 < self.rate <= 1.0 and self.steps >= 0):
            raise ValueError(f"a charge of {self.steps} steps at rate {self.rate!r}, noise {self.noise!r}")

    def times(self, updates: int) -> Charge:
        """Return the charge of so many updates."""
        return Charge(self.noise, self.rate, self.steps * updates)


def charge_of(privacy: SamplePrivacy, samples: int, batch: int, steps: int) -> Charge:
    """Return an update's charge where ``samples`` are trained on, ``batch`` of them expected a step."""
    return Charge(privacy.noise, min(1.0, batch / max(1, samples)), steps)


def epsilon(charges: Iterable[Charge], delta: float) -> float:
    """Return epsilon of all charges together; 0 of none."""
    total: dict[int, float] = {}
    for charge in charges:
        for order, value in round_rdp(charge.noise, charge.rate).items() if charge.steps else ():
            total[order] = total.get(order, 0.0) + charge.steps * value
    return epsilon_of(total, delta)[0] if total else 0.0


def sigma_of(noise: float) -> int:
    """Return the noise's standard deviation in whole numbers."""
    return math.ceil(noise * UNIT)


def sample_words(privacy: SamplePrivacy, charge: Charge, rounds: int) -> str:
    """What a job's updates tell of one sample, for its owner."""
    found = epsilon([charge.times(rounds)], privacy.delta)
    return (
        f"({found:.3g}, {privacy.delta:g})-DP at most for {rounds} updates of {charge.steps} steps: unit one "
        f"sample, with or without it, drawn by itself with {charge.rate:.3g}, its gradient clipped to "
        f"{privacy.clip:g}, noise {privacy.noise:g} added on this machine, so it trusts nobody else; "
        "not covered: how many samples there are, times and traffic, other jobs on the same data"
    )
